"""Hooks on a parameter (`Tensor.register_hook`) that were made before `shard`: they go on, on the live parameter.

Both tensors share one table of hooks, so that the handles that the user holds remove them as before. A hook sees this
rank's gradient of one micro-step, before it is summed.
"""

from __future__ import annotations

from typing import Any

import torch

from zerort.errors import CallError
from zerort_torch.model.finding import FoundUnit

__all__ = ["carry_over", "check_hooks", "hooks_of"]


def check_hooks(name: str, parameter: torch.nn.Parameter) -> None:
    """Refuse hooks that want the gradient after it was accumulated: it has left the parameter by then.

    Raises:
        CallError: It has such hooks.
    """
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise CallError(
            f"Expected {name!r} without post-accumulate-grad hooks, got one: its gradient goes into the sum over ranks "
            "as soon as it is there. To change gradients: tensor.register_hook(…); to update: zr.open(optimizer=…)."
        )


def hooks_of(found: FoundUnit) -> list[Any]:
    """Return the hooks of a unit's parameters, in order."""
    return [parameter.value._backward_hooks for parameter in found.parameters]


def carry_over(hooks: Any, to: torch.nn.Parameter) -> None:
    """Have ``to`` call what `hooks_of` found."""
    if hooks:
        to._backward_hooks = hooks
