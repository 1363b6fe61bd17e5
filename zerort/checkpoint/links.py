"""Take files over as they are: values that rest on the disk of the checkpoint get a second name, and nothing is copied.

    <scratch>/block0…exp_avg%2F3.chunk ── hard link ──> <checkpoint>/shard-00001-00017.<token>.bin

Its extents are pieces of tensors, as in any data file. Their checksums are put together from those that the store keeps
of every grain; only a grain in which a piece begins or ends is read. May import: layout, native, checkpoint.*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerort.checkpoint.directory import data_name
from zerort.checkpoint.extents import EXTENT_NBYTES
from zerort.checkpoint.manifest import DataFile
from zerort.checkpoint.value import Linkable, Sums, Value
from zerort.layout import itemsize
from zerort.native import crc32c, crc32c_combine
from zerort.typing import Array

__all__ = ["LinkedExtent", "Links", "linkable", "make_links"]


class LinkedExtent(NamedTuple):
    """A piece of one tensor in a linked file."""

    value: int
    """The index of its value."""
    name: str
    """The tensor."""
    file: int
    """Which of the rank's linked files."""
    offset: int
    first: int
    """The piece's first element, counted in the tensor."""
    numel: int
    crc32c: int


class Links(NamedTuple):
    """What one rank has linked."""

    files: list[DataFile]
    extents: list[LinkedExtent]


def linkable(values: Sequence[Value], directory: str) -> dict[int, Sequence[int]]:
    """Return which values can be linked into a directory, by index: where their files begin, in elements."""
    found = {}
    for index, value in enumerate(values):
        cuts = value.mine.cuts_in(directory) if isinstance(value.mine, Linkable) else None
        if cuts is not None:
            found[index] = cuts
    return found


def make_links(values: Sequence[Value], cuts: dict[int, Sequence[int]], *, path: str, rank: int, token: str) -> Links:
    """Link files of this rank into a checkpoint's directory.

    Args:
        values: What is saved.
        cuts: What `linkable` found.
        path: The directory.
        rank: This rank.
        token: The save's.

    Raises:
        StorageError: The file system refused, or an earlier write had failed.
    """
    links = Links([], [])
    for index, marks in cuts.items():
        value = values[index]
        mine = value.mine
        assert isinstance(mine, Linkable)
        width, begin = itemsize(value.layout.dtype), value.partition.of(rank).first
        for at, (first, last) in enumerate(pairwise(marks)):
            if first == last:
                continue
            name = data_name(rank, token, link=len(links.files))
            nbytes, sums = mine.link(at, os.path.join(path, name))
            piece = _Summed(mine, first, last - first, sums)
            for extent, in_extent, in_range in value.layout.overlaps(begin + first, begin + last):
                for low, high in _cut(in_range.start * width, in_range.stop * width):
                    start = in_extent.start + low // width - in_range.start
                    where = (len(links.files), low, start, (high - low) // width)
                    links.extents.append(LinkedExtent(index, extent.name, *where, piece.sum(low, high)))
            links.files.append(DataFile(name, nbytes))
    return links


def _cut(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Cut a piece of a tensor into extents: (first byte, one past the last)."""
    for at in range(low, high, EXTENT_NBYTES):
        yield at, min(at + EXTENT_NBYTES, high)


class _Summed:
    """The checksums of any bytes of one file."""

    def __init__(self, mine: Linkable, first: int, numel: int, sums: Sums) -> None:
        self._mine = mine
        self._first = first
        self._nbytes = numel * mine.dtype.itemsize
        self._sums = sums
        self._read: tuple[int, Array] | None = None  # the grain that was read last

    def sum(self, low: int, high: int) -> int:
        """Return the checksum of the bytes from ``low`` to ``high``."""
        total, grain = 0, self._sums.grain
        while low < high:
            at = low // grain
            begin, end = at * grain, min((at + 1) * grain, self._nbytes)
            stop = min(high, end)
            if (low, stop) == (begin, end):
                part = int(self._sums.crc32c[at])
            else:
                part = crc32c(self._grain(at, begin, end)[low - begin : stop - begin])
            total = crc32c_combine(total, part, stop - low)
            low = stop
        return total

    def _grain(self, at: int, begin: int, end: int) -> Array:
        if self._read is None or self._read[0] != at:
            width = self._mine.dtype.itemsize
            out = np.empty((end - begin) // width, self._mine.dtype)
            self._mine.read(self._first + begin // width, out).wait()
            self._read = at, out.view(np.uint8)
        return self._read[1]
