"""`measure_norm`: the norm of all summed gradients, from sums over fixed blocks, the same bits on every rank."""

from __future__ import annotations

import math

import numpy as np

from zerort.comm.agreed import gather_json
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.residence.gradients import SummedGradient, measure
from zerort.layout import Placement
from zerort.optim import norm_of
from zerort.typing import Array

__all__ = ["measure_norm"]


def measure_norm(
    context: Context, sections: list[Section], gradients: list[SummedGradient]
) -> tuple[float, str, list[Array]]:
    """Return the norm of the summed gradients, where they are not finite, as a phrase, and each section's sums."""
    sums = measure(gradients, block=context.norm_block, device=context.device)
    if context.plan.state.placement is Placement.SHARDED and context.mesh.shard.size > 1:
        sums = _gather_sums(context, sections, sums)
    if context.norm_block is not None:  # the sums of padding go: how many there are depends on the number of ranks
        blocks = [-(-section.layout.end // context.norm_block) for section in sections]
        sums = [one[:count] for one, count in zip(sums, blocks, strict=True)]
    norm = norm_of(np.concatenate(sums)) if sums else 0.0
    if math.isfinite(norm):
        return norm, "", sums
    # Every rank's own gradients may be finite and their sum not: then only the owner of the sum knows where.
    mine = ""
    for section, gradient in zip(sections, gradients, strict=True):
        at = gradient.first_nonfinite()
        if at >= 0 and section.state is not None:
            first = section.state.owned.first + at
            mine = repr(section.layout.overlaps(first, first + 1)[0].extent.name)
            break
    named = [one for one in gather_json(context.world, mine, name="nonfinite") if one]
    return norm, f"{named[0]}, summed over the ranks" if named else "some tensor", sums


def _gather_sums(context: Context, sections: list[Section], sums: list[Array]) -> list[Array]:
    """Return every section's sums over all ranks, in the order of its elements, whoever computed them."""
    counts = [[_sums_of(context, section, rank) for section in sections] for rank in range(context.mesh.shard.size)]
    # not-gpu: between arrays of the host
    flat = context.mesh.shard.all_gather(np.concatenate(sums), counts=[sum(row) for row in counts], name="norm").wait()
    parts: list[list[Array]] = [[] for _ in sections]
    cursor = 0
    for row in counts:
        for index, count in enumerate(row):
            parts[index].append(flat[cursor : cursor + count])
            cursor += count
    return [np.concatenate(part) for part in parts]


def _sums_of(context: Context, section: Section, rank: int) -> int:
    """Return how many sums of squares ``rank`` has for ``section``."""
    block = context.norm_block
    return 1 if block is None else -(-section.partition.counts[rank] // block)
