"""`ReleasedParameter`: what stands in a module while its unit is not gathered.

It has the name, shape, dtype and device of the parameter, so that counting, listing and printing work, and one element
of memory. Whoever computes with it gets `StaleViewError`, which names the parameter and the cure (decision 0080).

facts        pass: shape, dtype, is_leaf, …                       conversions   pass if they change nothing: .to("cpu")
gradients    are None: it warns between backward and the step     requires_grad off and on, for what was trainable
values       are refused, except in the forward of a module that owns the parameter: then its unit is gathered for it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final, NoReturn, Protocol

import torch

from zerort.errors import CallError, StaleViewError
from zerort_torch.parameters.guard import refuse_new_optimizer

__all__ = ["ReleasedParameter"]

_VALUES: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # attributes that are tensors
_FACTS: Final = frozenset(
    {
        "dim",
        "ndimension",
        "size",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "get_device",
        "has_names",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_conj",
        "is_neg",
        "is_inference",
        "is_shared",
        "is_signed",
        "is_same_size",
        "storage_offset",
        "__len__",
        "__hash__",
        "_has_compatible_shallow_copy_type",
    }
)  # methods that tell what a tensor is, not what it holds
_CONVERSIONS: Final = frozenset(
    {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "pin_memory"}
)


class _Gathers(Protocol):
    """A unit, as far as a released parameter knows it."""

    def acquire_part(self) -> None:
        """Gather the unit, until as many `release_part`."""

    def release_part(self) -> None:
        """End one `acquire_part`."""


class ReleasedParameter(torch.nn.Parameter):
    """The stand-in of a parameter whose unit is released.

    Args:
        name: Full name of the parameter.
        like: What it stands for.
    """

    full_name: str
    live: torch.nn.Parameter | None = None
    """The parameter that it stands for."""
    unit: _Gathers | None = None
    """What gathers it."""
    owners: Collection[torch.nn.Module] = ()
    """The modules that it stands in."""
    on_gradient: Callable[[], None] = staticmethod(lambda: None)
    """Called when somebody asks for its gradient, or drops it."""

    def __new__(cls, name: str, like: torch.Tensor) -> ReleasedParameter:
        """Make one with a single element of memory, whatever the shape."""
        self: ReleasedParameter = super().__new__(cls, _one_element(like), like.requires_grad)
        self.full_name = name
        self.trainable = like.requires_grad
        return self

    def __init__(self, name: str, like: torch.Tensor) -> None:
        pass  # nn.Parameter's own takes other arguments

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let facts through, and refuse everything else."""
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        me = args[0] if args else None
        if not isinstance(me, ReleasedParameter):
            return _compute(func, args, kwargs or {}, what=name)
        if name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            return me._set_requires_grad(*args[1:], **(kwargs or {}))
        if name in _CONVERSIONS:
            return _converted(me, func, args[1:], kwargs or {})
        if name == "__set__" and attribute == "data" and args[1] is me:
            return None  # what Module.to() and its like do with a conversion that changed nothing
        if attribute == "grad":
            me.on_gradient()
        elif attribute == "is_leaf":
            refuse_new_optimizer(me.full_name, sys._getframe(1))
        fact = name in _FACTS or (name == "__get__" and attribute not in _VALUES)
        empty = name in ("__set__", "__delete__") and attribute == "grad" and args[-1] is not me
        if fact or empty:
            return super().__torch_function__(func, types, args, kwargs or {})  # nn.Parameter's: as a plain tensor
        return _compute(func, args, kwargs or {}, what=name)

    def _set_requires_grad(self, requires_grad: Any = True) -> ReleasedParameter:  # noqa: FBT002 (torch's signature)
        if requires_grad and not self.trainable:
            raise frozen_error(self.full_name)
        self.mirror_requires_grad(requires_grad=bool(requires_grad))
        if self.live is not None:
            self.live.requires_grad_(bool(requires_grad))
        return self

    def mirror_requires_grad(self, *, requires_grad: bool) -> None:
        """Show what the live parameter has."""
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(requires_grad)

    def stand_in(self) -> torch.Tensor:
        """Return a tensor of this shape that takes one element: what a live parameter lies on while it is released."""
        return _one_element(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Say what it stands for."""
        return f"ReleasedParameter({self.full_name!r}, {tuple(self.shape)}, {self.dtype}: released)"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CallError(
            f"Expected one copy of a sharded model, got copy.deepcopy of {self.full_name!r}. Copy the model before it "
            "is sharded, or build another one and load zt.full_state_dict(model) into it."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickling_error(repr(self.full_name))


def pickling_error(what: str) -> CallError:
    """Return the error for ``torch.save(model)`` and its like."""
    return CallError(
        f"Expected a sharded model to stay in its process, got pickling of {what}. Save zt.full_state_dict(model), or "
        "the shards: rt.save(path)."
    )


def frozen_error(name: str) -> CallError:
    """Return the error for a parameter that is to be trained and was frozen when it was sharded."""
    return CallError(
        f"Expected {name!r} to stay frozen, as it was at zt.shard(model, rt), got requires_grad=True: it has neither "
        "room for a gradient nor state. Shard the model with it trainable; then requires_grad_(False) and "
        "requires_grad_(True) turn its training off and on."
    )


def _one_element(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that takes one element; of NaN, if it can: what is computed with it by mistake shows."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def _converted(
    me: ReleasedParameter, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ReleasedParameter | str:
    """Return the parameter itself if a conversion changes neither its dtype nor its device."""
    with torch._C.DisableTorchFunctionSubclass():
        sample = torch.empty(0, dtype=me.dtype, device=me.device)
        options = {name: value for name, value in kwargs.items() if name != "memory_format"}
        result = func(sample, *args, **options)
    if isinstance(result, str):
        return result  # .type() without a dtype says which it is
    if result.dtype == me.dtype and result.device == me.device and not kwargs.get("copy"):
        return me
    raise CallError(
        f"Expected {me.full_name!r} to stay {me.dtype} on {me.device} after sharding, got a conversion to "
        f"{result.dtype} on {result.device}. Convert the model before zt.shard(model, rt); `with "
        "zt.gathered(module):` gives its values, to copy."
    )


def _compute(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, what: str) -> Any:
    """Compute with the live parameters if a module that owns one is in its forward: it was called without its block.

    Raises:
        StaleViewError: No such module is.
    """
    found = list(dict.fromkeys(_released_in([*args, *kwargs.values()])))
    if not found or not all(one.unit is not None and _owner_computes(one) for one in found):
        raise _released_error(found, what=what)
    units = list(dict.fromkeys(one.unit for one in found if one.unit is not None))
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.release_part)
            unit.acquire_part()
        return func(*_live(args), **_live(kwargs))


def _released_in(values: Iterable[Any]) -> Iterator[ReleasedParameter]:
    for one in values:
        if isinstance(one, ReleasedParameter):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _released_in(one)
        elif isinstance(one, Mapping):
            yield from _released_in(one.values())


def _live(value: Any) -> Any:
    """Return arguments with every released parameter in them live."""
    if isinstance(value, ReleasedParameter):
        return value.live
    if isinstance(value, (list, tuple)):
        parts = [_live(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: _live(one) for key, one in value.items()}
    return value


def _frames_of_modules() -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield the modules whose methods are under way, with the methods' names, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            yield owner, frame.f_code.co_name
        frame = frame.f_back


def _owner_computes(one: ReleasedParameter) -> bool:
    return any(name == "forward" and module in one.owners for module, name in _frames_of_modules())


def _released_error(found: Sequence[ReleasedParameter], *, what: str) -> StaleViewError:
    if not found:
        return StaleViewError(f"Expected parameters to be used while gathered, got {what}() after their release.")
    _, method = next(_frames_of_modules(), (None, "forward"))
    cure = "" if method == "forward" else f"register {method}(): zt.register_forward_method(module, {method!r}), "
    return StaleViewError(
        f"Expected {found[0].full_name!r} to be used while its unit is gathered, got {what}() of it after its "
        f"release. Use it in its module's forward, {cure}or inside `with zt.gathered(module):`."
    )
