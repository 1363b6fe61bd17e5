"""`RestingParameter`: what stands in a module while its unit is not gathered.

It has the name, shape, dtype and device of the parameter, so that counting, listing and printing work, and one element
of memory. Whoever computes with it gets `StaleViewError`, which names the parameter and the cure (decision 0080).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from zerort.errors import CallError, StaleViewError

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
    }
)  # methods that tell what a tensor is, not what it holds


class RestingParameter(torch.nn.Parameter):
    """The stand-in of a parameter whose unit is released.

    Args:
        name: Full name of the parameter.
        like: What it stands for.
    """

    full_name: str

    def __new__(cls, name: str, like: torch.Tensor) -> RestingParameter:
        """Make one with a single element of memory, whatever the shape."""
        self: RestingParameter = super().__new__(cls, _one_element(like), like.requires_grad)
        self.full_name = name
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
        if name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            return _keep_requires_grad(*args, **(kwargs or {}))
        fact = name in _FACTS or (name == "__get__" and attribute not in _VALUES)
        empty = name in ("__set__", "__delete__") and attribute == "grad" and args[-1] is not args[0]
        if fact or empty:
            return super().__torch_function__(func, types, args, kwargs or {})  # nn.Parameter's: as a plain tensor
        raise _refusal(args, kwargs or {}, what=name)

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
        raise CallError(
            f"Expected a sharded model to stay in its process, got pickling of {self.full_name!r}. Save "
            "zt.full_state_dict(model), or the shards: rt.save(path)."
        )


def _one_element(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _keep_requires_grad(me: RestingParameter, requires_grad: Any = True) -> RestingParameter:  # noqa: FBT002 (torch's)
    if requires_grad != me.requires_grad:
        raise CallError(
            f"Expected requires_grad of {me.full_name!r} to stay {me.requires_grad} after sharding, got "
            f"{requires_grad}. A frozen parameter has neither gradient nor state: freeze and unfreeze before "
            "zt.shard(model, rt)."
        )
    return me


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
