"""`recut`: all sections on other partitions, between steps; see `Runtime.rebalance`.

    agree     the same weights on every rank, no gradients, no unit gathered         nothing has changed
    room      every rank has room for what it is to hold                             nothing has changed
    move      section by section: make the new shard, fill it, exchange both         a section moves whole or not at all

Each section knows its own partition, so one that could not move (a disk has failed) trains on beside those that have:
whatever ends a rebalance, parameters and state are those of the last update (decision 0135).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from zerort import trace
from zerort.comm.agreed import agreed, expect_same, gather_json, raise_together
from zerort.config import Tier
from zerort.data.share import check_weights
from zerort.engine.context import Context
from zerort.engine.model.gather import wait_for_gathers
from zerort.engine.model.registration import reserve_slots
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.rebalance.moving import move, moved_numel
from zerort.engine.rebalance.room import expect_room
from zerort.engine.report import Rebalanced
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.errors import CallError, StorageError, UnitStateError, ZerortError
from zerort.layout import Partition, Placement

__all__ = ["check_between_steps", "recut"]

_MEASURABLE: Final = 1 << 20
"""Bytes of a move from which on it says how fast the next one will be."""


def recut(context: Context, units: Units, weights: Sequence[float] | None) -> Rebalanced:
    """Cut all sections anew by the ranks' weights; None: alike. Every rank calls this."""
    began = time.perf_counter()
    shard = context.mesh.shard
    with agreed(context.world, "rebalance"):
        given = None if weights is None else check_weights(_plain(weights), parts=shard.size, what="shard_weights")
        check_between_steps(units)
        context.update_stream.wait_written()
        context.update_stream.check_written()
    expect_same(context.world, None if given is None else list(given), what="shard_weights", error=CallError)
    sections = list(units.sections())
    partitions = [_partition(context, section, given) for section in sections]
    moving = [
        (section, partition)
        for section, partition in zip(sections, partitions, strict=True)
        if section.partition.counts != partition.counts
    ]
    nbytes = sum(_moved_nbytes(context, section, partition) for section, partition in moving)
    if moving:
        expect_room(context, *map(list, zip(*moving, strict=True)))
    try:
        with contextlib.nullcontext() if context.planner is None else context.planner.transaction():
            if context.planner is not None:
                context.planner.recut(given)
            for section in sections:  # ranges that have yet to travel do so as they were cut
                section.parameters.refresh()
            wait_for_gathers(context, sections)
            context.update_stream.reset()
            with trace.span("rebalance"):
                for section, partition in moving:
                    _move_section(context, section, partition)
    except ZerortError:
        _reserve(context, units)  # those that have moved train on, and may need more than before
        raise
    context.run.cut = context.run.cut.with_weights(given)
    context.run.sizes = context.run.sizes.with_weights(given)
    context.run.shares = None
    _reserve(context, units)
    context.pace.restart()
    seconds = max(gather_json(context.world, time.perf_counter() - began, name="rebalance"))
    if nbytes >= _MEASURABLE:
        context.run.move_speed = nbytes / seconds
    return Rebalanced(changed=bool(moving), shard_weights=given, nbytes=nbytes, seconds=seconds)


def _reserve(context: Context, units: Units) -> None:
    for unit in units.values():
        reserve_slots(context, unit)


def _plain(weights: Sequence[float]) -> Any:
    """Return numbers of NumPy as Python's; what is none stays for the check to refuse."""
    return weights.tolist() if isinstance(weights, np.ndarray) else weights


def check_between_steps(units: Units) -> None:
    """Raise if a unit is gathered, or has gradients that wait for their step."""
    held = [unit.name for unit in units.values() if unit.is_gathered]
    if held:
        raise UnitStateError(
            f"Expected all units released before rebalance(), got {', '.join(held)} gathered. Leave their blocks first."
        )
    if any(unit.has_gradients or unit.gradient_trouble for unit in units.values()):
        raise UnitStateError(
            "Expected rebalance() between steps, got gradients since the last one. Call rt.step() first, or "
            "rt.discard_gradients()."
        )


