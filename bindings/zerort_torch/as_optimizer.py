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

from zerort import Optimizer, Runtime, StepReport
from zerort.engine.binding import check_number
from zerort.errors import CallError
from zerort_torch.backward.gradients import gradients_of

__all__ = ["RuntimeOptimizer", "as_optimizer"]


def as_optimizer(rt: Runtime) -> RuntimeOptimizer:
    """Return a runtime as a `torch.optim.Optimizer`, whose ``step()`` is ``rt.step()``. Call it after `shard`.

    Args:
        rt: The runtime; every rank drives it alike.

    Raises:
        CallError: No trainable model is sharded yet.
    """
    gradients_of(rt).binding.check_open("as_optimizer")
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
        self._binding = binding = self._gradients.binding
        self._settings: list[Optimizer] = []  # of each group
        self._is_made = False
        groups: dict[int, dict[str, Any]] = {}
        for unit in self._gradients.units:
            for weight in unit.trained.values():
                settings = unit.optimizer_of(weight.local)
                if id(settings) not in groups:
                    self._settings.append(settings)
                    groups[id(settings)] = {"params": [], "lr": binding.rate_of(settings)}
                groups[id(settings)]["params"].append(weight.released)
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
        if hasattr(self, "found_inf"):  # GradScaler.step sets it, after unscale_ too
            del self.found_inf, self.grad_scale  # which it does not do after an error
            raise CallError(
                "Expected loss scaling by the runtime, got a torch.amp.GradScaler. Open it with "
                "zr.open(loss_scale=zr.LossScale()), and call (loss * rt.loss_scale).backward()."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for settings, group, shown in zip(self._settings, self.param_groups, self._shown, strict=True):
            if group["lr"] != shown:  # else the runtime has its way: rt.set_lr, or what was loaded
                rate = float(group["lr"])
                try:
                    check_number("the learning rate of a parameter group", rate)
                except CallError as error:
                    self._binding.complain(error)  # the other ranks are on their way into the step
                    raise
                self._binding.set_rate(settings, rate)
        self.report = self._rt.step()
        for settings, group in zip(self._settings, self.param_groups, strict=True):
            group["lr"] = self._binding.rate_of(settings)
        self._shown = [group["lr"] for group in self.param_groups]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 (torch's signature)
        """Drop the gradients since the last step. Every rank calls this.

        The first call after a step does nothing on a rank that has no gradients, as in a loop that clears them for its
        next batch. A further one drops them on all ranks, whoever has some; in a loop of ``rt.join`` the batch is done
        with then, unless no rank had any.
        """
        if self._gradients.pending or self._gradients.is_cleared:
            self._binding.clear_gradients()
        else:
            self._gradients.is_cleared = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come later: a runtime's are given to ``zr.open(param_groups=…)``."""
        if self._is_made:
            _refuse_groups()
        super().add_param_group(param_group)


def _refuse_groups() -> NoReturn:
    raise CallError(
        "Expected parameter groups when the runtime is opened, got add_param_group() afterwards. Give them by name: "
        'zr.open(param_groups=[zr.ParameterGroup("*.bias", weight_decay=0.0)]).'
    )
