"""`CudaOrder`: the work of several streams of a GPU one after the other, in the order in which it was submitted.

    stream a   [1]        [3]
    stream b        [2]        [4]     each begins when the one before it is issued on the host, and ended on the GPU

NCCL needs that of its communicators: a GPU may have no room for the kernels of two at once, and ranks whose GPUs begin
with different ones wait for each other for ever. Every rank's program makes the same calls in the same order, so the
order of submission is the same everywhere; that of the groups' threads is not. Work that gives up, because its group
broke while it waited, leaves the line without a turn, and those behind it wait for those before it (decision 0053).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CudaOrder", "Place", "order_of_nccl"]

_EVERY = 0.1
"""Seconds between two looks at whether waiting still makes sense."""


class CudaOrder:
    """A line in which the work of streams waits for its turn."""

    def __init__(self) -> None:
        self._queueing = threading.Lock()
        self._moved = threading.Condition()
        self._queued = 0
        self._first = 0  # whose turn it is
        self._left: set[int] = set()  # who went from further back
        self._last: Any = None  # the event behind the work that had its turn last

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """Give the next place in the line, to queue work with. If that raises, the place is free again."""
        with self._queueing:  # until it is queued: two places of one stream the wrong way round would wait for ever
            yield Place(self, self._queued)
            self._queued += 1

    def _comes_to(self, number: int) -> bool:
        """Say whether all before a place have left, once they have or a moment has passed."""
        with self._moved:
            # gpu-wait: take_turns_on_the_host [-> True]
            return self._moved.wait_for(lambda: self._first >= number, _EVERY)

    def _leave(self, number: int) -> None:
        with self._moved:
            self._left.add(number)
            while self._first in self._left:
                self._left.remove(self._first)
                self._first += 1
            self._moved.notify_all()


class Place:
    """Where a piece of work stands in the line, until it leaves.

    Args:
        line: In which.
        number: Given in turn.
    """

    __slots__ = ("_has_turn", "_line", "_number")

    def __init__(self, line: CudaOrder, number: int) -> None:
        self._line = line
        self._number = number
        self._has_turn = False

    def take_turn(self, stream: Any, *, trouble: Callable[[], BaseException | None]) -> None:
        """Wait until those before have left, and make the GPU wait for what they have issued.

        Args:
            stream: The CUDA stream that the work is issued on.
            trouble: Returns what makes waiting useless, if anything does; that is raised, made anew.
        """
        while not self._line._comes_to(self._number):
            found = trouble()  # gpu-wait: who_gives_up_leaves_the_line [-> None]
            if found is not None:
                raise type(found)(*found.args) from found
        self._has_turn = True
        if self._line._last is not None:
            stream.wait_event(self._line._last)  # gpu-wait: take_turns_on_the_gpu

    def leave(self, event: Any) -> None:
        """Let the next one have its turn.

        Args:
            event: Recorded behind the work, which the next one waits for if this one had its turn.
        """
        if self._has_turn:
            self._line._last = event  # gpu-wait: take_turns_on_the_gpu
        self._line._leave(self._number)


_orders: dict[int, CudaOrder] = {}


def order_of_nccl(ordinal: int) -> CudaOrder:
    """Return the order of all that NCCL does for this process on a GPU."""
    return _orders.setdefault(ordinal, CudaOrder())