def _partition(context: Context, section: Section, weights: Sequence[float] | None) -> Partition:
    """Return how a section is to be cut. Its layout stays, with what padding it has."""
    size = context.mesh.shard.size
    return Partition.build(section.layout.numel, size, weights=weights, alignment=section.granule)


def _moved_nbytes(context: Context, section: Section, partition: Partition) -> int:
    """Return the bytes that change their rank, over all ranks."""
    widths = [section.parameters.width] if section.parameters.at_rest is None else []
    if section.state is not None and context.plan.state.placement is Placement.SHARDED:
        widths += [Fraction(one.dtype.itemsize) for one in section.state.columns.values()]
    return int(moved_numel(section.partition, partition) * sum(widths))


def _move_section(context: Context, section: Section, partition: Partition) -> None:
    """Have one section on another partition, on all ranks or on none. Every rank calls this."""
    made = section.recut(partition)
    try:
        with agreed(context.world, "rebalance", catching=ZerortError):
            made.make_parts(section)
            for column in _own_columns(made, beside=section):
                column.create()
        error = _fill(context, section, made)
        if section.tiers.streams:  # else nothing can have failed
            raise_together(context.world, error, name="rebalance")
    except ZerortError:
        _give_back(context, made, beside=section)
        raise
    section.swap_parts(made)
    _give_back(context, made, beside=section)


def _fill(context: Context, old: Section, new: Section) -> StorageError | None:
    """Bring values to where they are to be, and return what a disk of this rank had against it."""
    errors: list[StorageError | None] = []

    def fill(source: ChunkedArray, out: ChunkedArray, before: Partition, after: Partition, tier: Tier) -> None:
        most = context.backings.chunk_numel if tier is Tier.NVME else None
        errors.append(move(context.mesh.shard, source, out, before, after, most=most, name=f"move {source.name}"[:60]))

    source, out = old.parameters, new.parameters
    if source.at_rest is None:
        fill(source.shard, out.shard, source.stored_partition, out.stored_partition, old.tiers.parameter)
    if old.state is not None and new.state is not None and new.state is not old.state:
        new.state.steps.update(old.state.steps)
        new.state.pruned.update(old.state.pruned)
        for kind, entry in old.state.entries.items():
            if entry.whole:
                new.state.entries[kind] = entry
            else:
                there = new.state.entries[kind]
                fill(entry.column, there.column, entry.partition, there.partition, old.tiers.state)
        if old.state.master is not None and new.state.master is not None:
            fill(old.state.master, new.state.master, old.partition, new.partition, old.tiers.state)
    if old.table is not None and new.table is not None and old.table.late is not None:
        mine, made = old.table, new.table
        fill(mine.touched_column, made.touched_column, mine.partition, made.partition, Tier.DEVICE)
    return next((error for error in errors if error is not None), None)


def _own_columns(section: Section, *, beside: Section) -> list[ChunkedArray]:
    """Return what a section holds that the other one does not."""
    theirs = {id(column) for column in beside.columns}
    shared = [] if section.parameters.at_rest is None else [id(section.parameters.array)]
    return [column for column in section.columns if id(column) not in {*theirs, *shared}]


def _at_same_addresses(column: ChunkedArray, section: Section) -> ChunkedArray | None:
    """Return what another section has of the same values at the same addresses."""
    return next((one for one in section.columns if one.reserve is not None and one.reserve is column.reserve), None)


def _give_back(context: Context, section: Section, *, beside: Section) -> None:
    """Let go of what a section holds and the other one does not."""
    for column in _own_columns(section, beside=beside):
        with contextlib.suppress(StorageError):  # a file that cannot be deleted goes with the runtime's others
            column.delete()
        other = _at_same_addresses(column, beside)
        if other is not None:
            column.give_back(keep=other)
        elif isinstance(column.memory, np.ndarray):
            context.host.free(column.memory)
    if section.parameters.at_rest is None and section.parameters is not beside.parameters:
        section.parameters.close_range()
