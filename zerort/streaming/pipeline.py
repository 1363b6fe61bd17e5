"""`Pipeline`: the one loop that streams values through memory: read, compute, write back, `depth` chunks at a time.

    slot 0   read 0 | compute 0 | write 0 | read 3 ……
    slot 1            read 1 ───| compute 1 | write 1 | read 4 ……
    slot 2                      read 2 ─────| compute 2 | write 2 ……

A chunk is some parts of values, of one store or several. A slot is memory that holds a chunk from its read until it is
written; a feeder stream reads the next chunk into a slot as soon as it is free, while the caller's thread computes.
Reads may begin before there is anything to compute with (`begin`), and writes go on after a run (``finish=False``).
With ``depth=1`` each thing begins when the one before has ended: for debugging. Every chunk is computed once, on the
caller's thread, in order. What a run does is in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zerort import forks
from zerort.errors import CallError, ClosedError
from zerort.streaming.run import PipelineReport, Run
from zerort.streaming.transfers import StoreTransfer, check_apart, slot_nbytes_of
from zerort.streaming.workspace import Workspace
from zerort.typing import Array, Memory

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Pipeline"]


class Pipeline:
    """Streams chunks through a few slots of memory.

    Args:
        slot_nbytes: Memory of one slot; `slot_nbytes_of` says what a chunk takes.
        depth: Slots.
        device: Whose memory slots are made of; None takes the host's.
        pinned: Host memory to cut slots from instead: 1-D, uint8, ``depth * slot_nbytes`` bytes or more, at a page.
        name: What its tracks in a trace are called.
    """

    def __init__(
        self,
        *,
        slot_nbytes: int,
        depth: int = 3,
        device: Memory | None = None,
        pinned: Array | None = None,
        name: str = "pipeline",
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise CallError(f"Expected a depth of at least 1, got {depth!r}.")
        self.name = name
        self.depth = depth
        self.slot_nbytes = slot_nbytes
        self._workspace = Workspace(name, slot_nbytes=slot_nbytes, depth=depth, memory=device, pinned=pinned)
        self._closed = self._is_inherited = False
        forks.follow(self)

    @property
    def nbytes(self) -> int:
        """The memory of the slots that exist."""
        return self._workspace.slots.nbytes

    def reserve(self) -> None:
        """Have all slots now, also those that the next run has too few chunks for: what it takes is known before."""
        self._workspace.reserve(self.depth)

    def run(
        self, chunks: Sequence[Sequence[StoreTransfer]], compute: Callable[..., object], *, finish: bool = True
    ) -> PipelineReport:
        """Read every chunk, compute, and write it back.

        Args:
            chunks: What to stream; what one writes, no other one touches.
            compute: Called as ``compute(number, array, array, …)`` with one 1-D array for each part of the chunk, in
                order, on this thread. It changes them in place; they are the pipeline's again when it returns, or when
                the Ticket that it returns is done: then the chunk is written, while the next one is computed.
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

    def begin(self, chunks: Sequence[Sequence[StoreTransfer]]) -> Run:
        """Begin to read the first chunks; nothing is computed or written until the run goes on, or it is cancelled.

        One run at a time.

        Args:
            chunks: As in `run`.
        """
        if self._is_inherited:
            raise forks.inherited(f"pipeline {self.name!r}")
        if self._closed:
            raise ClosedError(f"Pipeline {self.name!r} is closed.")
        self.check(chunks)
        self._workspace.reserve(len(chunks))
        run = Run(self._workspace, chunks)
        run.read_ahead()
        return run

    def check(self, chunks: Sequence[Sequence[StoreTransfer]]) -> None:
        """Refuse chunks that this pipeline cannot stream.

        Raises:
            CallError: A chunk does not fit into a slot, or touches what another one writes.
        """
        needed = slot_nbytes_of(chunks)
        if needed > self.slot_nbytes:
            raise CallError(
                f"Expected chunks of at most {self.slot_nbytes} bytes, a slot of pipeline {self.name!r}, got one "
                f"of {needed}. Cut chunks smaller, or make the pipeline with a larger slot_nbytes."
            )
        check_apart(chunks)

    def finish(self) -> None:
        """Wait until everything that was computed is written.

        Raises:
            Exception: What a write raised; all others have ended, too.
        """
        self._workspace.finish()  # gpu-wait: what_was_left_to_be_written

    def failure(self) -> BaseException | None:
        """Return what a write of an earlier run raised, if it is known by now. Never waits."""
        return self._workspace.failure()

    def close(self) -> None:
        """Wait for writes that are under way and give the memory back. Closing twice is fine.

        Raises:
            Exception: What a write raised.
        """
        if self._closed:
            return
        self._closed = True
        self._workspace.close()

    def disown(self) -> None:
        """In a forked child: be closed. What is under way is its parent's."""
        self._closed = self._is_inherited = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"depth {self.depth}, {self._workspace.slots.count} slots"
        return f"Pipeline({self.name!r}, {what} of {self.slot_nbytes} bytes)"
