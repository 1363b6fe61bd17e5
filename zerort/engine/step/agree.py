"""`agree`: what all ranks have to know before a step changes anything, exchanged once (`Record`).

    failed      some rank cannot go on: all raise its error
    rates       learning rates, which have to be the same everywhere
    reduced     units whose gradients are on their way: on every rank, or on none
    present     tensors for which some rank has a gradient
    nonfinite   the first tensor whose gradient holds NaN or infinity
    stop        signals that ask the run to stop
    weight      what the sum of all gradients is divided by
    more        whether any rank has another batch (`Runtime.join`)
    slowest     the rank that took longest, and its time (`Pace`)
    peak        the most memory that a rank took (`Peaks`), where a history is kept

A binding adds facts of its own in `Attachment.agree`.
"""

from __future__ import annotations

from signal import Signals
from typing import Any, NamedTuple

import numpy as np

from zerort.buffer import unit_title
from zerort.comm.agreed import raise_together
from zerort.engine.context import Context
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.report import Slowest
from zerort.engine.sizing.counted import memory_of
from zerort.engine.step.facts.rates import rates_of
from zerort.engine.step.facts.record import Record
from zerort.engine.step.facts.weight import Weight, add_weight, batch_of, total_weight, weight_problem
from zerort.errors import UnitStateError
from zerort.typing import Array

__all__ = ["StepFacts", "agree"]


class StepFacts(NamedTuple):
    """What the ranks agree on before anything moves; the same on every rank."""

    present: set[str]
    """Tensors for which some rank has a gradient."""
    nonfinite: str
    """Where NaN or infinity was found, as a phrase; empty if nowhere."""
    rates: dict[int, float]
    """The learning rate of every optimizer in use, by its `id`."""
    stop: str
    """What asked a rank to stop, and which; empty if nothing did."""
    weight: Weight
    """What the sum of all gradients is divided by."""
    slowest: Slowest | None
    """Which rank took longest since the step before; None in the first step."""


def agree(context: Context, units: Units, *, weight: Any, objection: Exception | None) -> StepFacts:
    """Exchange what the step needs to know, or raise the same error on every rank. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        units: All units.
        weight: What this rank's gradients weigh; None: each micro-step counts alike.
        objection: What this rank has against the step, if nothing worse is found.
    """
    tensors, present, first = _gradients_of(units)
    rates, error = rates_of(context, units)
    join = context.run.join
    problem = (
        _problem_of(context, units)
        or error
        or weight_problem(context, weight)
        or join.problem(context.micro_steps)
        or objection
    )
    record = Record()
    try:
        for one in context.run.attachments:
            one.agree(record)
    except Exception as raised:
        context.mesh.complain(str(raised))  # the other ranks are on their way into the exchange
        raise
    record.add("failed", problem is not None, "or")
    record.add("rates", np.array([*rates.values()], np.float64), "each")
    record.add("reduced", np.array([unit.reduced for unit in units.values()], bool), "each")
    record.add("present", np.array(present, bool), "or")
    record.add("nonfinite", first, "each")
    record.add("stop", context.stopping.number, "each")
    add_weight(context, record, weight)
    record.add("more", join.has_more, "or")
    context.pace.add_time(record)
    if context.peaks is not None:
        layout = memory_of(context, units).in_memory
        context.peaks.add(record, layout=layout, batch=batch_of(context, weight) / context.micro_steps)
    heard = record.exchange(context.world, name="step")
    context.run.meetings += 1
    join.anyone = bool(heard["more"][0])
    if heard["failed"].any():
        raise_together(context.world, problem, name="step")
    _expect_same_rates(heard["rates"])
    _expect_reduced_alike(list(units.values()), heard["reduced"])
    total = total_weight(context, heard["weight"])
    if context.peaks is not None:
        context.peaks.hear(heard, units, plan=str(context.budget or context.plan), ranks=context.world.size)
    return StepFacts(
        present={name for name, here in zip(tensors, heard["present"], strict=True) if here},
        nonfinite=next(
            (f"{tensors[at]!r} on rank {rank}" for rank, at in enumerate(heard["nonfinite"][:, 0]) if at >= 0), ""
        ),
        rates=rates,
        stop=next(
            (f"{Signals(number).name} on rank {rank}" for rank, number in enumerate(heard["stop"][:, 0]) if number), ""
        ),
        weight=total,
        slowest=context.pace.hear(heard),
    )


def _gradients_of(units: Units) -> tuple[list[str], list[bool], int]:
    """Return all trained tensors, whether this rank has a gradient of each, and the first one that is not finite.

    That is an index, or -1.
    """
    tensors: list[str] = []
    present: list[bool] = []
    first = -1
    for section in units.trained_sections():
        if section.bucket is None:
            continue
        nonfinite = [bucket.nonfinite for bucket in section.buckets]  # asked once: a GPU has to be waited for
        seen = frozenset[str]().union(*(bucket.seen for bucket in section.buckets))
        for extent in section.layout.extents:
            if extent.name in nonfinite and first < 0:
                first = len(tensors)
            tensors.append(extent.name)
            present.append(extent.name in seen)
    return tensors, present, first


def _problem_of(context: Context, units: Units) -> Exception | None:
    """Return why this rank cannot take a step, if it cannot."""
    held = [unit.name for unit in units.values() if unit.is_gathered]
    if held:
        return UnitStateError(
            f"Expected all units released before step(), got {', '.join(held)} gathered. Leave their blocks first."
        )
    trouble = next((unit.gradient_trouble for unit in units.values() if unit.gradient_trouble), "")
    if not trouble and not any(unit.reduced for unit in units.values()):
        cure = "Call unit.reduce(gradients) first." if units else 'Register parameters first: rt.register("block0", …).'
        trouble = f"Expected gradients before step(), got none since the last one. {cure}"
    if trouble:
        return UnitStateError(trouble)
    refused = next((section.storage_error for section in units.trained_sections() if section.storage_error), None)
    return refused or context.update_stream.failure()


def _expect_same_rates(told: Array) -> None:
    bits = told.view(np.int64)  # of NaN, too
    odd = np.flatnonzero((bits != bits[0]).any(1))
    if odd.size:
        raise UnitStateError(
            f"Expected the same learning rates on every rank, got {told[0][:3]} on rank 0 and {told[odd[0]][:3]} on "
            f"rank {odd[0]}. A schedule may depend on the update alone, and every rank calls rt.set_lr alike."
        )


def _expect_reduced_alike(units: list[Unit], reduced: Array) -> None:
    for unit, ranks in zip(units, reduced.T, strict=True):
        if 0 < ranks.sum() < len(ranks):
            raise UnitStateError(
                f"Expected {unit_title(unit.name)} to be reduced on every rank or on none, got it on ranks "
                f"{', '.join(map(str, np.flatnonzero(ranks)))} only. Call unit.reduce({{}}) where it was not used."
            )
