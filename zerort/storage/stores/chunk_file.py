"""`ChunkFile`: one value in one file. Moves its pieces, sums them up, checks them, and tries again what may pass.

    write   array ──> pwritev, crc32c per grain, later                where pages of memory fall on pages of the file
            array ── crc32c + copy ──> slab ── pwritev                elsewhere, and where a grain is changed in part
    read    preadv ──> array ── crc32c per grain, later               (then the rest of the grain is read first)
            preadv ──> slab ── crc32c + copy ──> array

The sums are in memory, by grain of 256 KiB, or of a value's own; without checksums a grain is a page. The file is open
while it is used: a store may have more values than a process may have files, and a file that was put in its place is
found out. A file that somebody else has under another name (`link`) is never written to again: the next write goes to a
new one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from zerort import trace
from zerort.errors import CorruptStorageError
from zerort.native import address_of, copy_into, crc32c, crc32c_grains
from zerort.storage.files import disk
from zerort.storage.files.blocks import BLOCK_NBYTES, GRAIN_NBYTES, PAGE_NBYTES, BlockFile, aligned_buffer
from zerort.storage.files.extents import SUFFIX, LinkedFile
from zerort.storage.files.failures import storage_error_from
from zerort.storage.files.segments import Segment, round_up
from zerort.storage.files.shared_file import SharedFile
from zerort.typing import Array

__all__ = ["ChunkFile"]

_TRANSIENT_ERRNOS = (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
_PAUSE = 0.01
"""Seconds before the first new try; four times as long before each that follows."""

_CURE = "The disk, or the memory on the way to it, is failing, or somebody else wrote there. Go back to a checkpoint"

_NO_SUMS = np.empty(0, np.uint32)

T = TypeVar("T")
Slab = Callable[[], Array]
"""Gives page-aligned memory for a block."""

Compute = Callable[[Callable[[], None]], None]
"""Has something computed by another thread, before the operation ends."""


class ChunkFile:
    """One value in one file.

    Args:
        path: The file; it is made, all zero, with its blocks reserved.
        value: What the value is called.
        nbytes: Its size; the file's is rounded up to whole pages.
        rank: Whose, for messages.
        checksum: Keep sums and check them.
        direct: False does not try O_DIRECT.
        retries: How often to try again what may pass.
        grain: Bytes that one sum covers: whole pages; None: 256 KiB. Without sums, a page.

    Raises:
        StorageError: There is no room, or the file system refused.
    """

    def __init__(
        self,
        path: str,
        *,
        value: str,
        nbytes: int,
        rank: int,
        checksum: bool,
        direct: bool,
        retries: int,
        grain: int | None = None,
    ) -> None:
        self.path = path
        self.value = value
        self.nbytes = nbytes
        self.grain = PAGE_NBYTES if not checksum else GRAIN_NBYTES if grain is None else grain
        self.direct = direct
        """Whether blocks went past the page cache, so far."""
        self._rank = rank
        self._retries = retries
        self._file_nbytes = round_up(nbytes, PAGE_NBYTES)
        self.sums: Array | None = None
        """The checksum of each grain, uint32; None without."""
        self.is_lost = False
        """Whether a sync failed: nobody knows what of it is on the disk, until all of it is written again."""
        self.is_shared = False
        """Whether the file has another name, under which it must stay as it is."""
        self._owning = threading.Lock()
        self.readers = SharedFile(functools.partial(self.open, writable=False))
        """The file, open for those who read it."""
        self.writers = SharedFile(functools.partial(self.open, writable=True))
        """The file, open for those who write to it."""
        try:
            with BlockFile(path, create_nbytes=self._file_nbytes, direct=direct) as file:
                self._identity = file.identity
                self.direct = file.direct
        except OSError as error:
            raise storage_error_from(error, path=path, what=f"{value!r}", needed=nbytes, rank=rank) from error
        if checksum:
            self.sums = np.full(-(-nbytes // self.grain), _zeros_sum(self.grain), np.uint32)
            if nbytes % self.grain:
                self.sums[-1] = _zeros_sum(nbytes % self.grain)

    def open(self, *, writable: bool) -> BlockFile:
        """Open the file and look whether it is still the one that was made.

        Raises:
            CorruptStorageError: It is gone, another one, or of another size.
            StorageError: The file system refused.
        """
        try:
            file = BlockFile(self.path, writable=writable, direct=self.direct)
        except FileNotFoundError:
            raise self._deleted() from None
        except OSError as error:
            raise storage_error_from(error, path=self.path, what=f"{self.value!r}", rank=self._rank) from error
        wrong = None
        if file.identity != self._identity:
            wrong = self._lost("the file that this run made", "another in its place")
        elif file.nbytes != self._file_nbytes:
            wrong = self._lost(f"a file of {self._file_nbytes} bytes", f"one of {file.nbytes}")
        if wrong is not None:
            file.close()
            raise wrong
        return file

    def _deleted(self) -> CorruptStorageError:
        return self._lost(f"a file of {self._file_nbytes} bytes", "none: it was deleted")

    def _lost(self, expected: str, found: str) -> CorruptStorageError:
        return CorruptStorageError(
            f"Expected {expected} at {self.path} ({self.value!r} of rank {self._rank}), got {found}. Somebody else "
            "wrote there. Go back to a checkpoint, and give each job a directory of its own."
        )

    def read(self, file: BlockFile, segment: Segment, out: Array, slab: Slab, compute: Compute) -> None:
        """Fill ``out`` with one piece, and check the grains that it touches.

        Args:
            file: This value's, open.
            segment: The piece.
            out: Its bytes go here: 1-D, uint8.
            slab: Gives page-aligned memory for a block.
            compute: Has the sums compared, if ``out`` may be looked at later.
        """
        if self._in_place(segment, out):
            self._fill(file, segment.low, segment.high, out)
            if self.sums is not None:
                compute(functools.partial(self._check, segment.low, segment.high, out))
        else:
            buffer = slab()[: self._padded(segment.high) - segment.low]
            self._read_grains(file, segment.low, segment.high, buffer)
            copy_into(out, buffer[segment.begin - segment.low : segment.end - segment.low])
        trace.count("offload.read_bytes", out.size)
        self.direct &= file.direct

    def write(self, file: BlockFile, segment: Segment, data: Array, slab: Slab, compute: Compute) -> None:
        """Write one piece, and keep the sums of the grains that it touches.

        Args:
            file: This value's, open for writing.
            segment: The piece.
            data: Its bytes: 1-D, uint8.
            slab: Gives page-aligned memory for a block.
            compute: Has the sums computed, if ``data`` may be looked at later.
        """
        if self._in_place(segment, data):
            self._try(lambda: file.write(data, segment.low), segment.low)
            if self.sums is not None:
                compute(lambda: self._keep(segment.low, self._sums_of(data)))
        else:
            buffer = slab()[: self._padded(segment.high) - segment.low]
            if segment.whole:
                sums = self._sums_of(data, copy_out=buffer)
            else:
                self._read_grains(file, segment.low, segment.high, buffer)
                copy_into(buffer[segment.begin - segment.low : segment.end - segment.low], data)
                sums = self._sums_of(buffer[: segment.high - segment.low])
            buffer[segment.high - segment.low :] = 0
            self._try(lambda: file.write(buffer, segment.low), segment.low)
            self._keep(segment.low, sums)
        trace.count("offload.written_bytes", segment.end - segment.begin)
        self.direct &= file.direct

    def sync(self) -> None:
        """Return when what was written is on the disk.

        A sync that failed is not tried again: a kernel tells once of what it could not write, and then takes it for
        written.
        """
        if self.is_lost:
            raise self._damage(0, "bytes that are on the disk", "some that it could not take, as was said before")
        with self.open(writable=True) as file:
            try:
                file.sync()
            except OSError as error:
                self.is_lost = True
                raise storage_error_from(error, path=self.path, what=f"{self.value!r}", rank=self._rank) from error

    def link(self, path: str) -> LinkedFile:
        """Give the file, synced, another name, under which it stays as it is now; for a file with checksums.

        Raises:
            StorageError: The file system refused.
        """
        self.sync()
        try:
            disk.link(self.path, path)
        except OSError as error:
            raise storage_error_from(error, path=path, what=f"{self.value!r}", rank=self._rank) from error
        self.is_shared = True
        assert self.sums is not None
        return LinkedFile(self._file_nbytes, self.grain, self.sums.copy())

    def own(self, *, whole: bool) -> None:
        """See to it that the file is nobody else's before it is written to; any of a write's workers may.

        Args:
            whole: All of it will be written, so that nothing need be copied.

        Raises:
            CorruptStorageError: It is gone.
            StorageError: There is no room for a new file, or the file system refused.
        """
        if whole:
            self.is_lost = False
        if not self.is_shared:
            return
        with self._owning:
            if self.is_shared and self._count_names() > 1:  # or its other name is gone by now
                self._replace(whole=whole)
            self.is_shared = False

    def _count_names(self) -> int:
        try:
            return os.stat(self.path).st_nlink
        except FileNotFoundError:
            raise self._deleted() from None
        except OSError as error:
            raise storage_error_from(error, path=self.path, what=f"{self.value!r}", rank=self._rank) from error

    def _replace(self, *, whole: bool) -> None:
        draft = f"{self.path.removesuffix(SUFFIX)}.new{SUFFIX}"
        try:
            with BlockFile(draft, create_nbytes=self._file_nbytes, direct=self.direct) as new:
                if not whole:
                    self._copy_into(new)
                identity = new.identity
            disk.rename(draft, self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                disk.unlink(draft)
            if not isinstance(error, OSError):
                raise
            needed = self._file_nbytes
            raise storage_error_from(
                error, path=self.path, what=f"{self.value!r}", needed=needed, rank=self._rank
            ) from error
        self._identity = identity

    def _copy_into(self, new: BlockFile) -> None:
        with self.open(writable=False) as old:
            buffer = aligned_buffer(min(self._file_nbytes, BLOCK_NBYTES))
            for at in range(0, self._file_nbytes, buffer.size):
                block = buffer[: self._file_nbytes - at]
                self._try(functools.partial(old.read, block, at), at)
                self._try(functools.partial(new.write, block, at), at)

    def _in_place(self, segment: Segment, array: Array) -> bool:
        return segment.whole and segment.high % PAGE_NBYTES == 0 and address_of(array) % PAGE_NBYTES == 0

    def _padded(self, high: int) -> int:
        return round_up(high, PAGE_NBYTES)

    def _sums_of(self, data: Array, *, copy_out: Array | None = None) -> Array:
        """Return the checksums of whole grains, and copy them on the way if there is a ``copy_out``."""
        if self.sums is not None:
            return crc32c_grains(data, self.grain, copy_out=copy_out)
        if copy_out is not None:
            copy_into(copy_out[: data.size], data)
        return _NO_SUMS

    def _keep(self, low: int, sums: Array) -> None:
        """Take these for the checksums of the grains from ``low`` on: they have been written."""
        if self.sums is not None:
            first = low // self.grain
            self.sums[first : first + sums.size] = sums

    def _read_grains(self, file: BlockFile, low: int, high: int, out: Array) -> None:
        """Fill ``out`` with whole grains and check them."""
        self._fill(file, low, high, out)
        if self.sums is not None:
            self._check(low, high, out)

    def _fill(self, file: BlockFile, low: int, high: int, out: Array) -> None:
        count = self._try(lambda: file.read(out, low), low)
        if count < high - low:
            raise self._damage(low + count, f"{high - low - count} bytes more", "the end of the file: it is torn")

    def _check(self, low: int, high: int, out: Array) -> None:
        """Compare the sums of whole grains that were read; what differs is read once more."""
        assert self.sums is not None
        for attempt in range(2):
            found = crc32c_grains(out[: high - low], self.grain)
            expected = self.sums[low // self.grain : low // self.grain + found.size]
            if np.array_equal(found, expected):
                return
            trace.count("offload.rereads" if attempt == 0 else "offload.damaged")
            if attempt == 0:
                with self.open(writable=False) as file:
                    self._fill(file, low, high, out)
        at = int(np.flatnonzero(found != expected)[0])
        raise self._damage(
            low + at * self.grain, f"bytes with the crc32c {expected[at]:08x}, as written", f"{found[at]:08x}"
        )

    def _damage(self, offset: int, expected: str, found: str) -> CorruptStorageError:
        return CorruptStorageError(
            f"Expected {expected} at offset {offset} of {self.path} ({self.value!r} of rank {self._rank}), got "
            f"{found}. {_CURE}, on another disk."
        )

    def _try(self, move: Callable[[], T], offset: int) -> T:
        """Run `move`, retrying transient OSErrors; raise StorageError otherwise."""
        for attempt in range(self._retries + 1):
            try:
                return move()
            except OSError as error:
                if error.errno not in _TRANSIENT_ERRNOS or attempt == self._retries:
                    raise storage_error_from(
                        error, path=self.path, what=f"{self.value!r}", offset=offset, rank=self._rank
                    ) from error
            trace.count("offload.retries")
            time.sleep(_PAUSE * 4**attempt)
        raise AssertionError  # the last attempt returns or raises

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(self.path)


@functools.cache
def _zeros_sum(nbytes: int) -> int:
    return crc32c(np.zeros(nbytes, np.uint8))
