"""`NvmeStore`: values in files on a local disk, past the page cache, moved by a few threads each way.

    write(name, array) ──> pool "nvme write" ── blocks of 4 MiB ──> <scratch>/name.chunk
    read(name, array)  ──> pool "nvme read"  <── blocks of 4 MiB ──┘

Arrays that start at a page move without a copy, others through slabs. The files of a run are its own (scratch.py),
their bytes are checked when they come back (chunk_file.py), and all are gone when the store closes.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

import collections
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from zerort import forks
from zerort.device import Ticket
from zerort.errors import CallError, ClosedError
from zerort.storage.files.blocks import BLOCK_NBYTES, GRAIN_NBYTES, PAGE_NBYTES, BlockFile, aligned_buffer
from zerort.storage.files.extents import FileExtent, LinkedFile, Stretch
from zerort.storage.files.failures import storage_error_from
from zerort.storage.files.hard_links import HardLinkProbe
from zerort.storage.files.segments import Segment, cut
from zerort.storage.scratch import Scratch, clean_up
from zerort.storage.stores.chunk_file import ChunkFile
from zerort.storage.stores.operation import Span, StoreOperation
from zerort.storage.stores.store import Parts, as_bytes, check_new, check_range, move_each
from zerort.storage.stores.worker_pool import WorkerPool
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NvmeOptions", "NvmeStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """How a store on a disk works."""

    block_nbytes: int = BLOCK_NBYTES
    """Bytes of one read or write; a multiple of 256 KiB."""
    threads: int = 4
    """Threads that read, and as many that write; one more each way keeps and compares checksums."""
    checksum: bool = True
    """Keep a crc32c of every 256 KiB and compare it on read."""
    direct: bool = True
    """Go past the page cache where the file system allows it."""
    retries: int = 2
    """How often an operation that failed with EIO is tried again."""

    def __post_init__(self) -> None:
        if self.block_nbytes < GRAIN_NBYTES or self.block_nbytes % GRAIN_NBYTES:
            raise CallError(f"Expected block_nbytes to be a multiple of {GRAIN_NBYTES}, got {self.block_nbytes}.")
        if self.threads < 1:
            raise CallError(f"Expected at least one thread, got {self.threads}.")
        if self.retries < 0:
            raise CallError(f"Expected 0 retries or more, got {self.retries}.")


@dataclass(slots=True)
class _Value:
    """A value, and what was asked of it."""

    chunk: ChunkFile
    operations: list[StoreOperation] = field(default_factory=list)
    """Those that have not ended, or have failed without anybody knowing."""
    dirty: bool = False
    """Whether something was written since the last flush."""

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Sync it within this; if that fails it is dirty still."""
        self.dirty = False  # first: what is written meanwhile makes it dirty again
        try:
            yield
        except BaseException:
            self.dirty = True
            raise


