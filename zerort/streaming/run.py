"""`Run`: one run of a pipeline over some chunks: feeds slots, computes on the caller's thread, begins to write back.

Pipeline.begin ─> read_ahead   the first chunks, as many as there are slots
continues                      are these the chunks that were prefetched?
go                             wait for a chunk, compute, begin to write it, feed the next; what it did
cancel                         wait for all that was begun, and go no further
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerort import trace
from zerort.device import Done, Ticket, joined
from zerort.device.slots import Slot
from zerort.streaming.transfers import StoreTransfer, check_apart, lay_out, slot_nbytes_of
from zerort.streaming.workspace import Workspace
from zerort.typing import Array

__all__ = ["PipelineReport", "Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """What a run did, and where its time went."""

    chunks: int
    depth: int
    """Slots."""
    read_nbytes: int
    written_nbytes: int
    seconds: float
    compute_seconds: float
    """Of `seconds`, in compute."""
    stall_seconds: float
    """Of `seconds`, waiting for reads or writes: what the overlap did not hide."""


@dataclass(frozen=True, slots=True)
class _FedChunk:
    """A chunk on its way: its slot, its arrays there, and the reads that fill them."""

    slot: Slot
    arrays: list[Array]
    reads: list[Ticket[Any]] = field(default_factory=list)


class Run:
    """One run of a pipeline, made by `Pipeline.begin`.

    Args:
        workspace: The pipeline's slots and threads.
        chunks: What to stream.
    """

    def __init__(self, workspace: Workspace, chunks: Sequence[Sequence[StoreTransfer]]) -> None:
        self._workspace = workspace
        self._chunks = chunks
        self._compute: Callable[..., object] = _nothing
        self._began = time.perf_counter()
        self._fed: list[tuple[_FedChunk, Ticket[Any]]] = []  # given to the feeder, in order
        self._computing = self._stalling = 0.0
        self._read = self._written = 0
        self._stopped = False

    def read_ahead(self) -> None:
        """Begin to read as many chunks as there are slots."""
        depth = self._workspace.depth
        if depth > 1:
            for number in range(min(depth, len(self._chunks))):
                self._feed(number)

    def continues(self, chunks: Sequence[Sequence[StoreTransfer]]) -> bool:
        """Take ``chunks`` in place of those that were prefetched, unless others are being read or slots are too small.

        Returns:
            Whether they were taken. If not, cancel this run.
        """
        fed = len(self._fed)
        if list(map(list, chunks[:fed])) != list(map(list, self._chunks[:fed])):
            return False
        if slot_nbytes_of(chunks) > self._workspace.slot_nbytes:
            return False
        check_apart(chunks)
        self._workspace.reserve(len(chunks))
        self._chunks = chunks
        return True

    def go(self, compute: Callable[..., object], *, finish: bool = True) -> PipelineReport:
        """Read what is not read yet, compute and write back; see `Pipeline.run`."""
        self._compute = compute
        self._began = time.perf_counter()
        with trace.span("run", track=self._workspace.name, chunks=len(self._chunks)):
            try:
                self._walk()
                with self._stalled("drain"):
                    self._workspace.wait_submitted()
                if finish:
                    with self._stalled("drain"):
                        self._workspace.finish()  # gpu-wait: what_a_run_has_written
            except BaseException:
                self.cancel()
                raise
        return self._report()

    def _walk(self) -> None:
        depth = self._workspace.depth
        if depth == 1:
            for number in range(len(self._chunks)):
                self._one_by_one(number)
            return
        for number in range(len(self._fed), min(depth, len(self._chunks))):
            self._feed(number)
        for number in range(len(self._chunks)):
            fed, ticket = self._fed[0]
            with self._stalled("wait"):
                ticket.wait()  # gpu-wait: what_a_run_has_written
                for read in fed.reads:
                    read.wait()  # gpu-wait: what_a_run_has_written
            self._fed.pop(0)
            self._do(number, fed)
            if number + depth < len(self._chunks):
                self._feed(number + depth)

    def _take(self, number: int) -> _FedChunk:
        """Give a chunk its slot."""
        slot = self._workspace.slots.take()
        return _FedChunk(slot, lay_out(self._chunks[number], slot.memory))

    def _feed(self, number: int) -> None:
        """Let the feeder read a chunk as soon as its slot is written."""
        fed = self._take(number)

        def work() -> None:
            self._workspace.wait_written(fed.slot)
            if not self._stopped:
                self._begin_reads(number, fed)

        self._fed.append((fed, self._workspace.feeder.submit(work, name=f"feed {number}")))

    def _begin_reads(self, number: int, fed: _FedChunk) -> None:
        for transfer, array in zip(self._chunks[number], fed.arrays, strict=True):
            if transfer.read:
                fed.reads.append(transfer.store.read(transfer.name, array, offset=transfer.offset))

    def _do(self, number: int, fed: _FedChunk) -> None:
        """Compute a chunk whose reads have ended, and begin to write it."""
        began = time.perf_counter()
        with trace.span(f"compute {number}", track=f"{self._workspace.name} compute"):
            queued = self._compute(number, *fed.arrays)
        self._computing += time.perf_counter() - began
        write = functools.partial(self._write, number, fed)
        writes: list[Ticket[Any]] = []
        try:
            if isinstance(queued, Ticket) and not isinstance(queued, Done):
                writes.append(self._workspace.write_after(queued, write))
            else:
                write(writes)
        finally:  # if one is refused, those before it are still under way
            under_way = joined(writes, result=None)
            fed.slot.release(after=under_way)  # gpu-wait: what_a_run_has_written [after=under_way -> ]
        for transfer in self._chunks[number]:
            self._read += transfer.nbytes if transfer.read else 0
            self._written += transfer.nbytes if transfer.write else 0

    def _write(self, number: int, fed: _FedChunk, tickets: list[Ticket[Any]]) -> None:
        """Begin to write a chunk, and add the tickets to a list."""
        for transfer, array in zip(self._chunks[number], fed.arrays, strict=True):
            if transfer.write:
                tickets.append(transfer.store.write(transfer.name, array, offset=transfer.offset))

    def _one_by_one(self, number: int) -> None:
        """Read, compute and write one chunk, each when the one before has ended."""
        fed = self._take(number)
        with self._stalled("wait"):
            self._workspace.wait_written(fed.slot)
        with self._stalled("read"):
            try:
                self._begin_reads(number, fed)
            finally:
                joined(fed.reads, result=None).wait()  # gpu-wait: what_a_run_has_written
        self._do(number, fed)
        with self._stalled("write"):
            self._workspace.wait_written(fed.slot)

    def cancel(self) -> None:
        """Wait for all that was begun, whatever becomes of it, and go no further."""
        self._stopped = True  # for what the feeder has not come to yet
        for fed, ticket in self._fed:
            with contextlib.suppress(Exception):
                ticket.wait()  # gpu-wait: nothing_is_asked_of_a_store
            for read in fed.reads:
                with contextlib.suppress(Exception):
                    read.wait()  # gpu-wait: slots_are_free_when_a_run_has_failed
        self._fed.clear()
        with contextlib.suppress(Exception):
            self._workspace.finish()  # gpu-wait: slots_are_free_when_a_run_has_failed
        self._workspace.slots.reclaim()

    @contextlib.contextmanager
    def _stalled(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with trace.span(what, track=f"{self._workspace.name} stall"):
                yield
        finally:
            self._stalling += time.perf_counter() - began

    def _report(self) -> PipelineReport:
        return PipelineReport(
            chunks=len(self._chunks),
            depth=self._workspace.depth,
            read_nbytes=self._read,
            written_nbytes=self._written,
            seconds=time.perf_counter() - self._began,
            compute_seconds=self._computing,
            stall_seconds=self._stalling,
        )


def _nothing(number: int, *arrays: object) -> None:
    return None
