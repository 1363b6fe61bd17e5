"""Where the largest magnitudes of each block are, in NumPy: the definition.

Magnitudes are compared as bits: NaN is above infinity, and that above all numbers. Of equal ones the first is taken.
"""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import Array

__all__ = ["find_largest", "largest_count"]


def largest_count(numel: int, *, block: int, keep: int) -> int:
    """Return how many positions `find_largest` gives of ``numel`` elements.

    >>> largest_count(2050, block=1024, keep=11)
    24
    """
    return numel // block * keep + min(numel % block, keep)


def find_largest(source: Array, positions: Array, block: int, keep: int) -> None:
    """Write where the largest elements of each block are; see `zerort.native.find_largest`."""
    whole = source.size // block
    if whole:
        rows = source[: whole * block].reshape(whole, block)
        positions[: whole * keep].reshape(whole, keep)[:] = _largest(rows, keep)
    rest = source[None, whole * block :]
    if rest.size:
        positions[whole * keep :] = _largest(rest, min(keep, rest.size))[0]


def _largest(rows: Array, keep: int) -> Array:
    last = rows.shape[1] - 1
    magnitudes = (rows.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    ranks = magnitudes << np.uint64(16) | np.arange(last, -1, -1, dtype=np.uint64)
    kept = np.partition(ranks, last + 1 - keep, axis=1)[:, last + 1 - keep :] if keep <= last else ranks
    return np.sort(last - (kept & np.uint64(0xFFFF)).astype(np.int64), axis=1).astype(np.uint16)
