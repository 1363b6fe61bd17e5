"""`Window`: memory that every rank of a node has mapped, and that lives as long as any array in it.

A file in /dev/shm is made by one rank without a name (O_TMPFILE), and opened by the others through that rank's
descriptor: whoever is killed when, nothing stays behind (decision 0001). Its pages are reserved when it is made: too
little shared memory is an error then, not a SIGBUS later. Arrays hold the mapping, not the group: one that outlives its
group stays readable.

[Note: huge pages]
A reduction reads every rank's array side by side: with pages of 4 KiB a core needs as many translations at once, each
anew after a few microseconds. Linux gives shared memory huge pages by itself only where an administrator said so, but a
process may ask for them later (MADV_COLLAPSE, since 6.1): the pages that are there are moved together. That works where
a huge page of memory is one of the file, too; hence the aligned mapping. Where the kernel refuses, pages stay as they
are (decision 0014).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import uuid

import numpy as np

from zerort.errors import SharedMemoryError
from zerort.typing import Array

__all__ = ["PAGE", "SharedFile", "Window", "ask_for_huge_pages", "free_nbytes", "map_file"]

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 * 1024**2

# Not in Python's mmap, or not in that of all our versions.
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Window:
    """One mapping of a shared file, seen from one process.

    Args:
        mapped: The mapped file, 1-D, uint8: what `map_file` returned.
        segments: (first byte, number of bytes) of each rank's part, in rank order.
    """

    __slots__ = ("address", "bytes", "nbytes", "segments")

    def __init__(self, mapped: Array, segments: tuple[tuple[int, int], ...]) -> None:
        self.bytes = mapped
        self.address: int = mapped.ctypes.data
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


class SharedFile:
    """A file of reserved shared memory, open for the other ranks of a node to map until it is closed.

    Args:
        directory: Where it lies: a directory in memory.
        nbytes: How large it is.
        named: Give it a name of its own until it is closed, for ranks that do not see each other's processes or may not
            open each other's files. A rank
            that is killed meanwhile leaves it behind.

    Raises:
        SharedMemoryError: There is not that much room, or the directory cannot be written to.
    """

    def __init__(self, directory: str, nbytes: int, *, named: bool = False) -> None:
        self._name = os.path.join(directory, f"zerort-{uuid.uuid4().hex}") if named else None
        self._descriptor = -1
        try:
            self._descriptor = _open_new(directory, self._name)
            os.posix_fallocate(self._descriptor, 0, max(nbytes, 1))
        except OSError as error:
            self.close()
            raise _no_file(directory, nbytes, error) from error
        self.path = self._name or f"/proc/{os.getpid()}/fd/{self._descriptor}"
        """What the other ranks give to `map_file`."""

    def close(self) -> None:
        """Let the file go; it lives on in its mappings. Closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            if self._name is not None:
                os.unlink(self._name)


def _open_new(directory: str, name: str | None) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if name is None:
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # a file system that knows only files with names
                raise
    path = name or os.path.join(directory, f"zerort-{uuid.uuid4().hex}")
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    if name is None:
        os.unlink(path)
    return descriptor


def _no_file(directory: str, nbytes: int, error: OSError) -> SharedMemoryError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
        return SharedMemoryError(
            f"Expected room for {nbytes:,} bytes of shared memory in {directory}, got {free_nbytes(directory):,}. "
            f"Make it larger (docker run --shm-size=…, or mount -o remount,size=… {directory}), "
            "or set ZERORT_SHM_DIR to a directory with room."
        )
    return SharedMemoryError(
        f"Expected to make a file in {directory}, got: {error}. Set ZERORT_SHM_DIR to one that you can write to."
    )


def map_file(path: str) -> Array:
    """Map the file at ``path``, made by another rank of this node. 1-D, uint8; arrays made of it hold the mapping.

    Raises:
        SharedMemoryError: It is not there: the ranks do not share the directory.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(
            f"Expected the shared memory that another rank of this node made, got: {error}. The ranks do not share "
            f"{os.path.dirname(path)}: run them in one container and as one user, or open the group with kind='mpi'."
        ) from error
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes < HUGE_PAGE:
            return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        return _map_aligned(descriptor, nbytes)
    except OSError as error:
        raise SharedMemoryError(f"Expected to map shared memory, got: {error}. Raise the limit (ulimit -v).") from error
    finally:
        os.close(descriptor)


def _map_aligned(descriptor: int, nbytes: int) -> Array:
    """Map a file so that its first byte stands on a huge page."""
    # Python's mmap lets the kernel choose the place. So it only reserves addresses, into which the file is then mapped;
    # whoever drops the reservation drops the file's mapping with it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)
    whole = np.frombuffer(reserved, np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE
    place = whole.ctypes.data + first
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(place, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != place:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return whole[first : first + nbytes]


def ask_for_huge_pages(mapped: Array, *, part: int, parts: int) -> None:
    """Ask for huge pages in one of ``parts`` equal parts of a mapped file; the ranks of a node share this work."""
    pages = mapped.size // HUGE_PAGE
    first, end = pages * part // parts, pages * (part + 1) // parts
    if first < end:
        # Refused by kernels before 6.1, by administrators, and when memory is in pieces: nothing changes then.
        _libc.madvise(mapped.ctypes.data + first * HUGE_PAGE, (end - first) * HUGE_PAGE, _MADV_COLLAPSE)
