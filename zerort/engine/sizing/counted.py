"""`memory_of`: the bytes that a runtime holds on this rank, counted from its arrays."""

from __future__ import annotations

from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.engine.report import MemoryReport

__all__ = ["memory_of"]


def memory_of(context: Context, units: Units) -> MemoryReport:
    """Return how many bytes this rank holds, by purpose."""
    sections, slots = list(units.sections()), context.slots
    return MemoryReport(
        parameter=sum(section.parameters.nbytes for section in sections),
        gradient=sum(section.bucket.nbytes for section in sections if section.bucket is not None),
        state=sum(state.nbytes for state in units.states()),
        buckets=slots.buckets.nbytes + slots.summed.nbytes,
        gathered=slots.gathered.nbytes,
        gathered_peak=slots.gathered.peak_nbytes,
        streaming=context.tiers.memory_nbytes + context.stage.nbytes,
        nvme=context.tiers.resting_nbytes,
    )
