"""Changed elements and byte planes in NumPy: the definition of both.

gaps      for each changed element, a byte with the number of unchanged ones before it; 255: that many, and no change
bitmap    bit i % 8 of byte i // 8: element i has changed
values    those of the changed elements, in order
planes    byte b of element i stands at b * numel + i
"""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import Array

__all__ = ["STRETCH", "apply_changes", "find_changes", "join_planes", "marks_nbytes", "split_planes", "write_changes"]

_ESCAPE = 255
STRETCH = 2048
"""Elements that are looked at together on a GPU."""


def marks_nbytes(numel: int) -> int:
    """Return the bytes that a GPU notes of an array's changes while it finds, writes or applies them.

    >>> marks_nbytes(1_000_000) / 2_000_000  # of 16-bit elements
    0.00784
    """
    return 32 * (-(-numel // STRETCH) + 1)


def find_changes(base: Array, now: Array) -> tuple[int, int]:
    """Return how many elements differ, and how many bytes their positions take as gaps."""
    gaps = _gaps(np.flatnonzero(base != now))
    return gaps.size, gaps.size + int((gaps // _ESCAPE).sum())


def write_changes(base: Array, now: Array, positions: Array, values: Array, *, bitmap: bool) -> bool:
    """Write where the arrays differ, and the values there; False if they differ in more or fewer places than fit."""
    differ = base != now
    index = np.flatnonzero(differ)
    if index.size != values.size:
        return False
    if bitmap:
        positions[:] = np.packbits(differ, bitorder="little")
    else:
        gaps = _gaps(index)
        ends = np.cumsum(gaps // _ESCAPE + 1)
        if (int(ends[-1]) if ends.size else 0) != positions.size:
            return False
        positions[:] = _ESCAPE
        positions[ends - 1] = gaps % _ESCAPE
    values[:] = now[index]
    return True


def apply_changes(target: Array, positions: Array, values: Array, *, bitmap: bool) -> bool:
    """Put values where the positions say; False if these do not fit."""
    if bitmap:
        if positions.size != (target.size + 7) // 8:
            return False
        index = np.flatnonzero(np.unpackbits(positions, bitorder="little"))
    else:
        is_change = positions != _ESCAPE
        index = np.cumsum(positions.astype(np.int64) + is_change)[is_change] - 1
    if index.size != values.size or (index.size and index[-1] >= target.size):
        return False
    target[index] = values
    return True


def split_planes(planes: Array, elements: Array) -> None:
    """Write byte b of every element into plane b."""
    octets = elements.view(np.uint8).reshape(-1, elements.itemsize)
    planes.reshape(elements.itemsize, -1)[:] = octets.T


def join_planes(elements: Array, planes: Array) -> None:
    """Make elements of their planes."""
    octets = elements.view(np.uint8).reshape(-1, elements.itemsize)
    octets[:] = planes.reshape(elements.itemsize, -1).T


def _gaps(index: Array) -> Array:
    """Return the number of unchanged elements before each changed one."""
    return np.diff(index, prepend=-1) - 1
