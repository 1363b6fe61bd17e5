"""`mean_of`: the mean of a number over all micro-batches of a step, such as their losses, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerort.comm.agreed import agreed
from zerort.engine.batches.counted import counted, is_several
from zerort.engine.context import Context
from zerort.errors import CallError
from zerort.typing import Array

__all__ = ["mean_of"]


def mean_of(context: Context, values: Any) -> float:
    """Return the mean over all ranks' micro-batches; see `Runtime.mean`. Every rank calls this.

    What a rank computed again because others had more does not count. Numbers are summed in the order of their
    micro-batches, whoever computed them, so that the bits are the same on any number of ranks.
    """
    mine: Array = np.zeros((2, context.micro_steps))
    with agreed(context.world, "mean"):
        mine[:] = _numbers(context, values), counted(context)
    # not-gpu: between arrays of the host
    told = context.world.all_gather(mine.reshape(-1), name="mean").wait().reshape(context.world.size, *mine.shape)
    order = np.argsort([context.micro_batches_of(rank) for rank in range(context.world.size)], axis=None, kind="stable")
    values, counts = told[:, 0].reshape(-1)[order], told[:, 1].reshape(-1)[order]
    found = values[counts > 0]
    if not found.size:
        raise CallError("Expected a batch of some rank's own to take the mean of, got only repeated ones of rt.join().")
    return float(found.mean())


def _numbers(context: Context, values: Any) -> list[float]:
    try:
        several = values if is_several(values) else [values]
        numbers = [float(one.item() if hasattr(one, "item") else one) for one in several]  # a tensor's, with a graph
    except (RuntimeError, TypeError, ValueError) as error:
        raise CallError(f"Expected numbers to take the mean of, got {values!r}.") from error
    if len(numbers) != context.micro_steps:
        raise CallError(
            f"Expected one number for each of this rank's {context.micro_steps} micro-batches, got {len(numbers)}. "
            "Keep them in a list: losses = [compute(at) for at in rt.micro_batches]; rt.mean(losses)."
        )
    return numbers
