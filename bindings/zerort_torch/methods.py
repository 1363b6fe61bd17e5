"""`register_forward_method`: methods besides forward that compute with a sharded module's parameters."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from zerort.errors import CallError
from zerort_torch.sharding import sharding_of, units_within

__all__ = ["register_forward_method"]


def register_forward_method(module: torch.nn.Module, name: str) -> None:
    """Have a method gather parameters as forward does: ``zt.register_forward_method(model, "encode")``.

    Only methods that use parameters themselves need it, ``x @ self.weight``: a module that a method calls gathers its
    own. Call it after `shard`, on every rank; registering twice is fine.

    Args:
        module: A sharded model, or a part of one.
        name: The method's name.

    Raises:
        CallError: The module is not sharded, or has no such method.
    """
    sharding = sharding_of(module)
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, torch.nn.Module):
        raise CallError(f"Expected the name of a method of {type(module).__name__}, got {name!r}.")
    if name == "forward" or getattr(method, "gathers_parameters", False):
        return
    around = sharding.around.get(module) or [
        (unit.acquire, unit.release)
        for unit in units_within(module)
        if any(place in {module, *module.children()} for weight in unit.weights for place, _ in weight.places)
    ]

    @functools.wraps(method)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for enter, leave in around:
                stack.callback(leave)  # first: an enter that fails is ended, too, as after a forward
                enter()
            return method(*args, **kwargs)

    gathering.gathers_parameters = True  # type: ignore[attr-defined]
    setattr(module, name, gathering)
    sharding.handles.append(_Registered(module, name))


@dataclass(frozen=True, slots=True)
class _Registered:
    """A registered method, which can be given back as a hook can."""

    module: torch.nn.Module
    name: str

    def remove(self) -> None:
        """Have the module call its own method again."""
        vars(self.module).pop(self.name, None)
