"""A rank's flat range of a matrix, as rectangles: a shard may begin and end in the middle of a row.

    .  .  .  a  a      a: the end of a row
    b  b  b  b  b      b: whole rows, as many as fit the cache
    b  b  b  b  b
    c  c  .  .  .      c: the beginning of a row

Integers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

__all__ = ["PIECE_NUMEL", "Piece", "folded", "pieces"]

PIECE_NUMEL = 16384
"""Elements of the largest piece: a few temporaries of this length stay in a second-level cache."""


class Piece(NamedTuple):
    """A rectangle of the matrix that lies in one run of the flat range: whole rows, or a part of one row."""

    held: slice
    """Where it lies in the rank's 1-D arrays."""

    rows: slice
    """Its rows in the matrix."""

    cols: slice
    """Its columns in the matrix."""

    @property
    def width(self) -> int:
        """Number of its columns."""
        return int(self.cols.stop - self.cols.start)


def folded(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix: all dimensions but the last make the rows.

    >>> folded((2, 3, 5)), folded((7,)), folded(())
    ((6, 5), (1, 7), (1, 1))
    """
    return prod(shape[:-1]), shape[-1] if shape else 1


def pieces(first: int, numel: int, cols: int, *, limit: int = PIECE_NUMEL) -> Iterator[Piece]:
    """Cut `numel` elements from flat index `first` on, of a matrix with `cols` columns, into pieces of at most `limit`.

    >>> for piece in pieces(3, 14, 5):
    ...     print(piece.held, piece.rows, piece.cols)
    slice(0, 2, None) slice(0, 1, None) slice(3, 5, None)
    slice(2, 12, None) slice(1, 3, None) slice(0, 5, None)
    slice(12, 14, None) slice(3, 4, None) slice(0, 2, None)
    """
    at, end = first, first + numel
    while at < end:
        row, col = divmod(at, cols)
        height = min((end - at) // cols, limit // cols) if col == 0 else 0
        height, width = (height, cols) if height else (1, min(cols - col, end - at, limit))
        stop = at + height * width
        yield Piece(slice(at - first, stop - first), slice(row, row + height), slice(col, col + width))
        at = stop
