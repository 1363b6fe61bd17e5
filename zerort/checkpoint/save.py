"""`save`: every rank writes its own file, all agree that it is on the disk, and rank 0 makes it count.

    agree      the same path, values and meta everywhere; there is room          nothing is written yet
    own        rank 0: nobody else saves there (lease.py)
    create     every rank makes its file; rank 0 sees all of them                a path that is not shared ends here
    write      extents, checksums, fsync                                         any failure: all raise, files removed
    commit     rank 0: manifest to a draft, fsync, rename, fsync the directory   from the rename on, this save counts
    clean      rank 0: what was there before and is no part of it

A rank that dies anywhere leaves the checkpoint of before. What it leaves lying is deleted by the next save that
succeeds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerort import trace
from zerort.checkpoint.assemble import Head, assemble
from zerort.checkpoint.failure import fail_together, storage_error, with_progress_watch
from zerort.checkpoint.files.compressed import CompressedFile
from zerort.checkpoint.files.directory import (
    commit_manifest,
    data_name,
    delete_save,
    make_directory,
    new_token,
    rank_of,
    read_manifest,
    stale_names,
)
from zerort.checkpoint.files.lease import Lease
from zerort.checkpoint.files.links import LinkedExtent, Links, linkable, make_links, ranges_of
from zerort.checkpoint.files.room import expect_room
from zerort.checkpoint.files.sweep import sweep, wait_for_sweeps
from zerort.checkpoint.files.writer import WrittenExtent, write_shard
from zerort.checkpoint.format.compression import check_compression
from zerort.checkpoint.format.extents import Shard, plan_shard
from zerort.checkpoint.format.manifest import DataFile, encode
from zerort.checkpoint.value import JSON, LinkableFile, Value, as_json, check_values, describe_values
from zerort.comm.agreed import expect_same, gather_json
from zerort.comm.group import Group
from zerort.errors import CallError, CheckpointError, StorageError
from zerort.storage.files import disk
from zerort.storage.files.blocks import BlockFile, worker_count

__all__ = ["Saved", "save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a save did; the same on every rank, except for `direct`."""

    path: str
    """The checkpoint's directory."""
    nbytes: int
    """Bytes of all data files."""
    seconds: float
    """How long it took, on this rank."""
    linked_nbytes: int
    """Of these, in files that were taken over from the ranks' stores as they are."""
    direct: bool
    """Whether this rank's file was written past the page cache (O_DIRECT)."""
    removed: tuple[str, ...]
    """Files of earlier saves that are deleted: at once, or in the background if they are large."""


def save(
    path: str | os.PathLike[str],
    group: Group,
    values: Sequence[Value],
    *,
    meta: Mapping[str, JSON],
    progress: JSON = None,
    kept: str | None = None,
    lease: Lease | None = None,
    compress: str | None = None,
) -> Saved:
    """Write a checkpoint, which replaces the one at ``path`` when all of it is on the disk, and not before.

    Args:
        path: A directory that all ranks see; it is made if need be.
        group: The ranks; all of them call this.
        values: What to save; nobody changes it meanwhile.
        meta: What is the same on every rank: step, loss scale, optimizer, plan.
        progress: What is this rank's own: random state, data position.
        kept: A directory in which the same values are saved after each step: it must find room after this save, too.
        lease: The right to save there, of a caller who keeps it for longer; taken for this save alone if None.
        compress: ``"zstd"``: byte planes of each tensor, compressed; for slow storage. Nothing is linked then.

    Raises:
        CallError: Values, meta or progress cannot be saved, or differ between the ranks.
        StorageError: The file system refused, there is no room, or the ranks do not see one directory. The checkpoint
            that was there before is intact.
        CheckpointInUseError: Somebody else saves there. What they have saved, or will, is intact.
    """
    where = os.path.abspath(os.fspath(path))
    with trace.span("checkpoint.save", track="checkpoint", path=where):
        one = _Save(where, group, values, meta=meta, progress=progress, lease=lease, compress=compress)
        return one.run(kept=kept)


