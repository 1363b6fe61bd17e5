"""`Places`: where all ranks make their calls from, as headers told it once; the same on every rank.

    a set of places   what the headers of all ranks end with: a call, and for each rank the line of its program
    its number        what a greeting says instead, as long as nobody calls from elsewhere

Headers travel when a set is new, or is not the one in which each rank last made its call at that line. So a program
that makes one call at several lines in turn, on all ranks alike, tells each of them once; and whoever is missing can be
told with its last call and the line.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_PLACES", "NUMBER_BITS", "Places"]

MOST_PLACES = 1024
"""Sets that are remembered; of others headers travel anew."""

NUMBER_BITS = 22
"""Of a set's number in a greeting. Those whose sets were forgotten are used again when they run out."""


class Places:
    """The sets of places that one rank knows.

    Args:
        rank: This one.

    >>> places = Places(1)
    >>> places.number_of(b"sum, line 7")
    0
    >>> number = places.learn([b"sum, line 5", b"sum, line 7"])
    >>> places.number_of(b"sum, line 7") == number, places.tails(number)
    (True, [b'sum, line 5', b'sum, line 7'])
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0  # the number that was given last
        self._tails: dict[int, list[bytes]] = {}  # by number, in the order in which they were last learnt
        self._numbers: dict[tuple[bytes, ...], int] = {}  # the same, the other way round
        self._last: dict[bytes, int] = {}  # by what this rank's header ends with

    def learn(self, tails: Sequence[bytes]) -> int:
        """Return the number of a set that all ranks have just told each other; a collective of this group."""
        found = self._numbers.get(tuple(tails))
        if found is None:
            found = self._unused()
            self._tails[found], self._numbers[tuple(tails)] = list(tails), found
            if len(self._tails) > MOST_PLACES:
                self._forget(next(iter(self._tails)))
        else:
            self._tails[found] = self._tails.pop(found)  # not the oldest any more
        self.use(found)
        return found

    def use(self, number: int) -> list[bytes]:
        """Note that this rank called from its place in a set; return what the headers of all ranks end with there."""
        tails = self._tails[number]
        self._last[tails[self._rank]] = number
        return tails

    def number_of(self, tail: bytes) -> int:
        """Return the set in which this rank last made a call that its header ends so; 0 if none is known."""
        return self._last.get(tail, 0)

    def tails(self, number: int) -> list[bytes] | None:
        """Return what the headers of all ranks end with in a set; None if none has that number."""
        return self._tails.get(number)

    def _unused(self) -> int:
        while True:
            self._count = self._count % (2**NUMBER_BITS - 1) + 1  # never 0
            if self._count not in self._tails:  # what is told again and again lives for ever
                return self._count

    def _forget(self, number: int) -> None:
        tails = self._tails.pop(number)
        del self._numbers[tuple(tails)]
        if self._last.get(tails[self._rank]) == number:
            del self._last[tails[self._rank]]
