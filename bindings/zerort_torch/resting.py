"""`RestingParameter`: what stands in a module while its unit is not gathered.

It has the name, shape, dtype and device of the parameter, so that counting, listing and printing work, and one element
of memory. Whoever computes with it gets `StaleViewError`, which names the parameter and the cure (decision 0080).

facts        pass: shape, dtype, is_leaf, …                       conversions   pass if they change nothing: .to("cpu")
gradients    are None: it warns between backward and the step     requires_grad off and on, for what was trainable
values       are refused
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from zerort.errors import CallError, StaleViewError
from zerort_torch.guard import refuse_new_optimizer

__all__ = ["RestingParameter"]

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


class RestingParameter(torch.nn.Parameter):
    """The stand-in of a parameter whose unit is released.

    Args:
        name: Full name of the parameter.
        like: What it stands for.
    """

    full_name: str
    live: torch.nn.Parameter | None = None
    """The parameter that it stands for."""
    on_gradient: Callable[[], None] = staticmethod(lambda: None)
    """Called when somebody asks for its gradient, or drops it."""

    def __new__(cls, name: str, like: torch.Tensor) -> RestingParameter:
        """Make one with a single element of memory, whatever the shape."""
        self: RestingParameter = super().__new__(cls, _one_element(like), like.requires_grad)
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
        if not isinstance(me, RestingParameter):
            raise _refusal(args, kwargs or {}, what=name)
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
        raise _refusal(args, kwargs or {}, what=name)

    def _set_requires_grad(self, requires_grad: Any = True) -> RestingParameter:  # noqa: FBT002 (torch's signature)
        if requires_grad and not self.trainable:
            raise frozen_refusal(self.full_name)
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
        return f"RestingParameter({self.full_name!r}, {tuple(self.shape)}, {self.dtype}: released)"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CallError(
            f"Expected one copy of a sharded model, got copy.deepcopy of {self.full_name!r}. Copy the model before it "
            "is sharded, or build another one and load zt.full_state_dict(model) into it."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickling_refusal(repr(self.full_name))


def pickling_refusal(what: str) -> CallError:
    """Return the error for ``torch.save(model)`` and its like."""
    return CallError(
        f"Expected a sharded model to stay in its process, got pickling of {what}. Save zt.full_state_dict(model), or "
        "the shards: rt.save(path)."
    )


def frozen_refusal(name: str) -> CallError:
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
    me: RestingParameter, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RestingParameter | str:
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


def _refusal(args: Sequence[Any], kwargs: Mapping[str, Any], *, what: str) -> StaleViewError:
    flat = list(args) + list(kwargs.values())
    while flat:
        one = flat.pop(0)
        if isinstance(one, RestingParameter):
            return StaleViewError(
                f"Expected {one.full_name!r} to be used while its unit is gathered, got {what}() of it after its "
                "release. Use it in its module's forward, or inside `with zt.gathered(module):`."
            )
        if isinstance(one, (list, tuple)):
            flat += one
        elif isinstance(one, Mapping):
            flat += one.values()
    return StaleViewError(f"Expected parameters to be used while gathered, got {what}() after their release.")
