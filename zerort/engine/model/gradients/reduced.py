"""`reduced_gradients`: a step's gradients as whole tensors, for somebody who wants to look at it before."""

from __future__ import annotations

import numpy as np

from zerort.comm.agreed import agreed
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.layout import Placement
from zerort.typing import Array

__all__ = ["reduced_gradients"]


def reduced_gradients(context: Context, section: Section) -> dict[str, Array]:
    """Return a section's gradients by full name: divided by the number of micro-batches, unscaled, not clipped.

    A step with ``weight=`` divides by the weight instead. They are new arrays of the host; zeros where no rank had a
    gradient. Every rank calls this, once the section's last reduction was started.
    """
    mine = section.finish_reduce().column
    with agreed(context.world, "reduced gradients"):
        if section.storage_error is not None:
            raise section.storage_error
        part = np.concatenate([context.device.fetch(mine.read_chunk(at)) for at in range(len(mine.cuts) - 1)])
    if context.plan.state.placement is Placement.SHARDED and context.mesh.shard.size > 1:
        # not-gpu: between arrays of the host
        part = context.mesh.shard.all_gather(part, counts=section.partition.counts, name=section.name).wait()
    scale = part.dtype.type(1.0 / (context.loss_scale * context.denominator))
    return {extent.name: (part[extent.slice] * scale).reshape(extent.shape) for extent in section.layout.extents}
