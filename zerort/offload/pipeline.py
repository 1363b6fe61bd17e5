"""`Pipeline`: the one loop that streams values through memory: read, compute, write back, `depth` chunks at a time.

    slot 0   read 0 | compute 0 | write 0 | read 3 ……
    slot 1            read 1 ───| compute 1 | write 1 | read 4 ……
    slot 2                      read 2 ─────| compute 2 | write 2 ……

A chunk is some parts of values, of one store or several. A slot is memory that holds a chunk from its read until it is
written; a feeder stream reads the next chunk into a slot as soon as it is free, while the caller's thread computes.
Reads may begin before there is anything to compute with (`begin`), and writes go on after a run (``finish=False``).
With ``depth=1`` each thing begins when the one before has ended: for debugging. With ``depth="auto"`` the first chunks
are done so, are timed, and the number of slots follows (`choose_depth`). Every chunk is computed once, on the caller's
thread, in order. May import: device, errors, trace, offload.parts, offload.slots.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from zerort import trace
from zerort.device import HostStream, Ticket, joined
from zerort.errors import CallError, ClosedError
from zerort.offload.parts import MOST_SLOTS, Part, PipelineReport, check_apart, choose_depth
from zerort.offload.slots import Fed, Slot, Slots, nbytes_of
from zerort.typing import Device

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Pipeline", "Run"]

_TIMED = 2
"""Chunks that are timed to choose a depth; the first also touches memory, so the faster of two counts."""


class Pipeline:
    """Streams chunks through a few slots of memory.

    Args:
        slot_nbytes: Memory of one slot; `Pipeline.slot_nbytes_of` says what a chunk takes.
        depth: Slots: a number, or ``"auto"``.
        device: Whose memory; None takes the host's.
        name: What its tracks in a trace are called.
    """

    def __init__(
        self,
        *,
        slot_nbytes: int,
        depth: int | Literal["auto"] = 3,
        device: Device | None = None,
        name: str = "pipeline",
    ) -> None:
        if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise CallError(f'Expected a depth of at least 1, or "auto", got {depth!r}.')
        self.name = name
        self._depth: int | None = None if depth == "auto" else depth
        self.slots = Slots(device, slot_nbytes=slot_nbytes, most=MOST_SLOTS if depth == "auto" else depth)
        """The memory; for the run."""
        self._feeder = HostStream(f"{name} feed")
        self._closed = False

    @staticmethod
    def slot_nbytes_of(chunks: Sequence[Sequence[Part]]) -> int:
        """Return the memory that the largest of these chunks takes: its parts, each from a page on."""
        return max(map(nbytes_of, chunks), default=0)

    @property
    def depth(self) -> int | None:
        """The number of slots; None until it has been chosen."""
        return self._depth

    @property
    def nbytes(self) -> int:
        """The memory of the slots that exist."""
        return self.slots.nbytes

    def run(
        self, chunks: Sequence[Sequence[Part]], compute: Callable[..., object], *, finish: bool = True
    ) -> PipelineReport:
        """Read every chunk, compute, and write it back.

        Args:
            chunks: What to stream; what one writes, no other one touches.
            compute: Called as ``compute(number, array, array, …)`` with one 1-D array for each part of the chunk, in
                order, on this thread. It changes them in place; they are the pipeline's again when it returns.
            finish: Wait until all is written. False returns while the last chunks still are: they hold their slots, and
                the next run or `finish` waits for them.

        Returns:
            What it did.

        Raises:
            CallError: A chunk does not fit into a slot, or touches what another one writes.
            Exception: What a read, compute or a write raised. Nothing is under way any more: chunks that were computed
                are written, unless that failed; no further one was begun.
        """
        return self.begin(chunks).go(compute, finish=finish)

    def begin(self, chunks: Sequence[Sequence[Part]]) -> Run:
        """Begin to read the first chunks; nothing is computed or written until the run goes on, or it is cancelled.

        One run at a time.

        Args:
            chunks: As in `run`.
        """
        if self._closed:
            raise ClosedError(f"Pipeline {self.name!r} is closed.")
        self.check(chunks)
        run = Run(self, chunks)
        run.read_ahead()
        return run

    def check(self, chunks: Sequence[Sequence[Part]]) -> None:
        """Refuse chunks that this pipeline cannot stream.

        Raises:
            CallError: A chunk does not fit into a slot, or touches what another one writes.
        """
        needed = self.slot_nbytes_of(chunks)
        if needed > self.slots.slot_nbytes:
            raise CallError(
                f"Expected chunks of at most {self.slots.slot_nbytes} bytes, a slot of pipeline {self.name!r}, got one "
                f"of {needed}. Cut chunks smaller, or make the pipeline with a larger slot_nbytes."
            )
        check_apart(chunks)

    def finish(self) -> None:
        """Wait until everything that was computed is written.

        Raises:
            Exception: What a write raised; all others have ended, too.
        """
        self.slots.settle()

    def failure(self) -> BaseException | None:
        """Return what a write of an earlier run raised, if it is known by now. Never waits."""
        return self.slots.failure()

    def close(self) -> None:
        """Wait for writes that are under way and give the memory back. Closing twice is fine.

        Raises:
            Exception: What a write raised.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.finish()
        finally:
            self._feeder.close()
            self.slots.close()

    def settle_depth(self, depth: int) -> None:
        """Fix the number of slots."""
        self._depth = depth

    def submit(self, work: Callable[[], Any], name: str) -> Ticket[Any]:
        """Let the feeder do something."""
        return self._feeder.submit(work, name=name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"depth {self._depth or 'auto'}, {len(self.slots)} slots"
        return f"Pipeline({self.name!r}, {what} of {self.slots.slot_nbytes} bytes)"


class Run:
    """One run of a pipeline, made by `Pipeline.begin`.

    Args:
        pipeline: Whose slots it takes.
        chunks: What to stream.
    """

    def __init__(self, pipeline: Pipeline, chunks: Sequence[Sequence[Part]]) -> None:
        self._pipeline = pipeline
        self._chunks = chunks
        self._compute: Callable[..., object] = _nothing
        self._began = time.perf_counter()
        self._fed: list[tuple[Fed, Ticket[Any]]] = []  # given to the feeder, in order
        self._computing = self._stalling = 0.0
        self._read = self._written = 0
        self._stopped = False

    def read_ahead(self) -> None:
        """Begin to read as many chunks as there are slots."""
        depth = self._pipeline.depth
        if depth is not None and depth > 1:
            for number in range(min(depth, len(self._chunks))):
                self._feed(number)

    def continues(self, chunks: Sequence[Sequence[Part]]) -> bool:
        """Take ``chunks`` in place of those that were foreseen, unless others are being read or slots are too small.

        Returns:
            Whether they were taken. If not, cancel this run.
        """
        fed = len(self._fed)
        if list(map(list, chunks[:fed])) != list(map(list, self._chunks[:fed])):
            return False
        if self._pipeline.slot_nbytes_of(chunks) > self._pipeline.slots.slot_nbytes:
            return False
        check_apart(chunks)
        self._chunks = chunks
        return True

    def go(self, compute: Callable[..., object], *, finish: bool = True) -> PipelineReport:
        """Read what is not read yet, compute and write back; see `Pipeline.run`."""
        self._compute = compute
        self._began = time.perf_counter()
        with trace.span("run", track=self._pipeline.name, chunks=len(self._chunks)):
            try:
                self._walk()
                if finish:
                    with self._stalled("drain"):
                        self._pipeline.finish()
            except BaseException:
                self.cancel()
                raise
        return self._report()

    def _walk(self) -> None:
        done = 0
        if self._pipeline.depth is None:
            done = self._time_some()
        depth = self._pipeline.depth
        if depth is None:
            return  # there were too few chunks to tell
        if depth == 1:
            for number in range(done, len(self._chunks)):
                self._one_by_one(number)
            return
        for number in range(done + len(self._fed), min(done + depth, len(self._chunks))):
            self._feed(number)
        for number in range(done, len(self._chunks)):
            fed, ticket = self._fed[0]
            with self._stalled("wait"):
                ticket.wait()
                for read in fed.reads:
                    read.wait()
            self._fed.pop(0)
            self._do(number, fed)
            if number + depth < len(self._chunks):
                self._feed(number + depth)

    def _take(self) -> Slot:
        return self._pipeline.slots.take(most=self._pipeline.depth or 1)

    def _feed(self, number: int) -> None:
        """Let the feeder read a chunk as soon as its slot is written."""
        fed = Fed(self._take(), self._chunks[number])

        def work() -> None:
            fed.slot.settle()
            if not self._stopped:
                self._begin_reads(number, fed)

        self._fed.append((fed, self._pipeline.submit(work, f"feed {number}")))

    def _begin_reads(self, number: int, fed: Fed) -> None:
        for part, array in zip(self._chunks[number], fed.arrays, strict=True):
            if part.read:
                fed.reads.append(part.store.read(part.name, array, offset=part.offset))

    def _do(self, number: int, fed: Fed) -> None:
        """Compute a chunk whose reads have ended, and begin to write it."""
        began = time.perf_counter()
        with trace.span(f"compute {number}", track=f"{self._pipeline.name} compute"):
            self._compute(number, *fed.arrays)
        self._computing += time.perf_counter() - began
        for part, array in zip(self._chunks[number], fed.arrays, strict=True):
            if part.write:
                fed.slot.writes.append(part.store.write(part.name, array, offset=part.offset))
                self._written += part.nbytes
            if part.read:
                self._read += part.nbytes
        self._pipeline.slots.give_back(fed.slot)

    def _one_by_one(self, number: int) -> tuple[float, float, float]:
        """Read, compute and write one chunk, each when the one before has ended; return their seconds."""
        fed = Fed(self._take(), self._chunks[number])
        with self._stalled("wait"):
            fed.slot.settle()
        marks = [time.perf_counter()]
        with self._stalled("read"):
            try:
                self._begin_reads(number, fed)
            finally:
                joined(fed.reads, result=None).wait()
        marks.append(time.perf_counter())
        self._do(number, fed)
        marks.append(time.perf_counter())
        with self._stalled("write"):
            fed.slot.settle()
        marks.append(time.perf_counter())
        read, compute, write = (after - before for before, after in itertools.pairwise(marks))
        return read, compute, write

    def _time_some(self) -> int:
        timed = [self._one_by_one(number) for number in range(min(_TIMED, len(self._chunks)))]
        if len(timed) == _TIMED:
            best = [min(stage) for stage in zip(*timed, strict=True)]
            self._pipeline.settle_depth(choose_depth(*best))
        return len(timed)

    def cancel(self) -> None:
        """Wait for all that was begun, whatever becomes of it, and go no further."""
        self._stopped = True  # for what the feeder has not come to yet
        for fed, ticket in self._fed:
            with contextlib.suppress(Exception):
                ticket.wait()
            for read in fed.reads:
                with contextlib.suppress(Exception):
                    read.wait()
        self._fed.clear()
        with contextlib.suppress(Exception):
            self._pipeline.finish()
        self._pipeline.slots.give_all_back()

    @contextlib.contextmanager
    def _stalled(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with trace.span(what, track=f"{self._pipeline.name} stall"):
                yield
        finally:
            self._stalling += time.perf_counter() - began

    def _report(self) -> PipelineReport:
        return PipelineReport(
            chunks=len(self._chunks),
            depth=self._pipeline.depth or 1,
            read_nbytes=self._read,
            written_nbytes=self._written,
            seconds=time.perf_counter() - self._began,
            compute_seconds=self._computing,
            stall_seconds=self._stalling,
        )


def _nothing(number: int, *arrays: object) -> None:
    return None
