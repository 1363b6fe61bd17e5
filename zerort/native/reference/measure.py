"""NumPy forms of square_sum, first_nonfinite and copy_checked; see `zerort.native.measure` for what they promise."""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import FLOAT16, FLOAT64, Array
from zerort.native.reference.arrays import BLOCK, blocks, cast_into

__all__ = ["copy_checked", "first_nonfinite", "square_sum", "square_sums_into"]

_LANES = 32  # as in src/square.cpp: change both or none


def square_sum(array: Array) -> float:
    """Return the sum of the squares of all elements."""
    lanes = np.zeros(_LANES)
    squares = np.empty((1 + min(BLOCK, array.size) // _LANES, _LANES))  # a row for the lanes, and whole turns of them
    with np.errstate(all="ignore"):
        whole = array.size // _LANES * _LANES
        for block in blocks(whole):
            turns = squares[: 1 + (block.stop - block.start) // _LANES]
            turns[0] = lanes
            np.square(_as_float64(array[block]), out=turns[1:].reshape(-1))
            # Over the slow axis NumPy adds row by row, in order; over the fast one it would add in an order of its own.
            np.add.reduce(turns, axis=0, out=lanes)
        lanes[: array.size - whole] += np.square(_as_float64(array[whole:]))
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def _as_float64(array: Array) -> Array:
    if array.dtype.itemsize == 2 and array.dtype != FLOAT16:  # bfloat16: by its bits, ml_dtypes is slow
        wide = np.empty(array.size, np.float32)
        cast_into(wide, array)
        array = wide
    return array.astype(FLOAT64, copy=False)


def square_sums_into(out: Array, array: Array, block: int) -> None:
    """Write the sum of the squares of each block into `out`."""
    for index in range(out.size):
        out[index] = square_sum(array[index * block : (index + 1) * block])


def first_nonfinite(array: Array) -> int:
    """Return the index of the first NaN or infinity, or -1."""
    with np.errstate(all="ignore"):
        for block in blocks(array.size):
            finite = np.isfinite(array[block])
            if not finite.all():
                return int(block.start + np.argmin(finite))
    return -1


def copy_checked(out: Array, source: Array) -> int:
    """Copy `source` into `out` and return the index of the first NaN or infinity there, or -1."""
    cast_into(out, source)
    return first_nonfinite(out)
