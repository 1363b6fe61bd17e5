"""`Feed`: all ranks publish what they have, version after version.

    agree     the same tensors everywhere as in the first version                    nothing is written yet
    write     a whole version: every rank writes its elements into one safetensors file, but for sparse tensors: those
              of their elements that are not zero, into a file of its own
              a delta: each rank compares its elements with its last ones, and writes those that changed
    commit    rank 0: the version's record, then feed.json, renamed into place       from here on readers see it
    clean     rank 0: versions that no reader needs any more

A push that fails or is killed leaves the versions of before. The next one is whole then, under a number of its own: if
only the last sync was refused, readers may have the version that failed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort.checkpoint import Value
from zerort.checkpoint.failure import fail_together, with_progress_watch
from zerort.checkpoint.files.directory import commit_manifest, make_directory
from zerort.checkpoint.files.lease import LEASE_SECONDS, Lease
from zerort.checkpoint.files.sweep import sweep
from zerort.checkpoint.format.casts import FLOATS
from zerort.codec import apply_delta, encode_delta
from zerort.codec.delta import HEADER_NBYTES
from zerort.comm.agreed import expect_same, gather_json
from zerort.comm.group import Group
from zerort.device import Ticket
from zerort.device.ticket import Done
from zerort.errors import CallError, CheckpointError, ClosedError, CorruptCheckpointError, StorageError
from zerort.native import copy_into, crc32c
from zerort.publish.pieces import Base, Part, base_nbytes, parts_of, plan_full, tensors_of
from zerort.publish.records import (
    HEAD,
    Head,
    Link,
    Piece,
    Tensor,
    Version,
    data_file,
    framed,
    last_number,
    stale_names,
)
from zerort.storage.files import disk
from zerort.typing import Array

__all__ = ["Feed", "Published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a push did; the same on every rank, except for `seconds`."""

    version: int
    is_full: bool
    """Whether it is a whole version, not a delta."""
    nbytes: int
    """Bytes of its data files."""
    changed: int
    """Values in it: elements whose bits changed, or all."""
    seconds: float


