"""`move`: one array of all ranks from one partition to another.

    before   ├──── rank 0 ────┼─ rank 1 ─┼─ rank 2 ─┤
    after    ├─ rank 0 ─┼──── rank 1 ────┼─ rank 2 ─┤

Ranges follow the ranks' order in both, so what a rank sends lies in its old range in the order of its targets, and what
it receives lies in its new one in the order of its sources: an all_to_all from one array into the other, without a copy
on the way. On the host what stays on its rank is copied there, and the rest alone goes through the group, first to
lower ranks, then to higher ones. Values on a disk take turns in memory, a piece of every rank's old range at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerort.comm import Group
from zerort.comm.arrays import address_of_any
from zerort.engine.residence.chunked_array import LEAST_NUMEL, ChunkedArray
from zerort.errors import StorageError
from zerort.layout import Partition, Range
from zerort.typing import Array

__all__ = ["common", "move", "moved_numel"]


def moved_numel(before: Partition, after: Partition) -> int:
    """Return how many elements change their rank."""
    return before.numel - sum(common(before.of(rank), after.of(rank)).numel for rank in range(before.size))


def move(
    group: Group,
    old: ChunkedArray,
    new: ChunkedArray,
    before: Partition,
    after: Partition,
    *,
    most: int | None,
    name: str,
) -> StorageError | None:
    """Fill ``new`` with what ``old`` holds on all ranks. Every rank calls this.

    Args:
        group: The ranks.
        old: This rank's range of ``before``.
        new: This rank's range of ``after``.
        before: Which rank has which range now.
        after: Which rank is to have which.
        most: Elements that pass through memory at once, where values are on a disk; None: all are in memory.
        name: What to call this in errors and traces.

    Returns:
        What a disk of this rank had against it; the other ranks do not know.
    """
    ranges = [before.of(rank) for rank in range(group.size)]
    if most is None and old.device.in_host_memory:
        _move_in_memory(group, old.memory, new.memory, before, after, name=name)
        return None
    if most is None:
        counts = _counts(ranges, after)
        # gpu-wait: rows_that_have_moved_are_there_for_the_next_gather
        group.all_to_all(old.memory, out=new.memory, counts=counts, name=name).wait()
        return None
    each = max(most // group.size, LEAST_NUMEL)
    error: StorageError | None = None
    sent = np.empty(min(each, old.size), old.dtype)
    for at in range(-(-max(before.counts) // each)):
        pieces = [Range(min(r.first + at * each, r.stop), min(r.first + (at + 1) * each, r.stop)) for r in ranges]
        error = _pass(group, old, new, pieces, ranges[group.rank].first, after, sent, name=name, error=error)
    return error


def _move_in_memory(group: Group, old: Array, new: Array, before: Partition, after: Partition, *, name: str) -> None:
    """Copy what stays on this rank, and have the ranks exchange the rest, without an array in between.

    What goes to lower ranks lies at the beginning of an old range and arrives at the end of a new one; what goes to
    higher ranks lies at the end, and arrives at the beginning: two exchanges of slices.
    """
    rank, size = group.rank, group.size
    mine, own = before.of(rank), after.of(rank)
    stays = common(mine, own)
    source = old[stays.first - mine.first : stays.stop - mine.first]
    target = new[stays.first - own.first : stays.stop - own.first]
    if stays.numel and address_of_any(source) != address_of_any(target):  # not where it is to be
        target[:] = source
    counts = _counts([before.of(source) for source in range(size)], after)
    down = [[one if target < source else 0 for target, one in enumerate(row)] for source, row in enumerate(counts)]
    up = [[one if target > source else 0 for target, one in enumerate(row)] for source, row in enumerate(counts)]
    if any(map(any, down)):
        sent, received = sum(down[rank]), sum(row[rank] for row in down)
        # not-gpu: between arrays of the host
        group.all_to_all(old[:sent], out=new[len(new) - received :], counts=down, name=name).wait()
    if any(map(any, up)):
        sent, received = sum(up[rank]), sum(row[rank] for row in up)
        # not-gpu: between arrays of the host
        group.all_to_all(old[len(old) - sent :], out=new[:received], counts=up, name=name).wait()


def _pass(
    group: Group,
    old: ChunkedArray,
    new: ChunkedArray,
    pieces: Sequence[Range],
    first: int,
    after: Partition,
    sent: Array,
    *,
    name: str,
    error: StorageError | None,
) -> StorageError | None:
    """Move one piece of every rank's old range. A rank whose disk has failed sends zeros: all will hear of it."""
    mine, own = pieces[group.rank], after.of(group.rank)
    source = sent[: mine.numel]
    if error is None:
        try:
            old.read(mine.first - first, source).wait()  # not-gpu: between the host and a disk
        except StorageError as caught:
            error = caught
    parts = [common(piece, own) for piece in pieces]
    received = np.empty(sum(part.numel for part in parts), old.dtype)
    # not-gpu: between arrays of the host
    group.all_to_all(source, out=received, counts=_counts(pieces, after), name=name).wait()
    try:
        begin = 0
        for part in parts:
            if part.numel and error is None:
                # not-gpu: between the host and a disk
                new.write(part.first - own.first, received[begin : begin + part.numel]).wait()
            begin += part.numel
    except StorageError as caught:
        error = caught
    return error


def _counts(pieces: Sequence[Range], after: Partition) -> list[list[int]]:
    """Return how many elements of each rank's piece go to each rank."""
    return [[common(piece, after.of(rank)).numel for rank in range(after.size)] for piece in pieces]


def common(left: Range, right: Range) -> Range:
    """Return the elements that are in both ranges; where the second begins, if there are none.

    >>> common(Range(0, 10), Range(4, 20)), common(Range(0, 10), Range(30, 40)).numel
    (Range(first=4, stop=10), 0)
    """
    first = max(left.first, right.first)
    return Range(first, max(min(left.stop, right.stop), first))
