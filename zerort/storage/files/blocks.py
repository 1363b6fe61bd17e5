"""Move blocks between memory and files past the page cache, with a few threads.

    BlockFile      a file opened with O_DIRECT, or without where the file system refuses it
    run_workers    every worker thread owns one page-aligned buffer and takes the next piece of work until none is left

O_DIRECT wants page-aligned memory, offsets and lengths; a checkpoint's tensors are none of these. So blocks pass
through small aligned buffers, and are summed up on the way while they are in the cache. Stores and checkpoints share
this.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort.storage.files import disk, faults
from zerort.storage.files.activity import on_disk
from zerort.storage.files.workers import lend
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BLOCK_NBYTES", "GRAIN_NBYTES", "PAGE_NBYTES", "BlockFile", "aligned_buffer", "run_workers", "worker_count"]

BLOCK_NBYTES = 4 * 1024**2
"""Bytes of one read or write."""

GRAIN_NBYTES = 256 * 1024
"""What one checksum of a store covers: small enough to be copied while the sum's bytes are in the core's cache."""

PAGE_NBYTES = 4096
"""What O_DIRECT asks of addresses, offsets and lengths, on every disk that we know."""

_MOST_THREADS = 8
_MOST_THREADS_OF_HOST = 16
_NO_FALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def worker_count(ranks_here: int) -> int:
    """Return how many threads each of ``ranks_here`` ranks of one host uses.

    Four keep a disk busy that has nothing else to do. They sum up and copy, too, and may wait for a core that others
    use: then more of them keep its queue filled.

    >>> worker_count(1), worker_count(2), worker_count(4), worker_count(64)
    (8, 8, 4, 2)
    """
    return max(2, min(_MOST_THREADS, _MOST_THREADS_OF_HOST // ranks_here))


def aligned_buffer(nbytes: int) -> Array:
    """Return writable memory that starts at a page: 1-D, uint8. It lives as long as the array."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a hint: 4 MiB are two faults instead of a thousand
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, count=nbytes)


_kept = threading.local()


def _buffer_of_this_thread(nbytes: int) -> Array:
    """Return page-aligned memory that stays this thread's: see `workers` for why it is not given back each time."""
    kept: Array | None = getattr(_kept, "buffer", None)
    if kept is None or kept.size < nbytes:
        kept = _kept.buffer = aligned_buffer(nbytes)
    return kept[:nbytes]


def run_workers(tasks: int, work: Callable[[int, Array], object], *, threads: int, buffer_nbytes: int) -> None:
    """Call ``work(task, buffer)`` for every task from 0 on, each on one of the threads.

    Args:
        tasks: How many.
        work: What to do; the buffer is its thread's own.
        threads: How many at most.
        buffer_nbytes: The size of each buffer.

    Raises:
        Exception: What the earliest failing task raised; no further tasks were begun.
    """
    numbers = itertools.count()
    stop = threading.Event()
    failures: list[tuple[int, BaseException]] = []

    def loop() -> None:
        task = -1
        try:
            buffer = _buffer_of_this_thread(buffer_nbytes)
            while not stop.is_set() and (task := next(numbers)) < tasks:
                work(task, buffer)
        except BaseException as error:
            failures.append((task, error))
            stop.set()

    threads = min(threads, tasks)
    if threads <= 1:
        loop()
    else:
        try:
            for done in [lend(loop) for _ in range(threads)]:
                done.wait()
        finally:
            stop.set()
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]


