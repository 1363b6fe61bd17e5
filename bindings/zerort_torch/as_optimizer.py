"""`as_optimizer`: a runtime in the form of a `torch.optim.Optimizer`, for schedulers and frameworks that drive one.

    optimizer = zt.as_optimizer(rt)                        after zt.shard(model, rt)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, …)
    loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()

The runtime's own optimizer does the update. A group's ``lr`` is what that one says until somebody sets another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zerort.engine import Runtime
from zerort.engine.report import StepReport
from zerort.errors import CallError
from zerort.optim import Optimizer
from zerort.optim.checks import check_number
from zerort_torch.gradients import gradients_of
from zerort_torch.unit import TorchUnit

__all__ = ["RuntimeOptimizer", "as_optimizer"]


def as_optimizer(rt: Runtime) -> RuntimeOptimizer:
    """Return a runtime as a `torch.optim.Optimizer`, whose ``step()`` is ``rt.step()``. Call it after `shard`.

    Args:
        rt: The runtime; every rank drives it alike.

    Raises:
        CallError: No trainable model is sharded yet.
    """
    rt.context.check_open("as_optimizer")
    return RuntimeOptimizer(rt)


class RuntimeOptimizer(torch.optim.Optimizer):
    """A runtime as a torch optimizer. Made by `as_optimizer`.

    ``param_groups`` has one group for each of the runtime's settings (`zerort.ParameterGroup`). ``state_dict()`` holds
    the groups' learning rates alone: moments are in ``rt.save(path)``.
    """

    steps_the_runtime = True
    """Why sharded parameters may stand in it."""
    _step_supports_amp_scaling = True  # GradScaler then calls `step`, which refuses it with the cure

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._gradients = gradients_of(rt)
        self._settings: list[Optimizer] = []  # of each group
        self._is_made = False
        groups: dict[int, dict[str, Any]] = {}
        overrides = rt.context.run.lr_overrides
        for unit in self._gradients.units:
            for weight in unit.trained.values():
                settings = _settings_of(unit, weight.section, weight.full)
                if id(settings) not in groups:
                    self._settings.append(settings)
                    rate = overrides[id(settings)] if id(settings) in overrides else settings.lr_at(rt.updates + 1)
                    groups[id(settings)] = {"params": [], "lr": rate}
                groups[id(settings)]["params"].append(weight.resting)
        if not groups:
            raise CallError("Expected zt.shard(model, rt) before zt.as_optimizer(rt), got a runtime without a model.")
        super().__init__(list(groups.values()), {})
        self._is_made = True
        self._shown = [group["lr"] for group in self.param_groups]
        self.report: StepReport | None = None
        """What the last step reported."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do ``rt.step()``; every rank calls this. Its report is in `report`.

        Args:
            closure: Computes the loss and its gradients first, if it is given; its result is returned.
        """
        if getattr(self, "grad_scale", None) is not None:
            raise CallError(
                "Expected loss scaling by the runtime, got a torch.amp.GradScaler. Open it with "
                "zr.open(loss_scale=zr.LossScale()), and call (loss * rt.loss_scale).backward()."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for settings, group, shown in zip(self._settings, self.param_groups, self._shown, strict=True):
            if group["lr"] != shown or id(settings) in self._rt.context.run.lr_overrides:
                rate = float(group["lr"])
                try:
                    check_number("the learning rate of a parameter group", rate)
                except CallError as error:
                    self._rt.complain(error)  # the other ranks are on their way into the step
                    raise
                self._rt.context.run.lr_overrides[id(settings)] = rate
        self.report = self._rt.step()
        for settings, group in zip(self._settings, self.param_groups, strict=True):
            if id(settings) not in self._rt.context.run.lr_overrides:
                group["lr"] = settings.lr_at(self._rt.updates + 1)
        self._shown = [group["lr"] for group in self.param_groups]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 (torch's signature)
        """Drop the gradients since the last step, if there are any; then every rank calls this."""
        if self._gradients.pending:
            self._rt.discard_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come later: a runtime's are given to ``zr.open(param_groups=…)``."""
        if self._is_made:
            _refuse_groups()
        super().add_param_group(param_group)


def _settings_of(unit: TorchUnit, section: int, full: str) -> Optimizer:
    assert unit.unit is not None
    state = unit.unit.sections[section].state
    assert state is not None
    return state.optimizer_of(full)


def _refuse_groups() -> NoReturn:
    raise CallError(
        "Expected parameter groups when the runtime is opened, got add_param_group() afterwards. Give them by name: "
        'zr.open(param_groups=[zr.ParameterGroup("*.bias", weight_decay=0.0)]).'
    )
