"""Whether every rank has room for the shards that it is to hold, asked before anything moves.

    section      1        2        3            new shards stand beside old ones, one section at a time
    memory    old 1 + new 1, then new 1 + old 2 + new 2, …

What is counted is the most that is needed at once beyond what is held now. Of a column with addresses for all ranks'
ranges, what stays on its rank is there already (decision 0179).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from zerort.comm.agreed import agreed, gather_json
from zerort.config import format_bytes
from zerort.device.host.memory import available_nbytes, left_of_limits
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.rebalance.moving import common
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.rows.table import touched_nbytes
from zerort.errors import DeviceMemoryError, PlanError
from zerort.layout import Partition, Placement

__all__ = ["columns_by_kind", "expect_room", "width_of"]


@dataclass(slots=True)
class _Peak:
    """Bytes beyond those that are held now, in one kind of memory."""

    more: int = 0
    """When the sections so far have moved."""
    most: int = 0
    """At the worst moment."""

    def pass_by(self, old: int, new: int, *, made: int, keeps_old: bool = False) -> None:
        """Count a section: memory is made for its new shard, or for a part of it, then the old one is given back."""
        self.most = max(self.most, self.more + made)
        self.more += new if keeps_old else new - old


def expect_room(context: Context, sections: Sequence[Section], partitions: Sequence[Partition]) -> None:
    """Raise on every rank unless each has room for its part of new partitions. Every rank calls this.

    Raises:
        PlanError: A host has too little memory, or a process may not have more.
        DeviceMemoryError: A GPU has too little.
        StorageError: A disk has too little.
    """
    memory, host, disk = _Peak(), _Peak(), _Peak()
    for section, partition in zip(sections, partitions, strict=True):
        rank = context.mesh.shard.rank
        numel, stays = partition.counts[rank], common(section.partition.of(rank), partition.of(rank)).numel
        for peak, columns in zip((memory, host, disk), columns_by_kind(context, section), strict=True):
            old = sum(one.size * one.dtype.itemsize for one in columns)
            new = int(numel * sum(width_of(one, section) for one in columns))
            there = int(stays * sum(width_of(one, section) for one in columns if one.reserve is not None))
            # Files of the last step keep their room until the next one is kept.
            keeps_old = peak is disk and context.options.last_step is not None
            peak.pass_by(old, new, made=new - there, keeps_old=keeps_old)
        if section.table is not None and section.table.late is not None:
            was, touched = section.table.touched.nbytes, touched_nbytes(numel // section.table.width)
            memory.pass_by(was, touched, made=touched)
    what = "shards that are cut anew"
    if any(section.tiers.streams for section in sections):
        host.most += 2 * context.backings.chunk_numel * 8  # on their way
        context.storage.prepare(disk.most, what=what)
    on_host = memory.most + host.most if context.device.in_host_memory else host.most
    _expect_memory(context, on_host, on_gpu=0 if context.device.in_host_memory else memory.most)


def columns_by_kind(
    context: Context, section: Section
) -> tuple[list[ChunkedArray], list[ChunkedArray], list[ChunkedArray]]:
    """Return what of a section is made anew on another partition: in the device's memory, a host's, on a disk."""
    found = [section.parameters.array] if section.parameters.at_rest is None else []
    if section.state is not None and context.plan.state.placement is Placement.SHARDED:
        found += section.state.columns.values()
    found += section.offloaded_gradient
    return (
        [one for one in found if one.in_reach],
        [one for one in found if not one.is_stored and not one.in_reach],
        [one for one in found if one.is_stored],
    )


def width_of(column: ChunkedArray, section: Section) -> Fraction:
    """Return the bytes per element."""
    is_parameter = column is section.parameters.array
    return section.parameters.width if is_parameter else Fraction(column.dtype.itemsize)


def _expect_memory(context: Context, on_host: int, *, on_gpu: int) -> None:
    """Raise on every rank unless hosts, processes and GPUs have so much left."""
    here = socket.gethostname()
    told = gather_json(context.world, [here, on_host], name="rebalance")
    together = sum(need for name, need in told if name == here)
    cure = "Nothing was moved. Give this rank a smaller weight, or another plan."
    with agreed(context.world, "rebalance"):
        for need, left, whose in (
            (together, available_nbytes(), f"of memory on {here} for the new shards of all its ranks"),
            (on_host, left_of_limits(), f"of memory that rank {context.rank} may still have for its new shards"),
        ):
            if left is not None and need > left:
                raise PlanError(f"Expected {format_bytes(need)} {whose}, got {format_bytes(left)}. {cure}")
        if on_gpu:
            free, _ = context.device.memory()
            if on_gpu > free:
                raise DeviceMemoryError(
                    f"Expected {format_bytes(on_gpu)} of {context.device.name} for the new shards of rank "
                    f"{context.rank}, got {format_bytes(free)}. {cure}"
                )
