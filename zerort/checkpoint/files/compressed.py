"""Write one rank's data file with compressed or sparse extents: threads append in the order in which they finish.

How long the file gets, and where each extent lies in it, is known when all are written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from zerort.checkpoint.files.writer import WrittenExtent
from zerort.checkpoint.format.compression import compressed
from zerort.checkpoint.format.extents import PAGE_NBYTES, Shard, round_up
from zerort.checkpoint.format.manifest import SPARSE
from zerort.checkpoint.value import Value
from zerort.codec import encode_sparse
from zerort.native import crc32c
from zerort.storage.files import disk
from zerort.storage.files.blocks import run_workers
from zerort.typing import Array

__all__ = ["CompressedFile"]

_ALIGNMENT = 64


class CompressedFile:
    """A new data file that grows.

    Args:
        path: Where.
        compress: Whether extents are compressed; sparse ones are in any case, if that is shorter.

    Raises:
        OSError: The file system refused. As from all methods.
    """

    direct = False
    """It goes through the page cache: nothing in it is aligned."""

    def __init__(self, path: str, *, compress: bool) -> None:
        self._compress = compress
        self.nbytes = 0
        self._path = path
        self._descriptor = disk.create(path)
        self._lock = threading.Lock()

    def write(self, shard: Shard, values: Sequence[Value], *, threads: int) -> list[WrittenExtent]:
        """Write the extents of ``shard`` out of ``values``; return where they are, in their order."""
        written: dict[int, WrittenExtent] = {}

        def write_extent(index: int, buffer: Array) -> None:
            extent = shard.extents[index]
            value = values[extent.value]
            mine = value.mine
            if isinstance(mine, np.ndarray):
                elements = mine[extent.at : extent.at + extent.numel]
            else:
                elements = buffer[: extent.nbytes].view(mine.dtype)
                mine.read(extent.at, elements).wait()
            frame, way = self._frame(elements, is_sparse=extent.name in value.sparse)
            data = elements.tobytes() if frame is None else frame
            checksum = crc32c(data)
            with self._lock:
                offset = self._append(data, _ALIGNMENT)
            written[index] = WrittenExtent(offset, 0 if frame is None else len(frame), checksum, way)

        largest = max((extent.nbytes for extent in shard.extents), default=0)
        run_workers(len(shard.extents), write_extent, threads=threads, buffer_nbytes=largest)
        self._append(b"", PAGE_NBYTES)  # whole pages, as readers want them
        return [written[index] for index in range(len(shard.extents))]

    def _frame(self, elements: Array, *, is_sparse: bool) -> tuple[bytes | None, int]:
        """Return the shortest form of an extent, if it is shorter than its elements, and which one that is."""
        frame = compressed(elements) if self._compress else None
        sparse = encode_sparse(elements) if is_sparse else None
        if sparse is not None and (frame is None or sparse.size < len(frame)):
            return sparse.tobytes(), SPARSE
        return frame, 0

    def _append(self, data: bytes, multiple: int) -> int:
        offset = self.nbytes
        self.nbytes = round_up(offset + len(data), multiple)
        disk.write(self._descriptor, data + bytes(self.nbytes - offset - len(data)), path=self._path)
        return offset

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        disk.sync(self._descriptor, path=self._path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
