"""`Tiers`: what of a runtime rests on a disk: this rank's store, and the pipeline that streams it through memory.

    prepare           all ranks: is there a disk, is there room, what can it do?     before anything is put there
    read write        a range of a value, between steps
    prefetch_update   begin to read what the last update began with                  while gradients are being reduced
    run               chunks through the pipeline: read, compute, write back         the update
    wait_written      the last update is on the disk, or known to have failed        before a save, a load
    close             wait, delete the files

Nothing is opened before a section needs it, so a plan that rests in memory has no store, no thread and no file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerort import trace
from zerort.comm import Group
from zerort.comm.agreed import agreed, gather_json
from zerort.device import Ticket
from zerort.engine.ledger import Ledger
from zerort.engine.offload_options import OffloadOptions, Scratch, scratch_directories
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.slot_memory import SlotMemory
from zerort.errors import ClosedError, StorageError
from zerort.typing import Array, Stream

if TYPE_CHECKING:
    from zerort.storage import DirectoryReport, Store
    from zerort.storage.files.extents import FileExtent
    from zerort.streaming import Pipeline, StoreTransfer
    from zerort.streaming.run import Run

__all__ = ["Change", "Tiers"]

_GRACE = 2.0
"""Seconds that a rank which fails leaves the others to delete their files."""


@dataclass(slots=True)
class Change:
    """A change of parameters and state that is under way."""

    begun: bool
    """Whether something may be changed by now."""

    def begin(self) -> None:
        """Note that from here on something may be changed."""
        self.begun = True


class Tiers:
    """This rank's store and pipeline. Every rank has one.

    Args:
        world: All ranks.
        scratch: The directories for files; the environment's or the system's if None.
        options: How values stream; the environment's if None.
        ledger: Where bytes and waits are counted.
        host: What passes through the host on its way between a disk and a GPU; None: memory of its own.
    """

    def __init__(
        self,
        world: Group,
        *,
        scratch: Scratch | None,
        options: OffloadOptions | None,
        ledger: Ledger,
        host: HostMemory | None = None,
    ) -> None:
        self.options = OffloadOptions.from_environment() if options is None else options
        self.directories = scratch_directories(scratch)
        """Where files go."""
        self.disks: tuple[DirectoryReport, ...] = ()
        """What was found out about them; on the first rank of each host, once something rests there."""
        self._world = world
        self._ledger = ledger
        self._store: Store | None = None
        self._files: Store | None = None  # the same values, for arrays of the host only
        self._pipeline: Pipeline | None = None
        self._ahead: Run | None = None
        self._last: Sequence[Sequence[StoreTransfer]] = ()  # what the last update streamed
        self._stream: Stream | None = None
        self._device = world.device
        self._host = HostMemory(world) if host is None else host
        self._slot_memory = SlotMemory(self._host, count=self.options.depth)
        self._counting = threading.Lock()
        self._partial_update = ""
        self._partial_state = False
        self._paths: list[str] = []  # the files of all ranks of this host

    @property
    def store(self) -> Store:
        """This rank's values."""
        if self._store is None:
            raise ClosedError("Expected an open store for offloaded values, got none: the runtime is closed.")
        return self._store

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk, at most."""
        return self.options.chunk_nbytes // 4

    @property
    def stream(self) -> Stream:
        """Does what follows a reduction: puts gradients away."""
        if self._stream is None:
            self._stream = self._device.stream("offload gradients")
        return self._stream

    @property
    def resting_nbytes(self) -> int:
        """Bytes of this rank that rest on a disk."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def memory_nbytes(self) -> int:
        """Memory that chunks take on their way, or that is kept for them."""
        return max(self._slot_memory.nbytes, 0 if self._pipeline is None else self._pipeline.nbytes)

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
        hosts = [host for host, _ in told]
        if self._store is None:
            self._open(hosts, what=what)
        needs = gather_json(self._world, nbytes + beside(), name="offload")
        needed = sum(need for host, need in zip(hosts, needs, strict=True) if host == hosts[self._world.rank])
        with agreed(self._world, "offload"):
            from zerort.engine.residence.scratch_store import expect_room

            expect_room(self.directories, needed, what=what)

    def _open(self, hosts: Sequence[str], *, what: str) -> None:
        """Open the store, on all ranks or on none. The first rank of each host looks at its disks."""
        from zerort.engine.residence.scratch_store import look_at, open_together

        here, rank = hosts[self._world.rank], self._world.rank
        with agreed(self._world, "offload"):
            if hosts.index(here) == rank and not self.disks:
                self.disks = look_at(self.directories, what=what, rank=rank)
        self._files, self._store = open_together(self._world, self.directories, self.options, host=self._host)
        paths = gather_json(self._world, self._own_paths(), name="offload")
        self._paths = [path for host, some in zip(hosts, paths, strict=True) if host == here for path in some]

    def _own_paths(self) -> list[str]:
        return [store.path for store in self._members()]

    def _members(self) -> Sequence[Any]:
        """Return this rank's stores, one for each directory."""
        return () if self._files is None else getattr(self._files, "members", (self._files,))

    def reserve(self, slot_nbytes: int) -> None:
        """Have pinned memory for chunks of so many bytes that go on to a GPU. Every rank calls this alike."""
        if slot_nbytes > self._slot_memory.slot_nbytes:
            if self.wait_written() is None:  # else it remembers what failed; nothing is under way in either case
                self._drop_pipeline()
            self._slot_memory.reserve(slot_nbytes)

    # -- moving ----------------------------------------------------------------------------------------------------

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Read from a value, as `Store.read` does."""
        self._count(read=out.nbytes)
        return self.store.read(name, out, offset=offset)

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Write to a value, as `Store.write` does."""
        self._count(written=source.nbytes)
        return self.store.write(name, source, offset=offset)

    def file_extents(self, name: str, nbytes: int, directory: str) -> list[FileExtent]:
        """Return the parts of a value in files that can have a second name in a directory; see `extents_of`."""
        from zerort.storage.stores.extents import extents_of

        return [] if self._files is None else extents_of(self._files, name, nbytes=nbytes, directory=directory)

    def copied_parts(self, directory: str) -> list[float]:
        """Return for each of `directories` its part of all bytes, if its files cannot be linked; see `file_extents`."""
        from zerort.storage.stores.extents import copied_parts

        assert self._files is not None
        return copied_parts(self._files, directory)

    def prefetch_update(self) -> None:
        """Begin to read what the last update began with: the next one will, too. Gradients need not be there yet.

        Nothing that these chunks hold may be written until `run` or `cancel_prefetch`.
        """
        if self._ahead is None and self._pipeline is not None and self._last:
            first = self._last[: self._pipeline.depth]
            if all(part.write for chunk in first for part in chunk):  # what is only read are gradients
                self._ahead = self._pipeline.begin(self._last)

    def cancel_prefetch(self) -> None:
        """Let go of what was read ahead: it is about to change, or will not be used."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()

    def run(self, chunks: Sequence[Sequence[StoreTransfer]], compute: Callable[..., object]) -> None:
        """Stream chunks through memory, as `Pipeline.run` does. Returns while the last ones are still being written.

        What goes wrong from then on, `failure` tells.

        Raises:
            Exception: What `Pipeline.run` raises, or what a write of the last update has met.
        """
        run, self._ahead = self._ahead, None
        if run is not None and not run.continues(chunks):
            run.cancel()
            run = None
        if run is None:
            run = self._pipeline_for(chunks).begin(chunks)
        report = run.go(compute, finish=False)
        self._last = chunks
        self._count(read=report.read_nbytes, written=report.written_nbytes)
        self._ledger.stalled["nvme"] += int(report.stall_seconds * 1e9)
        # Each read has waited for the last update's write of the same value. If that failed, what was read is older.
        self.check_written()

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        with self._counting:  # checkpoints read and write with several threads
            self._ledger.tiered["nvme read"] += read
            self._ledger.tiered["nvme write"] += written

    def _pipeline_for(self, chunks: Sequence[Sequence[StoreTransfer]]) -> Pipeline:
        from zerort.streaming import Pipeline, slot_nbytes_of

        needed = max(slot_nbytes_of(chunks), self._slot_memory.slot_nbytes)
        if self._pipeline is not None and self._pipeline.slot_nbytes < needed:
            pipeline, self._pipeline = self._pipeline, None
            pipeline.close()
        if self._pipeline is None:
            pinned = self._slot_memory.of(needed)
            self._pipeline = Pipeline(slot_nbytes=needed, depth=self.options.depth, pinned=pinned, name="offload")
        return self._pipeline

    # -- what a failure leaves -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def partial_update_guard(self, what: str, *, state: bool = True, begun: bool = True) -> Iterator[Change]:
        """Note that what is changed inside is half done if the block ends with an error, whatever error that is.

        Args:
            what: What is changed, as a noun phrase.
            state: Whether that is optimizer state, too, not parameters alone.
            begun: False: nothing is changed before the block says so.
        """
        change = Change(begun)
        try:
            yield change
        except BaseException as error:
            if change.begun:
                self._partial_state |= state
                self._partial_update = f"{what}, half done when it ended with {type(error).__name__}: {error}"
            raise

    def check_whole(self, verb: str) -> None:
        """Raise if parameters and state are not those of one update: all ranks know.

        Raises:
            StorageError: They are not, and why.
        """
        if self._partial_update:
            raise StorageError(
                f"{verb}: Expected parameters and state of one update, got those of {self._partial_update} Go back to "
                "a checkpoint: rt.load(path), or rt.resume() if the last step is kept."
            )

    def failure(self) -> StorageError | None:
        """Return what a write of the last update has met, on this rank alone, as far as it is known. Never waits.

        From then on this rank has it to tell at every meeting, until a load.
        """
        found = None if self._pipeline is None else self._pipeline.failure()
        if found is None or isinstance(found, StorageError):
            return found
        what = f"{type(found).__name__}: {found} (rank {self._world.rank})"
        failure = StorageError(f"Expected to write what an update computed, got {what}. Go back to a checkpoint.")
        failure.__cause__ = found
        return failure

    def check_written(self) -> None:
        """Raise what a write of the last update has met, on this rank alone, as far as it is known. Never waits."""
        if (failed := self.failure()) is not None:
            raise failed

    def wait_written(self) -> StorageError | None:
        """Wait until the last update is written; return what went wrong, on this rank alone."""
        self.cancel_prefetch()
        if self._pipeline is not None:
            with contextlib.suppress(Exception), self._ledger.stall("nvme"):
                self._pipeline.finish()  # not-gpu: between the host and a disk
        return self.failure()

    @property
    def is_partially_updated(self) -> bool:
        """Whether optimizer state of this rank is not that of one update, or not for sure: a sync has failed."""
        return self._partial_state or self.failure() is not None or any(store.has_lost for store in self._members())

    def clear_partial_update(self) -> None:
        """Note that parameters and state are whole again."""
        self._partial_update, self._partial_state = "", False
        self._drop_pipeline()  # which remembers what failed

    def _drop_pipeline(self) -> None:
        self.cancel_prefetch()
        pipeline, self._pipeline = self._pipeline, None
        self._last = ()
        if pipeline is not None:
            with contextlib.suppress(Exception):  # told before, or of no use to anybody now
                pipeline.close()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way and delete the files. Closing twice is fine."""
        store, self._store = self._store, None
        with contextlib.ExitStack() as stack, trace.span("close", track="offload"):
            if store is not None:
                stack.callback(store.close)
            stack.callback(self._drop_pipeline)
            if self._stream is not None:
                stack.callback(self._stream.close)

    def wait_for_others(self) -> None:
        """Give the other ranks of this host a moment to delete their files: an error is about to end the whole job.

        Those that do not hear of it in time leave them to the next run.
        """
        until = time.monotonic() + _GRACE
        while any(map(os.path.exists, self._paths)) and time.monotonic() < until:
            time.sleep(0.01)
