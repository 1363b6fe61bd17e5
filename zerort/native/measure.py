"""Kernels that say something about an array of floating-point numbers and change nothing in it.

`square_sum` and `square_sums_into` are what a gradient norm is made of; `first_nonfinite` finds what spoils a step
(decision 0021).
All take 1-D contiguous NumPy arrays and run at the speed of memory. Imports the siblings of this folder only.
"""

from __future__ import annotations

from zerort.native import checks, reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = ["first_nonfinite", "square_sum", "square_sums_into"]


def square_sum(array: Array) -> float:
    """Return the sum of the squares of all elements, computed in float64.

    Element i is added to lane ``i % 32``, and the lanes are added pairwise at the end: the order depends on the length
    alone, so equal elements give equal bits wherever they lie and whichever form serves. Infinity and NaN show.

    Args:
        array: Floating-point elements.

    Raises:
        ValueError: If the array is not one that it can work on.
    """
    if kernels is not None:
        total: float | None = kernels.square_sum(array)
        if total is not None:
            return total
    checks.check_float(array)
    use_numpy_form()
    return reference.square_sum(array)


def square_sums_into(out: Array, array: Array, block: int) -> None:
    """Write the `square_sum` of each block of `block` elements into `out`; the last block may be shorter.

    Args:
        out: float64, one element for each block that has begun.
        array: Floating-point elements.
        block: Elements per block, at least 1.

    Raises:
        ValueError: If an array or `block` is not what it can work on.
    """
    if kernels is not None and type(block) is int and block > 0 and kernels.square_sums(out, array, block):
        return
    checks.check_square_sums(out, array, block)
    use_numpy_form()
    reference.square_sums_into(out, array, block)


def first_nonfinite(array: Array) -> int:
    """Return the index of the first NaN or infinity, or -1 if all elements are finite.

    Args:
        array: Floating-point elements.

    Raises:
        ValueError: If the array is not one that it can work on.
    """
    if kernels is not None:
        found: int | None = kernels.first_nonfinite(array)
        if found is not None:
            return found
    checks.check_float(array)
    use_numpy_form()
    return reference.first_nonfinite(array)
