"""Name what a `Partition` answers: a range, a piece of a range at a rank, a move of a range between ranks.

All three are plain tuples with names, so they unpack, compare and travel as JSON. Every range is half open,
``[first, stop)``, and counts elements.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Move", "Piece", "Range"]


class Range(NamedTuple):
    """The elements ``[first, stop)``.

    >>> first, stop = Range(4, 10)
    >>> Range(4, 10).numel
    6
    """

    first: int
    """The first element."""

    stop: int
    """One past the last element."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.first

    @property
    def slice(self) -> slice:
        """Return the range as an index into a 1-D array."""
        return slice(self.first, self.stop)


class Piece(NamedTuple):
    """The elements ``[first, stop)``, all of which one rank holds."""

    rank: int
    """Who holds them."""

    first: int
    """The first element, counted in the whole."""

    stop: int
    """One past the last element, counted in the whole."""


class Move(NamedTuple):
    """The elements ``[first, stop)``, which one rank held and one rank is to hold; both may be the same rank."""

    source: int
    """The rank that held them, in the partition one comes from."""

    target: int
    """The rank that is to hold them, in the partition one goes to."""

    first: int
    """The first element, counted in the whole."""

    stop: int
    """One past the last element, counted in the whole."""
