"""Take files over as they are: values that rest on the disk of the checkpoint get a second name, and nothing is copied.

    <scratch>/block0…exp_avg%2F3.chunk ── hard link ──> <checkpoint>/shard-00001-00017.<token>.bin

Of a value over several disks, those files that lie on the checkpoint's are linked; the rest is written like what is in
memory. A linked file's extents are pieces of tensors, as in any data file. Their checksums are put together from those
that the store keeps of every grain; only a grain in which a tensor begins or ends is read (decision 0032).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zerort.checkpoint.files.directory import data_name
from zerort.checkpoint.format.manifest import DataFile
from zerort.checkpoint.value import Linkable, LinkableFile, Value
from zerort.layout import itemsize
from zerort.native import crc32c, crc32c_combine
from zerort.storage.files.blocks import BLOCK_NBYTES, GRAIN_NBYTES, run_workers
from zerort.storage.files.extents import FileExtent, LinkedFile
from zerort.typing import Array

__all__ = ["LinkedExtent", "Links", "linkable", "make_links", "ranges_of"]


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


def linkable(values: Sequence[Value], directory: str) -> dict[int, Sequence[LinkableFile]]:
    """Return the files that can be linked into a directory, by the index of the value that they hold some of."""
    found = {
        index: one.mine.linkable_files(directory) for index, one in enumerate(values) if isinstance(one.mine, Linkable)
    }
    return {index: files for index, files in found.items() if files}


def ranges_of(files: Sequence[LinkableFile], *, width: int) -> list[list[int]]:
    """Return which elements are in files: first, one past the last; in order, and put together where they meet.

    Args:
        files: Of one value.
        width: Bytes of an element.
    """
    found: list[list[int]] = []
    for first, last in sorted(
        (file.first + one.first // width, file.first + one.stop // width)
        for file in files
        for one in file.extent.stretches
    ):
        if found and found[-1][1] == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found


def make_links(
    values: Sequence[Value],
    files: Mapping[int, Sequence[LinkableFile]],
    *,
    path: str,
    rank: int,
    token: str,
    threads: int,
) -> Links:
    """Link files of this rank into a checkpoint's directory.

    Args:
        values: What is saved.
        files: What `linkable` found.
        path: The directory.
        rank: This rank.
        token: The save's.
        threads: How many sync and link at once: a disk syncs many files in not much more time than one.

    Raises:
        StorageError: The file system refused, or an earlier write had failed.
    """
    tasks = [(index, file) for index, some in files.items() for file in some]
    made: dict[int, DataFile] = {}
    extents: dict[int, list[LinkedExtent]] = {}

    def link(at: int, buffer: Array) -> None:
        index, file = tasks[at]
        name = data_name(rank, token, link=at)
        linked = file.extent.link(os.path.join(path, name))
        summed = _Summed(file.extent, linked, buffer)
        begin = values[index].partition.of(rank).first + file.first
        extents[at] = [
            LinkedExtent(index, tensor, at, low, first, numel, summed.sum(low, high))
            for tensor, low, high, first, numel in _extents_in(file.extent, values[index], begin)
        ]
        made[at] = DataFile(name, linked.nbytes)

    run_workers(len(tasks), link, threads=threads, buffer_nbytes=GRAIN_NBYTES)
    order = range(len(tasks))
    return Links([made[at] for at in order], [one for at in order for one in extents[at]])


def _extents_in(file_extent: FileExtent, value: Value, begin: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the pieces of tensors in a file: (tensor, first byte, one past the last, first element, elements).

    They end where a tensor does, and at multiples of a block in the file, which are multiples of a grain.

    Args:
        file_extent: What the file holds of a value of the store.
        value: What the tensors are of.
        begin: The element of the layout at which the store's value begins.
    """
    width = itemsize(value.layout.dtype)
    for one in file_extent.stretches:
        low, high = begin + one.first // width, begin + one.stop // width
        for extent, in_extent, in_stretch in value.layout.overlaps(low, high):
            at, end = one.offset + in_stretch.start * width, one.offset + in_stretch.stop * width
            first = in_extent.start
            while at < end:
                stop = min((at // BLOCK_NBYTES + 1) * BLOCK_NBYTES, end)
                yield extent.name, at, stop, first, (stop - at) // width
                first += (stop - at) // width
                at = stop


class _Summed:
    """The checksums of any bytes of one file.

    Args:
        file_extent: What it holds.
        linked: The checksums of its grains.
        buffer: Memory for one of them.
    """

    def __init__(self, file_extent: FileExtent, linked: LinkedFile, buffer: Array) -> None:
        self._file_extent = file_extent
        self._linked = linked
        self._buffer = buffer
        self._read = -1  # the grain that was read last

    def sum(self, low: int, high: int) -> int:
        """Return the checksum of the bytes from ``low`` to ``high``."""
        total, grain = 0, self._linked.grain
        while low < high:
            at = low // grain
            begin, end = at * grain, min((at + 1) * grain, self._file_extent.nbytes)
            stop = min(high, end)
            if (low, stop) == (begin, end):
                part = int(self._linked.sums[at])
            else:
                part = crc32c(self._grain(at, begin, end)[low - begin : stop - begin])
            total = crc32c_combine(total, part, stop - low)
            low = stop
        return total

    def _grain(self, at: int, begin: int, end: int) -> Array:
        if self._read != at:
            self._file_extent.read(self._buffer[: end - begin], begin).wait()
            self._read = at
        return self._buffer[: end - begin]
