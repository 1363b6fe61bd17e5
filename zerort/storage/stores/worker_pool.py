"""`WorkerPool`: threads that share the pieces of each read or write of a store (`StoreOperation`).

    store.read(…) ─> operation of 12 pieces ─┬─> stream "nvme read 0": piece 0, 3, 6 …
                                             ├─> stream "nvme read 1": piece 1, 4, 7 …    whoever is free takes the next
                                             └─> …                        ╰─> stream "nvme read sums": what computes
A thread that waits for a disk and computes in between asks for its next block late: where all cores compute, the disk
runs dry. So what computes has a stream of its own, and counts as a part of the operation (decision 0059).
An operation begins when those that it has to follow have ended ([Note: Order] in store.py). They were submitted before
it, to queues that keep their order, so the one that everybody waits for is never behind one that waits: no deadlock.
It has ended when all of its workers have, also if it failed: only then is memory its owner's again.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

from zerort import forks
from zerort.device import HostStream

__all__ = ["StoreOperation", "WorkerPool"]


class StoreOperation:
    """One read or write of some bytes of a value.

    Args:
        work: Called on each worker with an iterator over pieces, which all workers share.
        pieces: How many there are.
        begin: The first byte that it touches.
        end: One past the last.
        writes: Whether it changes them.
        after: What has to end first.
    """

    __slots__ = (
        "_after",
        "_ended",
        "_generation",
        "_left",
        "_lock",
        "_numbers",
        "_work",
        "begin",
        "end",
        "error",
        "seen",
        "writes",
    )

    def __init__(
        self,
        work: Callable[[Iterator[int]], None],
        *,
        pieces: int,
        begin: int,
        end: int,
        writes: bool,
        after: Sequence[StoreOperation] = (),
    ) -> None:
        self.begin, self.end, self.writes = begin, end, writes
        self.error: BaseException | None = None
        self.seen = False
        """Whether somebody was told of the error."""
        self._work = work
        self._numbers = iter(range(pieces))
        self._after = tuple(after)
        self._generation = forks.generation()
        self._left = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if pieces == 0:
            self._ended.set()

    def conflicts(self, begin: int, end: int, *, writes: bool) -> bool:
        """Say whether an operation on this range has to come after this one."""
        return (self.writes or writes) and self.begin < end and begin < self.end and not self.done()

    def start(self, workers: int) -> None:
        """Say how many workers will call `run`, before the first does."""
        self._left = workers

    def run(self) -> None:
        """Do pieces until none is left or one has failed. Raises nothing: the error belongs to whoever waits."""
        self._do(self._do_pieces)

    def add(self, part: Callable[[], None], *, stream: HostStream, name: str) -> None:
        """Have another stream do a part of it: it ends when that has, too. For its workers: they are not done yet.

        Args:
            part: What to do; its error is the operation's.
            stream: Who does it.
            name: What its span in a trace is called.
        """
        with self._lock:
            self._left += 1
        try:
            stream.submit(lambda: self._do(part), name=name)
        except BaseException:
            with self._lock:
                self._left -= 1
            raise

    def _do_pieces(self) -> None:
        for other in self._after:
            other._ended.wait()
        self._work(self._pieces())

    def _do(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._after = ()  # or a long line of them would never be freed,
            self._work = _nothing  # nor the memory that was moved
            self._ended.set()

    def _pieces(self) -> Iterator[int]:
        while self.error is None:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            yield number

    def done(self) -> bool:
        """Say whether it has ended, well or not."""
        return self._ended.is_set()

    def settle(self) -> None:
        """Wait for its end, whatever it is."""
        self._expect_own()
        self._ended.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end and raise its error.

        Raises:
            TimeoutError: It has not ended after ``timeout`` seconds.
        """
        self._expect_own()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"A read or write of a store has not ended after {timeout} s. It goes on; wait again.")
        if self.error is not None:
            self.seen = True
            raise self.error

    def _expect_own(self) -> None:
        if self._generation != forks.generation() and not self.done():
            raise forks.inherited("a read or write of a store")


def _nothing(pieces: Iterator[int]) -> None:
    return None


class WorkerPool:
    """Some streams that work on one operation after the other, together.

    Args:
        name: What the streams are called, with a number: their tracks in a trace.
        threads: How many move bytes; one more computes.
    """

    def __init__(self, name: str, *, threads: int) -> None:
        self._streams = [HostStream(f"{name} {number}", helping=False) for number in range(threads)]
        self._sums = HostStream(f"{name} sums", helping=False)
        self._turns = itertools.count()

    def submit(self, operation: StoreOperation, *, pieces: int, name: str) -> None:
        """Put an operation behind those that were submitted before; the caller sees to it that only one does at a time.

        Args:
            operation: What to do.
            pieces: How many streams it can use at most.
            name: What its spans in a trace are called.
        """
        turn = next(self._turns)
        count = len(self._streams)
        # The least busy first; among equals they take turns.
        order = sorted(
            range(count),
            key=lambda one: (len(self._streams[one].queue) + self._streams[one].turn.locked(), (one - turn) % count),
        )
        chosen = order[:pieces]
        operation.start(len(chosen))
        for one in chosen:
            self._streams[one].submit(operation.run, name=name)

    def compute(self, operation: StoreOperation, part: Callable[[], None], *, name: str) -> None:
        """Do a part of an operation beside those who move its bytes; called by one of them."""
        operation.add(part, stream=self._sums, name=name)

    def close(self) -> None:
        """Finish what was submitted and end the threads. Closing twice is fine."""
        for stream in (*self._streams, self._sums):
            stream.close()
