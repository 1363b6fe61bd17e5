"""Masks of pruned elements, a bit each, and what is decided from magnitudes: over arrays of the host.

A mask's byte i // 8 has element i in bit i % 8. Functions take some elements and the bytes of theirs, the first of
which begins with them. `masks_cuda.py` has the same for CuPy's arrays, with the same results.
Magnitudes are compared as bits without the sign, which have their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from zerort.typing import Array

__all__ = ["DIGIT", "add_histogram", "mark_smallest", "mark_two_of_four", "zero_marked"]

DIGIT: Final = 11
"""Bits that one histogram tells apart, at most: its counts fit into the memory that a GPU's threads share."""

_PIECE: Final = 1 << 20
"""Elements that are looked at together."""


def add_histogram(counts: Array, values: Array, mask: Array, *, shift: int, width: int, prefix: int) -> None:
    """Count how often ``width`` bits of magnitudes have each value, of elements that are not pruned.

    Args:
        counts: int64, one for each value; added to.
        values: float32 or float64.
        mask: Theirs.
        shift: How many bits are below these.
        width: How many bits.
        prefix: Only elements whose bits above these are so count.
    """
    for keys, _, _ in _pieces(values, mask):
        kind = keys.dtype.type
        found = keys >> kind(shift)
        if shift + width < 8 * keys.itemsize:
            found = found[found >> kind(width) == prefix] & kind((1 << width) - 1)
        counts += np.bincount(found.astype(np.intp), minlength=1 << width)


def mark_smallest(mask: Array, values: Array, *, threshold: int, equal: int, of: int) -> None:
    """Mark elements whose magnitude is below a threshold as pruned, and the first ones that have it.

    Args:
        mask: Changed.
        values: float32 or float64.
        threshold: A magnitude's bits.
        equal: How many that have it.
        of: Of how many.
    """
    for keys, gone, octets in _pieces(values, mask):
        same = np.flatnonzero(keys == threshold)[:equal]
        equal -= same.size
        gone |= keys < threshold
        gone[same] = True
        octets[:] = np.packbits(gone, bitorder="little")


def mark_two_of_four(mask: Array, values: Array) -> None:
    """Mark the two smallest of every four neighbours as pruned; of equal ones the first."""
    for keys, gone, octets in _pieces(values, mask):
        order = np.argsort(keys.reshape(-1, 4), axis=1, kind="stable")
        np.put_along_axis(gone.reshape(-1, 4), order[:, :2], values=True, axis=1)
        octets[:] = np.packbits(gone, bitorder="little")


def zero_marked(values: Array, mask: Array) -> None:
    """Set elements that are pruned to zero: of any dtype."""
    for first in range(0, values.size, _PIECE):  # marks take a byte each
        some = values[first : first + _PIECE]
        some[_unpacked(mask[first // 8 :][: -(-some.size // 8)], some.size)] = 0


def _pieces(values: Array, mask: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield magnitudes as whole numbers of the same order, which of them are pruned, and the bytes that say so.

    Magnitudes of those that are pruned are larger than any.
    """
    unsigned = np.dtype(f"u{values.itemsize}")
    for first in range(0, values.size, _PIECE):
        some = values[first : first + _PIECE].view(unsigned)
        octets = mask[first // 8 : -(-(first + some.size) // 8)]
        keys, gone = some & unsigned.type(np.iinfo(unsigned).max >> 1), _unpacked(octets, some.size)
        np.putmask(keys, gone, np.iinfo(unsigned).max)
        yield keys, gone, octets


def _unpacked(mask: Array, numel: int) -> Array:
    return np.unpackbits(mask, bitorder="little")[:numel].view(bool)
