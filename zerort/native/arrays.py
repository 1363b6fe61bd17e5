"""Kernels over whole arrays: reduce, add, cast, copy, touch; and over rows of a table.

Each takes 1-D contiguous NumPy arrays and writes into the first; `copy_checked` returns an index, the others nothing.
The compiled form answers False (or None) for arrays that it cannot work on; `checks` then says what is wrong. Imports
the siblings of this folder only.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerort.native import checks, reference
from zerort.native.dtypes import REDUCTION_CODES, Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = [
    "add_into",
    "address_of",
    "cast_into",
    "copy_checked",
    "copy_into",
    "put_rows",
    "reduce_into",
    "take_rows",
    "touch",
]


def reduce_into(out: Array, sources: Sequence[Array], reduction: str = "sum") -> None:
    """Reduce the sources element by element, in their order, into `out`.

    The result is ``((s0 + s1) + s2) + …``, whatever the number of elements and wherever they start, so every rank that
    reduces a range gets the same bits. float16 and bfloat16 are accumulated in float32 and rounded once; integers wrap
    around. In max and min, NaN wins; which of +0 and -0 wins is not said, nor is the payload of a NaN.

    Args:
        out: Where the result goes; may be the very memory of one of the sources.
        sources: One or more arrays of `out`'s dtype and length.
        reduction: ``"sum"``, ``"max"`` or ``"min"``.

    Raises:
        ValueError: If an array is not 1-D, contiguous, aligned, of one dtype and length, or `out` is read-only or
            overlaps a source in part.
    """
    code = REDUCTION_CODES.get(reduction)
    if code is None:
        checks.check_reduction(reduction)
    elif kernels is not None and kernels.reduce(out, sources, code):
        return
    checks.check_reduce(out, sources)
    use_numpy_form()
    reference.reduce_into(out, sources, reduction)


def add_into(out: Array, source: Array) -> None:
    """Add `source` to `out`, element by element, in one pass: how gradients of several micro-steps come together.

    Computed in `out`'s dtype; for float16 and bfloat16 in float32, and rounded once.

    Args:
        out: Where the sum goes; floating-point.
        source: What to add: of `out`'s dtype or of lower precision, of its length; `out` itself or apart from it.

    Raises:
        ValueError: If the pair of dtypes, a length or the memory is not what it can work on.
    """
    if kernels is not None and kernels.add(out, source):
        return
    checks.check_add(out, source)
    use_numpy_form()
    reference.add_into(out, source)


def address_of(array: Array) -> int:
    """Return the address of `array`'s first byte; `array` is contiguous."""
    found = None if kernels is None else kernels.address(array)
    address: int = array.ctypes.data if found is None else found
    return address


def cast_into(out: Array, source: Array) -> None:
    """Convert `source` to `out`'s dtype.

    From or to float32, with bfloat16, float16 or float64 on the other side; the same dtype on both is a copy.
    Rounds to nearest, ties to even; beyond the range gives infinity; NaN stays NaN, its payload not.

    Args:
        out: Where the result goes; apart from `source`.
        source: What to convert, of `out`'s length.

    Raises:
        ValueError: If the pair of dtypes, a length or the memory is not what it can work on.
    """
    if kernels is not None and kernels.cast(out, source):
        return
    checks.check_cast(out, source)
    use_numpy_form()
    reference.cast_into(out, source)


def copy_into(out: Array, source: Array) -> None:
    """Copy `source` into `out`, both of one dtype and length, without the GIL. They may overlap.

    Args:
        out: Where the bytes go.
        source: Where they come from.

    Raises:
        ValueError: If dtype, length or memory is not what it can work on.
    """
    if kernels is not None and kernels.copy(out, source):
        return
    checks.check_copy(out, source)
    use_numpy_form()
    reference.copy_into(out, source)


def copy_checked(out: Array, source: Array) -> int:
    """Copy or cast floating-point `source` into `out`, and look for NaN and infinity in the same pass.

    Everything is copied, whatever is found. What counts is what `out` then holds: a number beyond the range of its
    dtype has become infinity there.

    Args:
        out: Where the result goes; apart from `source`.
        source: What to copy; of `out`'s length, and of a dtype that `cast_into` takes with it.

    Returns:
        The index of the first element of `out` that is NaN or infinite; -1 if all are finite.

    Raises:
        ValueError: If the pair of dtypes, a length or the memory is not what it can work on.
    """
    if kernels is not None:
        found: int | None = kernels.copy_checked(out, source)
        if found is not None:
            return found
    checks.check_copy_checked(out, source)
    use_numpy_form()
    return reference.copy_checked(out, source)


def touch(array: Array) -> None:
    """Fault in every page of a contiguous, writable array of any shape and dtype, and change nothing in it.

    The first touch of memory runs at 1–2 GB/s: touch what will be reused, once. The compiled form is safe while others
    write to the same memory; the NumPy form is not.

    Raises:
        ValueError: If the array is not contiguous or is read-only.
    """
    if kernels is not None and kernels.touch(array):
        return
    checks.check_touch(array)
    use_numpy_form()
    reference.touch(array)


def take_rows(out: Array, table: Array, rows: Array, width: int) -> None:
    """Copy rows of a table, by their numbers, one after the other.

    Args:
        out: Where they go: 1-D, of `table`'s dtype, ``rows.size * width`` elements.
        table: 1-D, rows of ``width`` elements each.
        rows: int64, in any order, also twice.
        width: Elements of a row.

    Raises:
        ValueError: If an array is not what it can work on, or there is no such row.
    """
    if kernels is not None and kernels.take_rows(out, table, rows, width):
        return
    checks.check_rows(out, table, rows, width, takes=True)
    use_numpy_form()
    reference.take_rows(out, table, rows, width)


def put_rows(table: Array, values: Array, rows: Array, width: int) -> None:
    """Write rows of a table, by their numbers; each once. The arguments are those of `take_rows`.

    Raises:
        ValueError: If an array is not what it can work on, or there is no such row.
    """
    if kernels is not None and kernels.put_rows(table, values, rows, width):
        return
    checks.check_rows(values, table, rows, width, takes=False)
    use_numpy_form()
    reference.put_rows(table, values, rows, width)
