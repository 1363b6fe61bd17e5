"""`reduced_alike`: whether all ranks of a mesh have reduced the same units, before any of them waits for a reduction.

Reductions are fired unit by unit, over the ranks that share a copy of the model and, behind that, over the copies
(`zerort.buffer.bucket`). A rank that has reduced a unit which another has not would wait for a call that never comes,
while that one waits for it in the step. So all ranks meet first; who lacks calls that others have made meets them with
a complaint for each (decision 0079).
"""

from __future__ import annotations

import contextlib

import numpy as np

from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.errors import ZerortError

__all__ = ["reduced_alike"]


def reduced_alike(context: Context, units: Units) -> bool:
    """Say whether every rank has reduced the same units; if not, no reduction is under way any more. All call this.

    With one copy of the model there is one group: there ranks meet with different calls, and are told so.
    """
    replicate, shard = context.mesh.replicate, context.mesh.shard
    if replicate is None:
        return True
    mine = np.array([unit.reduced for unit in units.values()], np.int64)
    # not-gpu: between arrays of the host
    everyone = context.world.all_gather(mine, name="reduced").wait().reshape(context.world.size, len(units))
    if (everyone == everyone[0]).all():
        return True
    buckets = [[one.bucket for one in unit.sections if one.bucket is not None] for unit in units.values()]
    calls = everyone @ np.array([sum(bucket.fires for bucket in some) for some in buckets], np.int64)
    by_copy = calls.reshape(replicate.size, shard.size)
    made = by_copy[replicate.rank, shard.rank]
    for group, most in ((shard, by_copy[replicate.rank].max()), (replicate, by_copy[:, shard.rank].max())):
        for _ in range(most - made if group.runs_ahead else 0):  # else what was fired has ended, or is not fired yet
            group.complain("Expected the same units to be reduced on every rank, got others. See the error of step().")
    for bucket in (one for some in buckets for one in some):
        with contextlib.suppress(ZerortError):  # of a call that another rank did not make: the step says which
            bucket.wait()  # not-gpu: the end of calls that failed
    return False
