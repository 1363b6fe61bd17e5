"""Write one rank's data file: extents packed into blocks, each summed up and copied once, then written.

    tensors ── crc32c + copy, 256 KiB at a time ──> aligned block ── pwritev ──> file
    offloaded values ── read ──> aligned block ── crc32c, pwritev ──> file

An extent may span two blocks, which different threads write; the sums of its parts are put together at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerort.checkpoint.format.extents import Shard
from zerort.checkpoint.value import OffloadedArray, Value
from zerort.native import copy_into, crc32c, crc32c_combine
from zerort.storage.files.blocks import BLOCK_NBYTES, BlockFile, run_workers
from zerort.typing import Array

__all__ = ["WrittenExtent", "write_shard"]

_STRIP_NBYTES = 256 * 1024
"""Summed up and copied in one go: it has to stay in the core's cache in between."""


class WrittenExtent(NamedTuple):
    """Where an extent is in its file."""

    offset: int
    stored_nbytes: int
    """Bytes of it if it is compressed or sparse; else 0."""
    crc32c: int
    """Of the bytes in the file."""
    way: int = 0
    """How, as in `StoredExtent`."""


def write_shard(file: BlockFile, shard: Shard, values: Sequence[Value], *, threads: int) -> list[WrittenExtent]:
    """Write the extents of ``shard`` out of ``values`` and return where they are, in their order.

    Args:
        file: A new file of the shard's size.
        shard: What lies where.
        values: The data; nobody changes it meanwhile.
        threads: How many write at once.

    Raises:
        OSError: The file system refused.
    """
    starts = [extent.offset for extent in shard.extents]
    widths = [value.mine.dtype.itemsize for value in values]
    # parts[extent] = (offset of the part, its checksum, its bytes); each block adds its own, in any order.
    parts: list[list[tuple[int, int, int]]] = [[] for _ in shard.extents]

    def write_block(block: int, buffer: Array) -> None:
        begin = block * BLOCK_NBYTES
        end = min(begin + BLOCK_NBYTES, shard.nbytes)
        cursor = begin
        for index in range(max(bisect_right(starts, begin) - 1, 0), len(shard.extents)):
            extent = shard.extents[index]
            if extent.offset >= end:
                break
            first, last = max(extent.offset, begin), min(extent.offset + extent.nbytes, end)
            if first >= last:
                continue  # the block begins in the gap behind this extent
            buffer[cursor - begin : first - begin] = 0
            at = extent.at + (first - extent.offset) // widths[extent.value]
            checksum = _sum_and_copy(values[extent.value].mine, at, out=buffer[first - begin : last - begin])
            parts[index].append((first, checksum, last - first))
            cursor = last
        buffer[cursor - begin : end - begin] = 0
        file.write(buffer[: end - begin], begin)

    blocks = -(-shard.nbytes // BLOCK_NBYTES)
    run_workers(blocks, write_block, threads=threads, buffer_nbytes=BLOCK_NBYTES)
    return [WrittenExtent(extent.offset, 0, _combined(one)) for extent, one in zip(shard.extents, parts, strict=True)]


def _sum_and_copy(mine: Array | OffloadedArray, at: int, *, out: Array) -> int:
    """Fill ``out`` with the bytes of the elements from ``at`` on, and return their checksum."""
    if not isinstance(mine, np.ndarray):
        mine.read(at, out.view(mine.dtype)).wait()
        return crc32c(out)
    start = at * mine.itemsize
    source = mine.view(np.uint8)[start : start + out.size]
    checksum = 0
    for at in range(0, source.size, _STRIP_NBYTES):
        strip = source[at : at + _STRIP_NBYTES]
        checksum = crc32c(strip, checksum)
        copy_into(out[at : at + _STRIP_NBYTES], strip)
    return checksum


def _combined(parts: list[tuple[int, int, int]]) -> int:
    checksum = 0
    for _, part, nbytes in sorted(parts):
        checksum = crc32c_combine(checksum, part, nbytes)
    return checksum
