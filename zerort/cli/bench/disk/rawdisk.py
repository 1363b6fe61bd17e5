"""`RawDisk`: how fast this disk takes and gives plain blocks: the limit that a checkpoint is measured against.

The same files, block size, threads and O_DIRECT mode as a checkpoint's, and the same fsync at the end, but no copies,
no checksums, no manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from zerort.storage.files.blocks import BLOCK_NBYTES, BlockFile, run_workers
from zerort.typing import Array

__all__ = ["RawDisk", "forget"]


class RawDisk:
    """One file of plain blocks for this rank.

    Args:
        path: The file; it must not be there.
        nbytes: Its size; rounded up to whole blocks of 4 KiB.
        threads: How many write or read at once.
    """

    def __init__(self, path: str, nbytes: int, *, threads: int) -> None:
        self.path = path
        self._nbytes = -(-nbytes // 4096) * 4096
        self._threads = threads
        self._pattern = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)  # a disk may not store zeros at all

    def write(self) -> None:
        """Make the file, write all its blocks and wait until they are on the disk."""
        with BlockFile(self.path, create_nbytes=self._nbytes) as file:
            self._run(file.write, fill=True)
            file.sync()

    def read(self) -> None:
        """Read all blocks of the file."""
        with BlockFile(self.path) as file:
            self._run(file.read, fill=False)

    def remove(self) -> None:
        """Delete the file."""
        os.unlink(self.path)

    def _run(self, move: Callable[[Array, int], object], *, fill: bool) -> None:
        filled: set[int] = set()

        def work(task: int, buffer: Array) -> None:
            if fill and id(buffer) not in filled:
                buffer.reshape(-1, 4096)[:] = self._pattern
                filled.add(id(buffer))
            offset = task * BLOCK_NBYTES
            move(buffer[: min(BLOCK_NBYTES, self._nbytes - offset)], offset)

        blocks = -(-self._nbytes // BLOCK_NBYTES)
        run_workers(blocks, work, threads=self._threads, buffer_nbytes=BLOCK_NBYTES)


def forget(path: str) -> None:
    """Drop a file, or the files of a directory, from the page cache: the next read comes from the disk."""
    paths = [entry.path for entry in os.scandir(path) if entry.is_file()] if os.path.isdir(path) else [path]
    for one in paths:
        descriptor = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
