"""A torch optimizer over a sharded model's parameters would update memory that nobody reads: it is refused.

when it is made       after `shard`: torch asks each parameter whether it is a leaf (see `released.py`)
at its step           made before `shard`, over the parameters that the model came with
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from zerort.errors import CallError

__all__ = ["guard_optimizers", "refuse_new_optimizer"]

_taken: Any = WeakIdKeyDictionary()  # names of parameters that are a runtime's, and of those that models came with
_watching: list[Any] = []


def guard_optimizers(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Have torch's optimizers refuse a step over ``parameters``, given with their names: a runtime updates them."""
    for name, parameter in parameters:
        _taken[parameter] = name
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check))


def refuse_new_optimizer(name: str, caller: FrameType | None) -> None:
    """Raise if ``caller`` is a torch optimizer that takes the parameter ``name`` in; torch has no hook for that.

    Raises:
        CallError: It is.
    """
    if caller is not None and caller.f_code.co_name == "add_param_group":
        optimizer = caller.f_locals.get("self")
        if isinstance(optimizer, torch.optim.Optimizer) and not _steps_the_runtime(optimizer):
            raise _foreign_optimizer_error(optimizer, name, what="")


def _check(optimizer: Any, args: object, kwargs: object) -> None:
    if _steps_the_runtime(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _taken:
                raise _foreign_optimizer_error(optimizer, _taken[parameter], what=".step()")


def _steps_the_runtime(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "steps_the_runtime", False)


def _foreign_optimizer_error(optimizer: torch.optim.Optimizer, name: str, *, what: str) -> CallError:
    kind = type(optimizer).__name__
    return CallError(
        f"Expected sharded parameters to be updated by rt.step(), got {kind}{what} over {name!r}. Open the runtime "
        f"with an optimizer instead: zr.open(optimizer=zt.optimizer(torch.optim.{kind}, …)). Code that wants a torch "
        "optimizer (a scheduler, a framework) takes zt.as_optimizer(rt)."
    )