class _Save:
    """One save, on one rank."""

    def __init__(
        self,
        path: str,
        group: Group,
        values: Sequence[Value],
        *,
        meta: Mapping[str, JSON],
        progress: JSON,
        lease: Lease | None,
        compress: str | None,
    ) -> None:
        self._began = time.perf_counter()
        self._compress = compress
        self._file_grows = compress is not None or any(value.sparse for value in values)
        self._path = path
        self._group = group
        self._values = values
        self._meta, self._progress = fail_together(
            group, lambda: self._check(meta, progress), path=path, name="save checks"
        )
        self._made: list[str] = []
        self._lease = lease or Lease(path)
        self._keeps_lease = lease is not None
        self._links = Links([], [])
        self._is_given_up = False  # whatever a thread of it is still at, it must not count any more
        self._is_tight = False  # the next step needs the room of the checkpoint before this one

    def _check(self, meta: Mapping[str, JSON], progress: JSON) -> tuple[JSON, JSON]:
        check_compression(self._compress)
        check_values(self._values, rank=self._group.rank, size=self._group.size, writable=False)
        if not isinstance(meta, Mapping):
            raise CallError(f"Expected meta to be a mapping, got {type(meta).__name__}. Pass a dict.")
        return as_json(meta, what="meta"), as_json(progress, what="progress")

    def run(self, *, kept: str | None) -> Saved:
        try:
            return self._run(kept=kept)
        except BaseException as error:
            self._is_given_up = True
            self._end()
            if not _is_stuck(error):
                for directory in reversed(self._made):
                    with contextlib.suppress(OSError):  # somebody else uses it by now, or this save counts
                        disk.remove_directory(directory)
            raise
        finally:
            self._end()

    def _end(self) -> None:
        if not self._keeps_lease:
            self._lease.release()

    def _fence(self) -> None:
        """Raise unless this save may count: called last."""
        if self._is_given_up:
            raise StorageError(f"Expected a save that all ranks wait for, got one that was given up: {self._path}.")
        self._lease.check()

    def _run(self, *, kept: str | None) -> Saved:
        group, path = self._group, self._path
        expect_same(group, path, what="the checkpoint's path", error=CallError)
        expect_same(group, describe_values(self._values), what="the values to save", error=CallError)
        expect_same(group, self._meta, what="meta", error=CallError)
        expect_same(group, self._compress, what="compress", error=CallError)
        phases = [value.phase for value in self._values]
        self._make_directory()
        links_of = [] if self._compress else self._values
        held = with_progress_watch(group, lambda: linkable(links_of, path), path=path, name="save links")
        linked = {at: ranges_of(some, width=self._values[at].mine.dtype.itemsize) for at, some in held.items()}
        shard = plan_shard(self._values, group.rank, phases=phases, linked=linked)
        changing = [some for at, some in held.items() if not self._values[at].is_frozen]
        taken = sum(one.extent.nbytes for some in changing for one in some)
        head = Head(new_token(), socket.gethostname(), shard.nbytes, self._progress, phases, [*linked.items()], taken)
        heads = [Head(*told) for told in gather_json(group, head, name="save heads")]
        token, hosts, sizes = heads[0].token, [head.host for head in heads], [head.nbytes for head in heads]
        files = [DataFile(data_name(rank, token), nbytes) for rank, nbytes in enumerate(sizes) if nbytes]
        self._check_room(written=sum(sizes), linked=sum(head.taken for head in heads), kept=kept)
        threads = worker_count(hosts.count(hosts[group.rank]))
        with trace.span("checkpoint.write", track="checkpoint", nbytes=shard.nbytes, threads=threads):
            written, nbytes, direct = self._write(shard, token, hosts, files, threads, held)
        if self._file_grows:  # known only now
            sizes = gather_json(group, nbytes, name="save sizes")
            files = [DataFile(data_name(rank, token), nbytes) for rank, nbytes in enumerate(sizes) if nbytes]
        links = [
            Links([DataFile(*file) for file in told[0]], [LinkedExtent(*extent) for extent in told[1]])
            for told in gather_json(group, self._links, name="save links")
        ]
        files += [file for one in links for file in one.files]
        with trace.span("checkpoint.commit", track="checkpoint"):
            removed = self._commit(written, token, files, heads, links)
        trace.count("checkpoint.written_nbytes", nbytes)
        trace.count("checkpoint.linked_nbytes", taken)
        return Saved(
            path=path,
            nbytes=sum(file.nbytes for file in files),
            linked_nbytes=sum(file.nbytes for one in links for file in one.files),
            seconds=time.perf_counter() - self._began,
            direct=direct,
            removed=tuple(removed),
        )

    # -- write -----------------------------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        """Rank 0 makes the directory, and sees to it that nobody else saves there."""

        def make() -> None:
            if self._group.rank == 0:
                wait_for_sweeps()
                self._made = make_directory(self._path)
                self._lease.hold()
                if self._is_given_up:  # meanwhile: nobody else would release it
                    self._end()

        with_progress_watch(self._group, make, path=self._path, name="save directory")

    def _check_room(self, *, written: int, linked: int, kept: str | None) -> None:
        """No rank goes on where there is no room for all of them."""

        def check() -> None:
            if self._group.rank == 0:
                self._is_tight = expect_room(self._path, written=written, linked=linked, kept=kept)

        with_progress_watch(self._group, check, path=self._path, name="save room")

    def _write(
        self,
        shard: Shard,
        token: str,
        hosts: list[str],
        files: list[DataFile],
        threads: int,
        held: Mapping[int, Sequence[LinkableFile]],
    ) -> tuple[list[WrittenExtent], int, bool]:
        """Write this rank's file; return where its extents are, its bytes, and whether it went past the page cache."""
        group = self._group
        name = os.path.join(self._path, data_name(group.rank, token))
        file: BlockFile | CompressedFile | None = None
        answers = True  # the disk does

        def create() -> None:
            nonlocal file
            if shard.nbytes:
                try:
                    if self._file_grows:
                        file = CompressedFile(name, compress=self._compress is not None)
                    else:
                        file = BlockFile(name, create_nbytes=shard.nbytes)
                except FileNotFoundError:
                    raise self._not_shared(group.rank, hosts) from None
                except OSError as error:
                    raise storage_error(error, path=self._path, needed=sum(one.nbytes for one in files)) from error

        def look() -> None:
            if group.rank == 0:
                self._see(files, hosts)

        def write() -> list[WrittenExtent]:
            self._links = make_links(self._values, held, path=self._path, rank=group.rank, token=token, threads=threads)
            if file is None:
                return []
            try:
                if isinstance(file, CompressedFile):
                    written = file.write(shard, self._values, threads=threads)
                else:
                    written = write_shard(file, shard, self._values, threads=threads)
                file.sync()
            except OSError as error:
                raise storage_error(error, path=self._path, needed=sum(one.nbytes for one in files)) from error
            return written

        try:
            with_progress_watch(group, create, path=self._path, name="save create")
            with_progress_watch(group, look, path=self._path, name="save look")
            written = with_progress_watch(group, write, path=self._path, name="save write")
            return written, 0 if file is None else file.nbytes, file is not None and file.direct
        except (CheckpointError, StorageError, CallError, OSError, MemoryError) as error:
            # All ranks agreed that this save failed, or this one cannot go on: none of them will commit it. After a
            # group's own failure they may not agree; then the files stay, and the next save deletes them. So they do
            # on a disk that does not answer, of which nothing more is asked.
            # Rank 0 deletes the others' files, too: its directory must be empty before it can go.
            answers = not _is_stuck(error)
            if answers and group.rank == 0:
                delete_save(self._path, token)
            elif answers:
                with contextlib.suppress(OSError):
                    disk.unlink(name)
            raise
        finally:
            if file is not None and answers:
                file.close()

    def _see(self, files: list[DataFile], hosts: list[str], *, full: bool = False) -> None:
        """Raise unless every file is seen here, and has its size if it must be ``full``."""
        for file in files:
            rank = rank_of(file.name)
            try:
                found = os.stat(os.path.join(self._path, file.name)).st_size
            except FileNotFoundError:
                raise self._not_shared(rank, hosts) from None
            if full and found != file.nbytes:
                raise StorageError(
                    f"Expected {file.name} of rank {rank} in {self._path} to have {file.nbytes} bytes, got {found}. "
                    "The file system lost some, or another job saves there too: give each job a directory of its own."
                )

    def _not_shared(self, rank: int, hosts: list[str]) -> StorageError:
        return StorageError(
            f"Expected {self._path} to be one directory for all ranks, got one on {hosts[0]} (rank 0) that rank {rank} "
            f"on {hosts[rank]} does not share. Name a directory on a file system that all hosts have mounted."
        )

    # -- commit ----------------------------------------------------------------------------------------------------

    def _commit(
        self,
        written: list[WrittenExtent],
        token: str,
        files: list[DataFile],
        heads: list[Head],
        links: Sequence[Links],
    ) -> list[str]:
        """Rank 0 makes the save count. From here on only rank 0 deletes: it alone knows whether the rename happened."""
        group = self._group
        mine = np.array(written, np.int64).reshape(-1)
        counts = [int(count) for count in group.all_gather(np.array([mine.size]), name="save counts").wait()]
        rows = group.all_gather(mine, counts=counts, name="save extents").wait().reshape(-1, len(WrittenExtent._fields))

        def commit() -> list[str]:
            if group.rank:
                return []
            try:
                self._see(files, [head.host for head in heads], full=True)
                manifest = assemble(
                    self._values, heads, rows, files, links, meta=self._meta, is_compressed=self._compress is not None
                )
                text = encode(manifest)
                # Listed before the fence: what somebody writes who takes over later cannot be among it.
                stale = stale_names(self._path, keep=[file.name for file in files])
                commit_manifest(self._path, text, token=token, fence=self._fence)
            except BaseException as error:
                self._withdraw(files, token)
                if isinstance(error, OSError):
                    raise storage_error(error, path=self._path) from error
                raise
            sweep(self._path, stale, now=self._is_tight)
            self._end()  # here, so that no rank goes on before others may save there
            return stale

        removed = with_progress_watch(group, commit, path=self._path, name="save commit")
        return list(gather_json(group, removed, name="save removed")[0])

    def _withdraw(self, files: list[DataFile], token: str) -> None:
        """Delete the data files, unless the manifest that names them is in place by now."""
        with contextlib.suppress(CheckpointError, StorageError):
            if any(file.name in {one.name for one in files} for file in read_manifest(self._path).files):
                return
        delete_save(self._path, token)


def _is_stuck(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.is_stuck