class NvmeStore:
    """Values in files on a local disk.

    Args:
        directory: On the disk; made if it is not there. The store makes a directory of its own in it.
        rank: Whose store it is: part of the directory's name, and of every error.
        name: What it is called in errors and traces.
        options: How it works; the defaults if None.

    Raises:
        StorageError: The directory cannot be made or written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int = 0,
        name: str = "nvme",
        options: NvmeOptions | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.options = options = options or NvmeOptions()
        where = os.path.abspath(os.fspath(directory))
        self.cleaned = tuple(clean_up(where))
        """The directories of dead runs that were deleted when this store was opened."""
        try:
            self._scratch = Scratch(where, rank=rank)
            self._direct = options.direct and self._probe(where)
        except OSError as error:
            raise storage_error_from(error, path=where, what="offloaded values", rank=rank) from error
        self._hard_links = HardLinkProbe(self.path)
        self._values: dict[str, _Value] = {}
        self._lock = threading.Lock()
        self._blocks: collections.deque[Array] = collections.deque()  # of memory that no thread uses
        self._reads = WorkerPool(f"{name} read", threads=options.threads)
        self._writes = WorkerPool(f"{name} write", threads=options.threads)
        self._closed = self._is_inherited = False
        forks.follow(self)

    def _probe(self, where: str) -> bool:
        """Say whether O_DIRECT works here, and warn once if it does not."""
        path = self._scratch.file("probe")
        try:
            with BlockFile(path, create_nbytes=PAGE_NBYTES) as file:
                page = aligned_buffer(PAGE_NBYTES)
                file.write(page, 0)
                file.read(page, 0)
                direct = file.direct
            os.unlink(path)
        except BaseException:
            self._scratch.remove()
            raise
        if not direct:
            warnings.warn(
                f"The file system of {where} refuses O_DIRECT: what store {self.name!r} writes also fills the page "
                "cache. Put it on a local disk with ext4 or xfs.",
                RuntimeWarning,
                stacklevel=3,
            )
        return direct

    @property
    def path(self) -> str:
        """The directory of this store's files."""
        return self._scratch.path

    @property
    def direct(self) -> bool:
        """Whether files go past the page cache."""
        return self._direct and all(value.chunk.direct for value in list(self._values.values()))

    @property
    def nbytes(self) -> int:
        """The bytes of all values together."""
        return sum(value.chunk.nbytes for value in list(self._values.values()))

    @property
    def has_lost(self) -> bool:
        """Whether a sync has failed and what it was for is not written again: such a value is no longer to be saved."""
        return any(value.chunk.is_lost for value in list(self._values.values()))

    def create(self, name: str, nbytes: int, *, grain: int | None = None) -> None:
        """Make a value and reserve its room on the disk; see `Store.create`."""
        with self._lock:
            self._check_open()
            check_new(self, name, nbytes, known=name in self._values)
            chunk = ChunkFile(
                self._scratch.file(name),
                value=name,
                nbytes=int(nbytes),
                rank=self.rank,
                checksum=self.options.checksum,
                direct=self._direct,
                retries=self.options.retries,
                grain=grain,
            )
            self._values[name] = _Value(chunk)

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Fill ``out`` from a value; see `Store.read`."""
        data = as_bytes(out, what="out", written=True)
        return self._submit(name, out, data, [(offset, data.size)], writes=False)

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Put ``source`` into a value; see `Store.write`."""
        data = as_bytes(source, what="the source", written=False)
        return self._submit(name, source, data, [(offset, data.size)], writes=True)

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Fill ``out`` from several ranges of a value, as one operation; see `Store.read_parts`."""
        return self._submit(name, out, as_bytes(out, what="out", written=True), parts, writes=False)

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Put ``source`` into several ranges of a value, as one operation; see `Store.write_parts`."""
        value = self._values.get(name)
        grain = 1 if value is None else value.chunk.grain
        if any((a + n - 1) // grain == b // grain for (a, n), (b, _) in itertools.pairwise(parts)):
            return move_each(self.write, name, source, parts)  # two threads would write one grain
        return self._submit(name, source, as_bytes(source, what="the source", written=False), parts, writes=True)

    def _submit(self, name: str, array: Array, data: Array, parts: Parts, *, writes: bool) -> Ticket[Array]:
        with self._lock:
            self._check_open()
            value = self._values.get(name)
            nbytes = None if value is None else value.chunk.nbytes
            segments: list[tuple[int, Segment]] = []  # each with its place in the array
            at = 0
            for offset, count in parts or [(0, 0)]:
                check_range(self, name, offset, count, nbytes=nbytes)
                assert value is not None
                begin, block = int(offset), self.options.block_nbytes
                found = cut(begin, begin + count, nbytes=value.chunk.nbytes, grain=value.chunk.grain, block=block)
                segments += [(at + one.begin - begin, one) for one in found]
                at += count
            assert value is not None
            chunk = value.chunk
            move = chunk.write if writes else chunk.read
            pool, verb = (self._writes, "write") if writes else (self._reads, "read")

            def work(pieces: Iterator[int]) -> None:
                with ExitStack() as stack:
                    lent: list[Array] = []

                    def slab() -> Array:
                        if not lent:  # most pieces need none
                            lent.append(stack.enter_context(self._block()))
                        return lent[0]

                    def compute(part: Callable[[], None]) -> None:
                        if len(parts) > 1:  # of a few pages each: another thread would cost more than the sum
                            part()
                            return
                        pool.compute(operation, part, name=f"sums of {name}")

                    if writes:
                        chunk.own(whole=data.size == chunk.nbytes)
                    file = stack.enter_context((chunk.writers if writes else chunk.readers).opened())
                    for number in pieces:
                        at, segment = segments[number]
                        move(file, segment, data[at : at + segment.end - segment.begin], slab, compute)

            low, high = (segments[0][1].low, segments[-1][1].high) if segments else (0, 0)
            if writes and segments and chunk.is_shared:
                low, high = 0, chunk.nbytes  # the write replaces the file, so nobody may read it meanwhile
            value.operations = [one for one in value.operations if not one.done() or one.unseen_error() is not None]
            span = Span(name, low, high, writes=writes)
            operation = StoreOperation(span, after=[one for one in value.operations if one.conflicts(span)])
            if segments:
                value.operations.append(operation)
                value.dirty |= writes
            pool.submit(operation, work, pieces=len(segments), name=f"{verb} {name}")
            return Ticket(operation, result=array, keep=(array,))

    @contextmanager
    def _block(self) -> Iterator[Array]:
        """Lend page-aligned memory for one block; few are needed at a time, so threads share those that were made."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = aligned_buffer(self.options.block_nbytes)
        try:
            yield block
        finally:
            self._blocks.append(block)

    def flush(self) -> None:
        """Wait for all writes and sync their files; see `Store.flush`."""
        self._check_open()
        for value in list(self._values.values()):
            for operation in list(value.operations):
                if operation.writes and operation.unseen_error() is not None:
                    operation.wait()
        for value in list(self._values.values()):
            if value.dirty:
                with value.cleaning():
                    value.chunk.sync()

    def can_link(self, directory: str) -> bool:
        """Say whether values' files can have a second name in a directory, and whether their checksums are known."""
        return self.options.checksum and self._hard_links.fit_in(directory)

    def link(self, name: str, path: str) -> LinkedFile:
        """Give a value's file another name, under which it stays as it is now, on the disk.

        Args:
            name: The value.
            path: The other name, in a directory that `can_link`.

        Raises:
            StorageError: A write of it has failed, or the file system refused.
        """
        self._check_open()
        value = self._values[name]
        for operation in list(value.operations):
            if operation.writes:
                operation.wait()
        with value.cleaning():
            return value.chunk.link(path)

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return the one file that holds a value; see `Store.file_extents`."""
        if not self.can_link(directory):
            return []

        def read(out: Array, offset: int) -> Ticket[Array]:
            return self.read(name, out, offset=offset)

        whole = Stretch(0, self._values[name].chunk.nbytes, 0)
        return [FileExtent(self.name, (whole,), link=partial(self.link, name), read=read)]

    def copied_parts(self, directory: str) -> list[float]:
        """Say whether files can have a second name; see `Store.copied_parts`."""
        return [0.0 if self.can_link(directory) else 1.0]

    def delete(self, name: str) -> None:
        """Delete a value's file; see `Store.delete`."""
        with self._lock:
            self._check_open()
            check_range(self, name, 0, 0, nbytes=self._values[name].chunk.nbytes if name in self._values else None)
            value = self._values.pop(name)
        for operation in value.operations:
            operation.wait_ended()
        try:
            value.chunk.remove()
        except OSError as error:
            raise storage_error_from(error, path=value.chunk.path, what=f"{name!r}", rank=self.rank) from error

    def close(self) -> None:
        """Finish, and delete all files; see `Store.close`.

        Warns of a write that failed if nobody waited for it: the error would be lost.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._reads.close()
        self._writes.close()
        self._blocks.clear()
        lost = [
            error
            for value in self._values.values()
            for one in value.operations
            if (error := one.unseen_error()) is not None
        ]
        try:
            self._scratch.remove()
        except OSError as error:
            raise storage_error_from(error, path=self.path, what="offloaded values", rank=self.rank) from error
        finally:
            if lost:
                warnings.warn(
                    f"Store {self.name!r}: {len(lost)} writes failed and nobody waited for them; one with "
                    f"{type(lost[0]).__name__}: {lost[0]}. Call wait() on every ticket, or flush().",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def disown(self) -> None:
        """In a forked child: be closed. The files are its parent's, and so are the threads."""
        self._closed = self._is_inherited = True
        self._lock = threading.Lock()  # a thread of the parent may have had it

    def _check_open(self) -> None:
        if self._is_inherited:
            raise forks.inherited(f"store {self.name!r}")
        if self._closed:
            raise ClosedError(f"Store {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "O_DIRECT" if self.direct else "through the page cache"
        what = "closed" if self._closed else f"{len(self._values)} values of {self.nbytes} bytes"
        return f"NvmeStore({self.name!r}, {self.path}, {how}, {what})"
