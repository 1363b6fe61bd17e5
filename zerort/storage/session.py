"""`StorageSession`: this rank's store of offloaded values, from the first that needs it to the end of the runtime.

    prepare      all ranks: is there a disk, is there room, what can it do?     before anything is put there
    read write   a range of a value, counted
    close        delete the files

Nothing is opened before a value needs it, so a plan that rests in memory has no store, no thread and no file. Updates
stream through `zerort.streaming.update_stream`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerort import trace
from zerort.comm import Group
from zerort.comm.agreed import agreed, gather_json
from zerort.config.offload import OffloadOptions, Scratch, scratch_directories
from zerort.device import Ticket
from zerort.errors import ClosedError
from zerort.typing import Array, HostMemorySource

if TYPE_CHECKING:
    from zerort.storage.files.extents import FileExtent
    from zerort.storage.files.preflight import DirectoryReport
    from zerort.storage.stores.store import Parts, Store

__all__ = ["StorageSession"]

_GRACE = 2.0
"""Seconds that a rank which fails leaves the others to delete their files."""


class StorageSession:
    """This rank's store. Every rank has one.

    Args:
        world: All ranks.
        scratch: The directories for files; the environment's or the system's if None.
        options: How values stream.
        traffic: Where bytes are counted, by direction.
        host: What passes through the host on its way between a disk and a GPU.
    """

    def __init__(
        self,
        world: Group,
        *,
        scratch: Scratch | None,
        options: OffloadOptions,
        traffic: Counter[str],
        host: HostMemorySource,
    ) -> None:
        self.options = options
        self.directories = scratch_directories(scratch)
        """Where files go."""
        self.disks: tuple[DirectoryReport, ...] = ()
        """What was found out about them; on the first rank of each host, once something rests there."""
        self._world = world
        self._traffic = traffic
        self._host = host
        self._store: Store | None = None
        self._files: Store | None = None  # the same values, for arrays of the host only
        self._counting = threading.Lock()
        self._paths: list[str] = []  # the files of all ranks of this host

    @property
    def store(self) -> Store:
        """This rank's values."""
        if self._store is None:
            raise ClosedError("Expected an open store for offloaded values, got none: the runtime is closed.")
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes of this rank that rest on a disk."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def has_lost(self) -> bool:
        """Whether a sync has failed: what was written before may not be there."""
        return any(store.has_lost for store in self._members())

    # -- before anything is put there ------------------------------------------------------------------------------

    def prepare(self, nbytes: int, *, what: str, beside: Callable[[], int] = lambda: 0) -> None:
        """Open the store if any rank needs it, and refuse what has no room. Every rank calls this.

        Args:
            nbytes: What this rank is about to put there.
            what: What that is, as a noun phrase.
            beside: Returns what steps of this rank will take there besides; called on every rank, with the store open.

        Raises:
            StorageError: A directory cannot be used, or has too little room for all ranks of its host; on every rank.
        """
        told = gather_json(self._world, [socket.gethostname(), nbytes], name="offload")
        if not any(need for _, need in told):
            return
        from zerort.storage.opening import expect_room  # here: a plan that rests in memory needs no store

        hosts = [host for host, _ in told]
        if self._store is None:
            self._open(hosts, what=what)
        needs = gather_json(self._world, nbytes + beside(), name="offload")
        needed = sum(need for host, need in zip(hosts, needs, strict=True) if host == hosts[self._world.rank])
        with agreed(self._world, "offload"):
            expect_room(self.directories, needed, what=what)

    def _open(self, hosts: Sequence[str], *, what: str) -> None:
        """Open the store, on all ranks or on none. The first rank of each host looks at its disks."""
        from zerort.storage.opening import look_at, open_together

        here, rank = hosts[self._world.rank], self._world.rank
        with agreed(self._world, "offload"):
            if hosts.index(here) == rank and not self.disks:
                self.disks = look_at(self.directories, what=what, rank=rank)
        self._files, self._store = open_together(self._world, self.directories, self.options, host=self._host)
        own = [store.path for store in self._members()]
        paths = gather_json(self._world, own, name="offload")
        self._paths = [path for host, some in zip(hosts, paths, strict=True) if host == here for path in some]

    def _members(self) -> Sequence[Any]:
        """Return this rank's stores, one for each directory."""
        return () if self._files is None else getattr(self._files, "members", (self._files,))

    # -- values ----------------------------------------------------------------------------------------------------

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Read from a value, as `Store.read` does."""
        self.count(read=out.nbytes)
        return self.store.read(name, out, offset=offset)

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Write to a value, as `Store.write` does."""
        self.count(written=source.nbytes)
        return self.store.write(name, source, offset=offset)

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Read several ranges of a value, as `Store.read_parts` does."""
        self.count(read=out.nbytes)
        return self.store.read_parts(name, out, parts)

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Write several ranges of a value, as `Store.write_parts` does."""
        self.count(written=source.nbytes)
        return self.store.write_parts(name, source, parts)

    def count(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes that were moved."""
        with self._counting:  # checkpoints read and write with several threads
            self._traffic["nvme read"] += read
            self._traffic["nvme write"] += written

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return the parts of a value in files that can have a second name in a directory; see `Store.file_extents`."""
        return [] if self._files is None else self._files.file_extents(name, directory)

    def copied_parts(self, directory: str) -> list[float]:
        """Return for each of `directories` its part of all bytes, if its files cannot be linked; see `file_extents`."""
        assert self._files is not None
        return self._files.copied_parts(directory)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way and delete the files. Closing twice is fine."""
        store, self._store = self._store, None
        if store is not None:
            with trace.span("close", track="offload"):
                store.close()

    def wait_for_others(self) -> None:
        """Give the other ranks of this host a moment to delete their files: an error is about to end the whole job.

        Those that do not hear of it in time leave them to the next run.
        """
        until = time.monotonic() + _GRACE
        while any(map(os.path.exists, self._paths)) and time.monotonic() < until:
            time.sleep(0.01)
