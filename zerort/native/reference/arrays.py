"""NumPy forms of reduce, add, cast, copy and touch; see `zerort.native.arrays` for what they promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zerort.native.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array

__all__ = ["BLOCK", "add_into", "blocks", "cast_into", "copy_into", "reduce_into", "touch"]

BLOCK = 16384
"""Elements per block: a few float32 temporaries of this length fit into a second-level cache."""

_PAGE = 4096  # the smallest page in use

_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_QUIET_NAN = {FLOAT16: 0x7E00, BFLOAT16: 0x7FC0}


def blocks(numel: int) -> Iterator[slice]:
    """Yield the slices that cut `numel` elements into blocks."""
    for start in range(0, numel, BLOCK):
        yield slice(start, min(start + BLOCK, numel))


def reduce_into(out: Array, sources: Sequence[Array], reduction: str = "sum") -> None:
    """Reduce the sources in their order into `out`."""
    if len(sources) == 1:
        np.copyto(out, sources[0])
        return
    ufunc = _UFUNCS[reduction]
    half = out.dtype in _QUIET_NAN
    total = np.empty(min(BLOCK, out.size), FLOAT32 if half else out.dtype)
    operand = np.empty(total.size if half else 0, FLOAT32)
    with np.errstate(all="ignore"):
        for block in blocks(out.size):
            # Not into `out` before every source is read: it may be one of them.
            running = total[: block.stop - block.start]
            _widen(running, sources[0][block])
            for source in sources[1:]:
                if half:
                    widened = operand[: running.size]
                    _widen(widened, source[block])
                    ufunc(running, widened, out=running)
                else:
                    ufunc(running, source[block], out=running)
            cast_into(out[block], running)


def add_into(out: Array, source: Array) -> None:
    """Add `source` to `out`."""
    if out.dtype == source.dtype:
        reduce_into(out, (out, source))
        return
    operand = np.empty(min(BLOCK, out.size), FLOAT32)
    with np.errstate(all="ignore"):
        for block in blocks(out.size):
            widened = operand[: block.stop - block.start]
            _widen(widened, source[block])
            out[block] += widened


def _widen(out: Array, source: Array) -> None:
    """Convert exactly; many times faster than ml_dtypes for bfloat16, whose bits are the upper half of a float32's."""
    if source.dtype == BFLOAT16 and out.dtype == FLOAT32:
        np.left_shift(source.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, source)


def cast_into(out: Array, source: Array) -> None:
    """Convert `source` to `out`'s dtype."""
    with np.errstate(all="ignore"):
        if out.dtype in _QUIET_NAN and source.dtype == FLOAT32:
            np.copyto(out, source, casting="unsafe")
            # NumPy and ml_dtypes keep different parts of a NaN, on different machines: one quiet NaN for all.
            nan = np.isnan(source)
            if nan.any():
                sign = (source[nan].view(np.uint32) >> 16).astype(np.uint16) & np.uint16(0x8000)
                out.view(np.uint16)[nan] = sign | np.uint16(_QUIET_NAN[out.dtype])
        elif out.dtype == FLOAT32:
            _widen(out, source) if source.itemsize < out.itemsize else np.copyto(out, source, casting="same_kind")
        else:
            np.copyto(out, source, casting="same_kind")


def copy_into(out: Array, source: Array) -> None:
    """Copy `source` into `out`."""
    np.copyto(out, source)


def touch(array: Array) -> None:
    """Write one byte per page of `array` with what it holds."""
    if array.size == 0:
        return
    data = array.reshape(-1).view(np.uint8)
    for part in (data[::_PAGE], data[-1:]):  # the last page may begin after the last stride
        np.bitwise_or(part, 0, out=part)


def take_rows(out: Array, table: Array, rows: Array, width: int) -> None:
    """Copy rows of a table, by their numbers."""
    whole = table[: table.size // width * width].reshape(-1, width)
    np.take(whole, rows, axis=0, out=out.reshape(-1, width))


def put_rows(table: Array, values: Array, rows: Array, width: int) -> None:
    """Write rows of a table, by their numbers."""
    table[: table.size // width * width].reshape(-1, width)[rows] = values.reshape(-1, width)
