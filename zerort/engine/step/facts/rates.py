"""Learning rates: as the optimizers and their schedules say, or as somebody has set them by hand (`Runtime.set_lr`).

rates_of, rate_of                            what an update uses
set_lr                                       another one, until it is given back
rates_by_name, check_rates, restore_rates    those set by hand, in a checkpoint: by tensor
"""

from __future__ import annotations

from collections.abc import Mapping

from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.errors import CallError, CheckpointError
from zerort.optim import Optimizer, ParameterGroup, check_number

__all__ = ["check_rates", "rate_of", "rates_by_name", "rates_of", "restore_rates", "set_lr"]


def rate_of(context: Context, optimizer: Optimizer, *, update: int) -> float:
    """Return the learning rate of an optimizer in an update: what was set by hand, or what the optimizer says."""
    override = context.run.lr_overrides.get(id(optimizer))
    return optimizer.lr_at(update) if override is None else override


def rates_of(context: Context, units: Units) -> tuple[dict[int, float], Exception | None]:
    """Return the next update's learning rate of every optimizer in use, by its `id`, and what a schedule raised."""
    optimizers = {id(one): one for state in units.states() for one in state.optimizers}
    try:
        return {key: rate_of(context, one, update=context.run.updates + 1) for key, one in optimizers.items()}, None
    except Exception as error:  # a schedule is the user's: nothing has changed yet, so all ranks can still stop
        return dict.fromkeys(optimizers, 0.0), error


def set_lr(context: Context, lr: float | None, *, group: ParameterGroup | None) -> None:
    """Set learning rates from the next update on; see `Runtime.set_lr`. No communication."""
    if lr is not None:
        check_number("lr", lr)
    if group is None:
        followers = [settings for settings, one in _groups(context) if one is None or not one.has_own_lr]
    else:
        followers = [settings for settings, one in _groups(context) if one is group]
        if not followers:
            raise CallError(
                f"Expected one of the parameter groups that the runtime was opened with, got {group!r}. Keep the "
                "object that you give to zr.open(param_groups=[…])."
            )
    for settings in followers:
        if lr is None:
            context.run.lr_overrides.pop(id(settings), None)
        else:
            context.run.lr_overrides[id(settings)] = float(lr)


def _groups(context: Context) -> list[tuple[Optimizer, ParameterGroup | None]]:
    """Return all settings there are, each with its parameter group."""
    return list(zip(context.settings, (None, *context.param_groups), strict=True))


# -- in checkpoints ----------------------------------------------------------------------------------------------------


def rates_by_name(context: Context, units: Units) -> dict[str, float]:
    """Return the learning rates that were set by hand, by tensor: a checkpoint's groups need not be a loader's."""
    overrides = context.run.lr_overrides
    return {
        name: overrides[id(state.optimizer_of(name))]
        for state in units.states()
        for name in state.steps
        if id(state.optimizer_of(name)) in overrides
    }


def check_rates(units: Units, saved: Mapping[str, float]) -> None:
    """Refuse rates set by hand that differ between tensors which share their settings here.

    Raises:
        CheckpointError: They do.
    """
    found: dict[int, tuple[str, float | None]] = {}
    for state in units.states() if saved else ():
        for name in state.steps:
            first, rate = found.setdefault(id(state.optimizer_of(name)), (name, saved.get(name)))
            if saved.get(name) != rate:
                raise CheckpointError(
                    f"Expected one learning rate for parameters that share their settings, got {_said(rate)} for "
                    f"{first!r} and {_said(saved.get(name))} for {name!r}: they were saved in different parameter "
                    "groups. Open the runtime with those groups, or take the parameters alone: "
                    "rt.load(path, optimizer=False)."
                )


def _said(rate: float | None) -> str:
    return "the schedule's" if rate is None else f"{rate!r}"


def restore_rates(context: Context, units: Units, saved: Mapping[str, float]) -> None:
    """Take over what `rates_by_name` returned, and forget what was set since."""
    context.run.lr_overrides.clear()
    for state in units.states() if saved else ():
        for name in state.steps:
            if name in saved:
                context.run.lr_overrides[id(state.optimizer_of(name))] = float(saved[name])