class Feed:
    """A directory that versions of a model are published in; `Runtime.publish` makes one. Every rank has one.

    Args:
        where: A directory that all ranks and all readers see.
        group: The ranks; all of them call everything here.
        values: Returns this rank's part of the model, as a checkpoint has it.
        updates: Returns how many updates were done.
        dtype: What floats are published in; None: as they are.
        full_every: How many versions lie between two whole ones.
        around: Returns what a push runs within.

    Raises:
        CallError: An argument cannot be used.
        CheckpointError: There is a feed of another model, or somebody else publishes there.
        StorageError: The file system refused.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        group: Group,
        values: Callable[[], Sequence[Value]],
        *,
        updates: Callable[[], int],
        dtype: str | None = "bfloat16",
        full_every: int = 50,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.where = os.path.abspath(os.fspath(where))
        self._group = group
        self._values = values
        self._updates = updates
        self._dtype = dtype
        self._full_every = full_every
        self._around = around
        self._lease = Lease(self.where, verb="publish")
        self._base = Base(self.where)
        self._is_closed = False
        self._needs_full = True
        fail_together(group, self._check, path=self.where, name="publish checks")
        expect_same(group, [self.where, dtype, full_every], what="directory and settings to publish", error=CallError)
        try:
            before = with_progress_watch(group, self._open, path=self.where, name="publish open")
            self._token, self._newest, tensors = gather_json(group, before, name="publish open")[0]
        except BaseException:
            self.close()
            raise
        self._number = self._newest  # the last that was given to a push, which may have failed
        self._tensors = None if tensors is None else _tensors_from(tensors)
        self._chain: tuple[Link, ...] = ()
        self._files: list[str] = []

    def _check(self) -> None:
        if self._dtype is not None and self._dtype not in FLOATS:
            raise CallError(f"Expected dtype to be one of {', '.join(FLOATS)} or None, got {self._dtype!r}.")
        if type(self._full_every) is not int or self._full_every < 1:
            raise CallError(f"Expected full_every to be a whole number above 0, got {self._full_every!r}.")

    def _open(self) -> list[Any]:
        """Rank 0: own the directory, and find out which versions it has seen."""
        if self._group.rank:
            return []
        make_directory(self.where)
        self._lease.hold(patience=LEASE_SECONDS)
        with contextlib.suppress(CorruptCheckpointError):  # the first version, which is whole, replaces it
            if os.path.lexists(os.path.join(self.where, HEAD)):
                head = Head.read(self.where)
                return [secrets.token_hex(8), head.newest, head.tensors]
        return [secrets.token_hex(8), last_number(self.where), None]

    @property
    def version(self) -> int:
        """The newest version that was pushed; 0: none yet."""
        return int(self._newest)

    def push(self) -> Ticket[Published]:
        """Publish the parameters as they are now, as the next version. Every rank calls this.

        All is on the disk when it returns: training may go on at once.

        Raises:
            ClosedError: The feed was closed, or its runtime.
            StorageError: The file system refused, or is full; on every rank. Readers have what they had (or this
                version, if it was refused last of all), and the next version will be whole.
            CheckpointError: Somebody else publishes there by now; on every rank.
        """
        if self._is_closed:
            raise ClosedError("Expected an open feed to push to, got one that was closed. Make one: rt.publish(where).")
        with self._around():
            return Done(self._push())

    def _push(self) -> Published:
        began = time.perf_counter()
        values = self._values()
        tensors = fail_together(self._group, lambda: self._agree(values), path=self.where, name="publish agree")
        is_full = self._needs_full or len(self._chain) >= self._full_every
        self._needs_full = True  # until this push counts: the base goes ahead of what readers have
        self._number += 1
        number = self._number
        token = gather_json(self._group, secrets.token_hex(8), name="publish token")[0]
        try:
            mine = self._write(values, tensors, number, token, is_full=is_full)
            every = gather_json(self._group, mine, name="publish pieces")
            files, pieces, changed = _joined([rows[0] for rows in every] + [row for rows in every for row in rows[1:]])
            version = Version(number, self._updates(), files, pieces, 2 if any(rows[1:] for rows in every) else 1)
            link = self._commit(version, tensors, token, is_full=is_full)
        except (CheckpointError, StorageError, CallError, OSError, MemoryError):
            self._withdraw(token)
            raise
        self._chain = (link,) if is_full else (*self._chain, link)
        self._files = [] if is_full else self._files
        self._files += [link.record, *(name for name, _ in files)]
        self._tensors, self._newest, self._needs_full = tensors, number, False
        nbytes = sum(nbytes for _, nbytes in files)
        seconds = time.perf_counter() - began
        return Published(version=number, is_full=is_full, nbytes=nbytes, changed=changed, seconds=seconds)

    def begin_whole(self) -> None:
        """Make the next version a whole one: ranks have other parts of the model by then. Every rank calls this."""
        self._needs_full = True

    def close(self) -> None:
        """Let others publish there. Closing twice is fine; what was published stays."""
        self._is_closed = True
        self._base.close()
        self._lease.release()

    def _agree(self, values: Sequence[Value]) -> tuple[Tensor, ...]:
        tensors = tensors_of(values, self._dtype)
        if self._tensors is not None and tensors != self._tensors:
            odd = sorted(set(tensors) ^ set(self._tensors)) or [tensors[0]]
            raise CheckpointError(
                f"Expected the model that {self.where} holds versions of, got another: they differ in "
                f"{odd[0].name!r} ({odd[0].dtype}, shape {odd[0].shape}). Register all units before the first push, "
                "and publish each model in a directory of its own."
            )
        return tensors

    # -- write -----------------------------------------------------------------------------------------------------

    def _write(
        self, values: Sequence[Value], tensors: tuple[Tensor, ...], number: int, token: str, *, is_full: bool
    ) -> list[Any]:
        """Write this rank's part; return rows [[file, bytes] or None, pieces, values]. Every rank calls this.

        A second row is of sparse tensors of a whole version, if this rank has some.
        """
        group = self._group
        beside = os.path.join(self.where, data_file("delta", number, token, rank=group.rank))
        if not is_full:
            return with_progress_watch(
                group, lambda: [self._write_delta(values, beside)], path=self.where, name="publish write"
            )
        path = os.path.join(self.where, data_file("full", number, token))
        sparse = frozenset(name for value in values for name in value.sparse)
        head, starts, nbytes = plan_full(tensors, number, sparse=sparse)

        def create() -> None:
            if group.rank == 0:
                with _closing(disk.create(path)) as file:
                    disk.write(file, head, path=path)
                    disk.set_size(file, nbytes, path=path)
                    disk.sync(file, path=path)

        with_progress_watch(group, create, path=self.where, name="publish create")
        rows = with_progress_watch(
            group, lambda: self._write_full(values, path, starts, beside), path=self.where, name="publish write"
        )
        if group.rank == 0:
            rows[0][1].insert(0, Piece(0, 0, len(head), crc32c(head), -1, 0, 0))
            rows[0][0] = [os.path.basename(path), nbytes]
        return rows

    def _write_full(
        self, values: Sequence[Value], path: str, starts: Sequence[int | None], beside: str
    ) -> list[list[Any]]:
        pieces: list[Piece] = []
        try:
            descriptor = disk.open_regular(path, os.O_WRONLY)
        except FileNotFoundError:
            raise StorageError(
                f"Expected {self.where} to be one directory for all ranks, got one that rank {self._group.rank} does "
                "not share with rank 0. Name a directory on a file system that all hosts have mounted."
            ) from None
        count = 0
        if self._full_every > 1:
            self._base.reserve(base_nbytes(values, self._group.rank, self._dtype))
        with _closing(descriptor) as file, contextlib.ExitStack() as stack:
            others = _Deltas(beside, stack)
            for part in parts_of(values, self._group.rank, self._dtype):
                if self._full_every > 1:
                    copy_into(self._base.of(part), part.data)
                start = starts[part.tensor]
                if start is None:
                    others.add(part, encode_delta(np.zeros_like(part.data), part.data))
                    continue
                offset = start + part.first * part.data.itemsize
                octets = part.data.view("u1")
                disk.write_at(file, octets.data, offset, path=path)
                size = part.data.size
                pieces.append(Piece(0, offset, octets.nbytes, crc32c(octets), part.tensor, part.first, size))
                count += size
            disk.sync(file, path=path)
            row = others.finish()
        return [[None, pieces, count], *([row] if row[0] else [])]

    def _write_delta(self, values: Sequence[Value], path: str) -> list[Any]:
        with contextlib.ExitStack() as stack:
            deltas = _Deltas(path, stack)
            for part in parts_of(values, self._group.rank, self._dtype):
                base = self._base.of(part)
                payload = encode_delta(base, part.data)
                if payload.nbytes == HEADER_NBYTES:  # no change
                    continue
                deltas.add(part, payload)
                apply_delta(base, payload)
            return deltas.finish()

    # -- commit ----------------------------------------------------------------------------------------------------

    def _commit(self, version: Version, tensors: tuple[Tensor, ...], token: str, *, is_full: bool) -> Link:
        """Rank 0 makes the version count; return how the head names it. Every rank calls this."""
        text = framed(version)
        link = Link(version.number, is_full, data_file("version", version.number, token), crc32c(text))
        chain = (link,) if is_full else (*self._chain, link)
        names = [link.record, *(name for name, _ in version.files), *([] if is_full else self._files)]

        def commit() -> None:
            if self._group.rank:
                return
            record = os.path.join(self.where, link.record)
            with _closing(disk.create(record)) as file:
                disk.write(file, text, path=record)
                disk.sync(file, path=record)
            stale = stale_names(self.where, keep=names)
            head = framed(Head(self._token, tensors, chain))
            commit_manifest(self.where, head, token=token, fence=self._lease.check, name=HEAD)
            sweep(self.where, stale)

        with_progress_watch(self._group, commit, path=self.where, name="publish commit")
        return link

    def _withdraw(self, token: str) -> None:
        """Rank 0 deletes the files of a push that failed on all ranks, unless it counts after all."""
        if self._group.rank:
            return
        with contextlib.suppress(CheckpointError, StorageError, OSError):
            if os.path.lexists(os.path.join(self.where, HEAD)) and token in Head.read(self.where).chain[-1].record:
                return
            for name in os.listdir(self.where):
                if f".{token}." in name:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.where, name))


class _Deltas:
    """A file of deltas, which is made with the first of them.

    Args:
        path: Where.
        stack: What closes it.
    """

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._file: int | None = None
        self._pieces: list[Piece] = []
        self._nbytes = self._values = 0

    def add(self, part: Part, payload: Array) -> None:
        """Append the delta of some elements."""
        if self._file is None:
            self._file = self._stack.enter_context(_closing(disk.create(self._path)))
        size = part.data.size
        self._pieces.append(Piece(0, self._nbytes, payload.nbytes, crc32c(payload), part.tensor, part.first, size))
        padding = -payload.nbytes % 8  # a payload begins where 8 divides
        disk.write(self._file, payload.tobytes() + bytes(padding), path=self._path)
        self._nbytes += payload.nbytes + padding
        self._values += int(payload[16:24].view("u8")[0])

    def finish(self) -> list[Any]:
        """See to it that all is on the disk; return [[file, bytes] or None, pieces, values]."""
        if self._file is None:
            return [None, [], 0]
        disk.sync(self._file, path=self._path)
        return [[os.path.basename(self._path), self._nbytes], self._pieces, self._values]


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _joined(every: Sequence[Sequence[Any]]) -> tuple[tuple[tuple[str, int], ...], tuple[Piece, ...], int]:
    """Return the files, pieces and values of all ranks. Pieces of ranks without a file lie in the first."""
    files: list[tuple[str, int]] = []
    pieces: list[Piece] = []
    for file, mine, _ in every:
        if file is not None:
            files.append((file[0], file[1]))
        pieces += [Piece(*one)._replace(file=len(files) - 1) for one in mine]
    return tuple(files), tuple(pieces), sum(count for _, _, count in every)


def _tensors_from(found: Sequence[Sequence[Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in found)
