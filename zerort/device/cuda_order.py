"""`CudaOrder`: the work of several streams of a GPU one after the other, in the order in which it was submitted.

    stream a   [1]        [3]
    stream b        [2]        [4]     each begins when the one before it is issued on the host, and ended on the GPU

NCCL needs that of its communicators: a GPU may have no room for the kernels of two at once, and ranks whose GPUs begin
with different ones wait for each other for ever. Every rank's program makes the same calls in the same order, so the
order of submission is the same everywhere; that of the groups' threads is not. May import: nothing of ours.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["CudaOrder", "order_of_nccl"]


class CudaOrder:
    """A line in which the work of streams waits for its turn."""

    def __init__(self) -> None:
        self._queueing = threading.Lock()
        self._moved = threading.Condition()
        self._queued = 0
        self._served = 0
        self._last: Any = None  # the event behind the work that was issued last

    @contextlib.contextmanager
    def place(self) -> Iterator[int]:
        """Give the next place in the line, to queue work with. If that raises, the place is free again."""
        with self._queueing:  # until it is queued: two places of one stream the wrong way round would wait for ever
            yield self._queued
            self._queued += 1

    @contextlib.contextmanager
    def turn(self, place: int, stream: Any, event: Any) -> Iterator[None]:
        """Wait until those before have had their turn, and make the GPU wait for them; then let the next one.

        Args:
            place: Which was given.
            stream: The CUDA stream that the work is issued on.
            event: Recorded there behind the work, by whoever issues it.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._served >= place)
        try:
            if self._last is not None:
                stream.wait_event(self._last)
            yield
        finally:
            with self._moved:
                self._last = event
                self._served = place + 1
                self._moved.notify_all()


_orders: dict[int, CudaOrder] = {}


def order_of_nccl(ordinal: int) -> CudaOrder:
    """Return the order of all that NCCL does for this process on a GPU."""
    return _orders.setdefault(ordinal, CudaOrder())
