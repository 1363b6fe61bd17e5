"""`Shelf`: the windows that one rank has mapped, by number, and in which of them an array lies.

All ranks of a node make their windows together and so number them alike: (window, offset) means the same memory to
each.
"""

from __future__ import annotations

import bisect

from zerort.comm.transports.node.window import Window
from zerort.native.rendezvous import PRIVATE

__all__ = ["Shelf"]


class Shelf:
    """The windows of one rank."""

    def __init__(self) -> None:
        self._windows: dict[int, Window] = {}
        self._spans: list[tuple[int, int, int]] = []  # (first address, end, window), in order of address
        self._next = 0
        self.version = 0
        """Moves whenever the answer of `find` may."""

    def put(self, window: Window) -> int:
        """Keep ``window`` and return its number."""
        number, self._next = self._next, self._next + 1
        self.version += 1
        self._windows[number] = window
        bisect.insort(self._spans, (window.address, window.address + window.nbytes, number))
        return number

    def drop(self, number: int) -> None:
        """Forget a window. Its memory goes when the last array in it does."""
        del self._windows[number]
        self.version += 1
        self._spans = [span for span in self._spans if span[2] != number]

    def clear(self) -> None:
        """Forget all windows."""
        for number in list(self._windows):
            self.drop(number)

    def is_shared(self, number: int) -> bool:
        """Say whether all of a window is one array: then only the first rank has a segment in it."""
        segments = self._windows[number].segments
        return len(segments) > 1 and segments[-1][1] == 0

    def find(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return (window, offset) of the memory at ``address``, or (PRIVATE, address) if it lies in none."""
        at = bisect.bisect_right(self._spans, (address, 1 << 63, 0)) - 1
        if at >= 0:
            first, end, window = self._spans[at]
            if address + nbytes <= end:
                return window, address - first
        return PRIVATE, address
