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
from collections.abc import Callable, Iterator

from zerort.device import HostStream
from zerort.storage.stores.operation import StoreOperation

__all__ = ["WorkerPool"]


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

    def submit(
        self, operation: StoreOperation, work: Callable[[Iterator[int]], None], *, pieces: int, name: str
    ) -> None:
        """Put an operation behind those that were submitted before; the caller sees to it that only one does at a time.

        Args:
            operation: What to do.
            work: Called on each of its workers with an iterator over the numbers of pieces, which all of them share.
            pieces: How many there are.
            name: What its spans in a trace are called.
        """
        turn = next(self._turns)
        count = len(self._streams)
        numbers, lock = iter(range(pieces)), threading.Lock()

        def left() -> Iterator[int]:
            while operation.error is None:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                yield number

        def share() -> None:
            operation.follow_ended()
            work(left())

        # The least busy first; among equals they take turns.
        order = sorted(
            range(count),
            key=lambda one: (len(self._streams[one].queue), (one - turn) % count),
        )
        for one in order[:pieces]:
            operation.parts.append(self._streams[one].submit(lambda: operation.attempt(share), name=name))
        operation.asked.set()

    def compute(self, operation: StoreOperation, part: Callable[[], None], *, name: str) -> None:
        """Do a part of an operation beside those who move its bytes; called by one of them."""
        operation.parts.append(self._sums.submit(lambda: operation.attempt(part), name=name))

    def close(self) -> None:
        """Finish what was submitted and end the threads. Closing twice is fine."""
        for stream in (*self._streams, self._sums):
            stream.close()
