"""`Window`: memory that every rank of a node has mapped, and that lives as long as any array in it.

A file in /dev/shm is made by one rank, opened by the others and unlinked before anyone uses it, so a job
that is killed leaves nothing behind. Its pages are reserved when it is made: too little shared memory is an error then,
not a SIGBUS later. Arrays hold the mapping, not the group: one that outlives its group stays readable. May import:
errors, typing.
"""

from __future__ import annotations

import errno
import mmap
import os
import uuid

import numpy as np

from zerort.errors import SharedMemoryError
from zerort.typing import Array

__all__ = ["PAGE", "Window", "create_file", "free_nbytes", "map_file"]

PAGE = mmap.PAGESIZE


class Window:
    """One mapping of a shared file, seen from one process.

    Args:
        mapping: The mapped file.
        segments: (first byte, number of bytes) of each rank's part, in rank order.
    """

    __slots__ = ("address", "bytes", "nbytes", "segments")

    def __init__(self, mapping: mmap.mmap, segments: tuple[tuple[int, int], ...]) -> None:
        self.bytes: Array = np.frombuffer(mapping, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.nbytes = self.bytes.size
        self.segments = segments

    def segment(self, rank: int) -> Array:
        """Return rank's part of the window: 1-D, uint8, starting on a page."""
        first, nbytes = self.segments[rank]
        return self.bytes[first : first + nbytes]


def page_aligned(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    """Lay ``sizes`` bytes per rank out one after the other, each starting on a page.

    >>> page_aligned([10, 0, 5000])
    ((0, 10), (4096, 0), (4096, 5000))
    """
    segments, first = [], 0
    for size in sizes:
        segments.append((first, size))
        first += -(-size // PAGE) * PAGE
    return tuple(segments)


def free_nbytes(directory: str) -> int:
    """Return how many bytes a new window may have in ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def create_file(directory: str, nbytes: int) -> str:
    """Make a file of ``nbytes`` reserved bytes in ``directory`` and return its path.

    Raises:
        SharedMemoryError: There is not that much room, or the directory cannot be written to.
    """
    path = os.path.join(directory, f"zerort-{uuid.uuid4().hex}")
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise SharedMemoryError(
                f"Expected room for {nbytes:,} bytes of shared memory in {directory}, got {free_nbytes(directory):,}. "
                f"Make it larger (docker run --shm-size=…, or mount -o remount,size=… {directory}), "
                "or set ZERORT_SHM_DIR to a directory with room."
            ) from error
        raise SharedMemoryError(
            f"Expected to make a file in {directory}, got: {error}. Set ZERORT_SHM_DIR to one that you can write to."
        ) from error
    return path


def map_file(path: str) -> mmap.mmap:
    """Map the file at ``path``, made by another rank of this node.

    Raises:
        SharedMemoryError: It is not there: the ranks do not share the directory.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(
            f"Expected the shared file that another rank of this node made, got: {error}. The ranks do not share "
            f"{os.path.dirname(path)}: run them in one container, or open the group with kind='mpi'."
        ) from error
    try:
        return mmap.mmap(descriptor, 0)
    except OSError as error:
        raise SharedMemoryError(f"Expected to map shared memory, got: {error}. Raise the limit (ulimit -v).") from error
    finally:
        os.close(descriptor)
