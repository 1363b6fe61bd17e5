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
        gradient=sum(section.gradient_nbytes for section in sections),
        state=sum(state.nbytes for state in units.states())
        + sum(one.table.nbytes for one in sections if one.table is not None),
        buckets=slots.buckets.nbytes
        + slots.summed.nbytes
        + slots.sent.nbytes
        + sum(one.residual.nbytes for one in sections if one.residual is not None),
        gathered=slots.gathered.nbytes + slots.codes.nbytes,
        host_copy=sum(section.parameters.host_copy_nbytes for section in sections),
        gathered_peak=slots.gathered.peak_nbytes,
        gathered_apart=context.ledger.apart.peak,
        streaming=context.update_stream.nbytes + context.staging.nbytes,
        nvme=context.storage.nbytes,
    )
