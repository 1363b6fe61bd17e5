"""Integers: how a range of a value is cut into pieces that a disk can move and a checksum covers.

    value   |---grain---|---grain---|---grain---|---grain---|--gr|       blocks are some grains; the last grain is short
    range            [begin ......................... end)
    pieces           [  )[                      )[      )                 the outer ones touch their grains only in part
    cover   [           )[                      )[          )             what is read, or read and written again

Imports the standard library only.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["Segment", "cut", "round_up"]


class Segment(NamedTuple):
    """A piece of a range, and the whole grains that it touches."""

    begin: int
    """The first wanted byte of the value."""
    end: int
    """One past the last."""
    low: int
    """The first byte of the first grain."""
    high: int
    """One past the last grain, or the value's end."""

    @property
    def whole(self) -> bool:
        """Whether the piece is all that its grains hold."""
        return (self.begin, self.end) == (self.low, self.high)


def round_up(value: int, multiple: int) -> int:
    """Return the next multiple.

    >>> round_up(5, 4), round_up(8, 4)
    (8, 8)
    """
    return -(-value // multiple) * multiple


def cut(begin: int, end: int, *, nbytes: int, grain: int, block: int) -> list[Segment]:
    """Cut a range of a value of ``nbytes`` bytes at its blocks and around the grains that it touches in part.

    Args:
        begin: The first byte.
        end: One past the last.
        nbytes: Of the whole value.
        grain: What a checksum covers.
        block: What moves at once: a multiple of the grain.

    >>> [(one.begin, one.end, one.whole) for one in cut(3, 20, nbytes=20, grain=4, block=8)]
    [(3, 4, False), (4, 8, True), (8, 16, True), (16, 20, True)]
    """
    if begin == end:
        return []
    points = {begin, end, *range(round_up(begin, block), end, block)}
    # An end in the middle of a grain gets a piece of its own, unless it is the value's end.
    points.update(point for point in (round_up(begin, grain), end // grain * grain) if begin < point < end)
    marks = sorted(points)
    return [
        Segment(first, last, first // grain * grain, min(round_up(last, grain), nbytes))
        for first, last in itertools.pairwise(marks)
    ]
