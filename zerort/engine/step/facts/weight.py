"""What a step divides the sum of all gradients by: the weights of all ranks, exchanged with the step's other facts.

    rt.step(weight=tokens)      sums of losses, divided by all ranks' tokens: the mean over tokens, however they lie
    rt.step(weight=[12, 7])     the same, one for each micro-batch: those that are computed again count nothing
    rt.step()                   each rank and micro-step counts alike: the mean over ranks and micro-steps
    reduction="sum"             nothing is divided

A mean of ranks' means is another number where ranks have different numbers of tokens (decision 0118).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from zerort.engine.batches.counted import counted, has_spare_leaf, is_several
from zerort.engine.context import Context
from zerort.engine.step.facts.record import Record
from zerort.errors import CallError

__all__ = ["Weight", "add_weight", "batch_of", "total_weight", "weight_problem"]


class Weight(NamedTuple):
    """What a step is divided by, the same on every rank."""

    denominator: float
    """What the sum of all gradients is divided by, beside the loss scale."""
    given: float | None
    """The sum of all ranks' ``weight=``; None if the step has none."""


def weight_problem(context: Context, weight: Any) -> Exception | None:
    """Return what is wrong with this rank's weight, if anything is."""
    if weight is None:
        return None
    if context.options.reduction == "sum":
        return CallError(
            "Expected no weight= with reduction='sum', which divides by nothing, got one. Open the runtime with "
            "reduction='mean'."
        )
    values, here = _numbers(weight), f"on rank {context.rank}"
    if not all(value is not None and 0 <= value < math.inf for value in values):
        return CallError(
            f"Expected weight= to be a finite number of at least 0, or a list of them, got {weight!r} {here}. Give the "
            "number of tokens or samples whose losses this rank has summed; 0 if it has none."
        )
    if is_several(weight) and len(values) != context.micro_steps:
        return CallError(
            f"Expected weight= to have a number for each of {context.micro_steps} micro-batches, got {len(values)} "
            f"{here}. Give one for each of rt.micro_batches, in a list."
        )
    if not is_several(weight) and (has_spare_leaf(context) or len(context.run.join.owns) > 1):
        return CallError(
            f"Expected weight= to have a number for each of {context.micro_steps} micro-batches where ranks may "
            f"compute one again, got {weight!r} for all of them {here}. Keep them in a list: weights = [len(rows[at]) "
            "for at in rt.micro_batches]; rt.step(weight=weights). What is computed again counts nothing then."
        )
    return None


def _numbers(weight: Any) -> list[float | None]:
    return [_number(one) for one in (weight if is_several(weight) else [weight])]


def _number(weight: Any) -> float | None:
    """Return a weight as a number: also of NumPy, or of a tensor with one element; None if it is none."""
    try:
        return None if isinstance(weight, (bool, str, bytes)) else float(weight)
    except (TypeError, ValueError, OverflowError):
        return None


def add_weight(context: Context, record: Record, weight: Any) -> None:
    """Add this rank's weight to what all ranks exchange; without one, its micro-steps. Repeated ones weigh nothing.

    What is not a number here was found by `weight_problem`.
    """
    counts = counted(context)
    if weight is not None and not is_several(weight):  # of the whole step
        mine = (_number(weight) or 0.0) * any(counts)
    else:
        values = [1.0] * len(counts) if weight is None else _numbers(weight)
        mine = sum(value or 0.0 for value, counts_here in zip(values, counts, strict=False) if counts_here)
    record.add("weight", [float(mine), float(weight is not None)], "sum")


def batch_of(context: Context, weight: Any) -> float:
    """Return how large this rank's batch is: the samples that it took of orders, or else its weight; 0: not known."""
    samples = sum(cursor.due for cursor in context.run.cursors.values())
    return float(samples or (0 if weight is None else sum(value or 0.0 for value in _numbers(weight))))


def total_weight(context: Context, heard: Any) -> Weight:
    """Return what a step is divided by, or raise the same error on every rank.

    Args:
        context: What the runtime's parts share.
        heard: The sum over all ranks of what `add_weight` has added.
    """
    total, given = float(heard[0]), int(heard[1])
    if 0 < given < context.world.size:
        raise CallError(
            f"Expected step(weight=) on every rank or on none, got it on {given} of {context.world.size}. A rank "
            "without data gives weight=0."
        )
    if context.options.reduction == "sum":
        return Weight(1.0, None)
    if not 0 < total < math.inf:
        raise CallError(
            f"Expected a finite weight above 0 over all ranks, got {total}. Leave out a step for which no rank has "
            "data: rt.discard_gradients()."
        )
    return Weight(total, total if given else None)
