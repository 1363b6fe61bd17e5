"""`reduced_alike`: whether all ranks of a mesh have reduced the same units, before any of them waits for a reduction.

Reductions are fired unit by unit, over the ranks that share a copy of the model and, behind that, over the copies
(`zerort.buffer.bucket`). A rank that has reduced a unit which another has not would wait for a call that never comes,
while that one waits for it in the step. So all ranks meet first; who lacks calls that others have made meets them with
a complaint for each (decision 0079); calls over copies are counted by their group (decision 0198).
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
    mine = np.array([replicate.made, *(fact for unit in units.values() for fact in (unit.has_gradients, *unit.calls))])
    # not-gpu: between arrays of the host
    told = context.world.all_gather(mine, name="reduced").wait().reshape(context.world.size, -1)
    made, everyone = told[:, 0].reshape(replicate.size, shard.size), told[:, 1:].reshape(context.world.size, -1, 3)
    if (everyone == everyone[0]).all():
        return True
    within = everyone[:, :, 1].sum(1).reshape(replicate.size, shard.size)[replicate.rank]
    lacking = (
        (shard, within.max() - within[shard.rank]),
        (replicate, made[:, shard.rank].max() - replicate.made),  # a copy may have dropped gradients that it has summed
    )
    for group, count in lacking:
        for _ in range(count if group.runs_ahead else 0):  # else what was fired has ended, or is not fired yet
            group.complain("Expected the same units to be reduced on every rank, got others. See the error of step().")
    for bucket in (bucket for section in units.trained_sections() for bucket in section.buckets):
        with contextlib.suppress(ZerortError):  # of a call that another rank did not make: the step says which
            bucket.wait()  # not-gpu: the end of calls that failed
    return False
