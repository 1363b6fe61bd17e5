"""Convert stored elements to the dtype they are wanted in: floats to floats, by way of float32 where it has to be."""

from __future__ import annotations

from typing import Final

import numpy as np

from zerort.native import cast_into, copy_into
from zerort.typing import Array

__all__ = ["FLOATS", "can_convert", "convert"]

FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that convert into each other: exactly to a wider one, rounded to nearest to a narrower one."""


def can_convert(source: str, *, to: str) -> bool:
    """Say whether elements of one dtype can be delivered as another.

    >>> can_convert("float32", to="bfloat16"), can_convert("int32", to="float32")
    (True, False)
    """
    return source == to or (source in FLOATS and to in FLOATS)


def convert(source: Array, *, out: Array) -> None:
    """Convert ``source`` into ``out``, after `can_convert` was asked. float64 becomes halves by way of float32.

    Args:
        source: 1-D, contiguous, aligned.
        out: The same, of equally many elements.
    """
    if source.dtype == out.dtype:
        copy_into(out.view(np.uint8), source.view(np.uint8))
    elif np.float32 in (source.dtype, out.dtype):
        cast_into(out, source)
    else:
        middle = np.empty(source.size, np.float32)
        cast_into(middle, source)
        cast_into(out, middle)
