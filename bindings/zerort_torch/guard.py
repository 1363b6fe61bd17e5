"""A torch optimizer over a sharded model's parameters would update memory that nobody reads: it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from zerort.errors import CallError
from zerort_torch.resting import RestingParameter

__all__ = ["guard_optimizers"]

_taken: Any = WeakIdKeyDictionary()  # parameters that models came with
_watching: list[Any] = []


def guard_optimizers(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have torch's optimizers refuse a step over ``parameters``, which were handed to a runtime."""
    for parameter in parameters:
        _taken[parameter] = True
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Any, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, RestingParameter) or parameter in _taken:
                raise CallError(
                    f"Expected sharded parameters to be updated by rt.step(), got {type(optimizer).__name__}.step() "
                    f"over one of shape {list(parameter.shape)}. Open the runtime with an optimizer instead: "
                    f"zr.open(optimizer=zt.optimizer(torch.optim.{type(optimizer).__name__}, …))."
                )