class BlockFile:
    """A file read and written in blocks. Buffers are page-aligned, and so are offsets and lengths.

    Args:
        path: The file.
        create_nbytes: Make a new file of this size, reserve its blocks, and write; None opens one that is there.
        writable: Also write one that is there.
        direct: False does not try O_DIRECT: it is known that the file system refuses it. As an attribute: whether
            blocks go past the page cache.

    Raises:
        OSError: It cannot be opened or made; a file that could not be reserved is not left behind.
    """

    def __init__(
        self, path: str, *, create_nbytes: int | None = None, writable: bool = False, direct: bool = True
    ) -> None:
        self.path = path
        self._faults = faults.current()
        self._giving_up = threading.Lock()  # O_DIRECT, for all who use this file
        flags = os.O_RDWR if writable else os.O_RDONLY
        if create_nbytes is not None:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            if self._faults is not None:
                self._faults.meet("create", path)
        self._descriptor, self.direct = _open(path, flags, direct=direct)
        if create_nbytes is not None:
            disk.tell("create", path)
            try:
                self._reserve(create_nbytes)
            except BaseException:
                self.close()
                disk.unlink(path)
                raise

    def _reserve(self, nbytes: int) -> None:
        with on_disk("reserve", self.path):
            if self._faults is not None:
                self._faults.meet("reserve", self.path)
            if nbytes == 0:
                return
            try:
                os.posix_fallocate(self._descriptor, 0, nbytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
                os.ftruncate(self._descriptor, nbytes)
        disk.tell("reserve", self.path, nbytes)

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return os.fstat(self._descriptor).st_size

    @property
    def identity(self) -> tuple[int, int]:
        """What tells this file from any other of the same name: device and inode."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def write(self, data: Array, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        done = 0
        while done < data.size:
            count = self._move("write", [data[done:]], offset + done)
            disk.tell("write", self.path, offset + done, data[done : done + count])
            if count == 0:
                raise OSError(errno.EIO, "nothing of a block was written", self.path)
            done += count
            if done < data.size and done % mmap.PAGESIZE and self.direct:
                if count < mmap.PAGESIZE:
                    raise OSError(errno.EIO, "less than a page of a block was written", self.path)
                done -= done % mmap.PAGESIZE  # from elsewhere the next could not be direct

    def read(self, out: Array, offset: int) -> int:
        """Fill ``out`` from ``offset`` on and return the bytes read: fewer only at the end of the file."""
        done = 0
        while done < out.size:
            count = self._move("read", [out[done:]], offset + done)
            done += count
            # A short direct read stands at the end, or at an offset from which the next could not be direct.
            if count == 0 or (done % mmap.PAGESIZE and self.direct):
                break
        return done

    def scatter(self, outs: Sequence[Array], offset: int) -> int:
        """Fill several arrays from ``offset`` on with one call, and return the bytes read, which may be fewer."""
        return self._move("read", outs, offset)

    def _move(self, operation: str, data: Sequence[Array], offset: int) -> int:
        move: Callable[[int, Any, int], int] = os.preadv if operation == "read" else os.pwritev
        with on_disk(operation, self.path):
            if self._faults is not None:
                return self._move_badly(operation, move, data, offset)
            return self._retry(move, data, offset)

    def _move_badly(
        self, operation: str, move: Callable[[int, Any, int], int], data: Sequence[Array], offset: int
    ) -> int:
        assert self._faults is not None
        kinds = self._faults.meet(operation, self.path)
        nbytes = sum(part.size for part in data)
        if kinds & {"short", "torn"} and data[0].size > mmap.PAGESIZE:
            half = data[0].size // (2 * mmap.PAGESIZE) * mmap.PAGESIZE
            moved = self._retry(move, [data[0][:half]], offset) if half else 0
            return nbytes if "torn" in kinds else moved or self._retry(move, data, offset)
        if "flip" in kinds and operation == "write":
            flipped = aligned_buffer(data[0].size)
            flipped[:] = data[0]
            flipped[flipped.size // 2] ^= 1
            data = [flipped, *data[1:]]
        moved = self._retry(move, data, offset)
        if "flip" in kinds and operation == "read" and moved:
            data[0][moved // 2 % data[0].size] ^= 1
        return moved

    def _retry(self, move: Callable[[int, Any, int], int], data: Sequence[Array], offset: int) -> int:
        was_direct = self.direct  # another thread may give it up meanwhile
        try:
            return move(self._descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
        # Some file systems take O_DIRECT at open and refuse it here, or want more than page alignment.
        with self._giving_up:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.direct = False
        return move(self._descriptor, data, offset)

    def takes(self, out: Array, offset: int) -> bool:
        """Say whether this memory and offset suit the file as it was opened; nothing falls back."""
        try:
            data: Any = [out]
            return os.preadv(self._descriptor, data, offset) >= 0
        except OSError:
            return False

    def forget(self) -> None:
        """Drop what of the file is in the page cache: the next read comes from the disk."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        with on_disk("sync", self.path):
            if self._faults is not None:
                self._faults.meet("sync", self.path)
            os.fsync(self._descriptor)
        disk.tell("sync", self.path)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open(path: str, flags: int, *, direct: bool) -> tuple[int, bool]:
    """Return a descriptor, and whether it goes past the page cache."""
    if direct:
        try:
            return disk.open_regular(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if flags & os.O_EXCL:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # some file systems make the file and then refuse O_DIRECT
    return disk.open_regular(path, flags), False
