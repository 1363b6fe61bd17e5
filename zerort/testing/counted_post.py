"""`CountedPost`: messages between ranks that are threads, counted: what a rank sends as their number grows.

The greetings, rounds and alarms that go over MPI between hosts go through queues here, so that 64 ranks fit into one
process and every message and byte can be compared with its formula (``benchmarks/cost_over_ranks.py`` draws them).
"""

# not-gpu: between threads of the host
from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Queue
from typing import Any, TypeVar

import numpy as np

from zerort.comm.transports.messages.exchange import Messages
from zerort.comm.transports.messages.wire import Requests
from zerort.typing import Array

__all__ = ["CountedPost"]

T = TypeVar("T")
_PATIENCE = 60.0


class CountedPost:
    """The post between some ranks.

    Args:
        ranks: Who sends and receives.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = list(ranks)
        self._queues: dict[tuple[int, int], Queue[Array]] = collections.defaultdict(Queue)
        self._opening = threading.Lock()
        self.sent: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        """For each rank the bytes of each message that it sent."""

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Call ``body(rank)`` on all ranks at once, and return what they returned, in order."""
        found: dict[int, T] = {}
        threads = [threading.Thread(target=lambda r=rank: found.update({r: body(r)})) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in self.ranks]

    def trade_of(self, rank: int) -> Callable[..., None]:
        """Return what sends (rank, bytes) and receives (rank, room for bytes) for ``rank``, all at once."""

        def trade(sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
            self._send(rank, sends)
            self._receive(rank, receives)

        return trade

    def start_of(self, rank: int) -> Callable[..., Messages]:
        """Return what a `Carrier` of ``rank`` begins to send and receive with."""

        def start(sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]], call: Any) -> Messages:
            self._send(rank, [(to, array) for to, array in sends if array.size])
            return Messages(Requests([]), list(sends), list(receives))

        return start

    def finish_of(self, rank: int) -> Callable[..., None]:
        """Return what it waits with."""

        def finish(messages: Messages, call: Any) -> None:
            self._receive(rank, [(source, array) for source, array in messages.receives if array.size])

        return finish

    @property
    def is_empty(self) -> bool:
        """Whether all that was sent has been received."""
        return all(queue.empty() for queue in self._queues.values())

    def _queue(self, source: int, to: int) -> Queue[Array]:
        with self._opening:
            return self._queues[source, to]

    def _send(self, rank: int, sends: Iterable[tuple[int, Array]]) -> None:
        for to, array in sends:
            self.sent[rank].append(array.nbytes)
            self._queue(rank, to).put(array.view(np.uint8).copy())

    def _receive(self, rank: int, receives: Iterable[tuple[int, Array]]) -> None:
        for source, room in receives:
            got = self._queue(source, rank).get(timeout=_PATIENCE)
            room.view(np.uint8)[: got.size] = got
