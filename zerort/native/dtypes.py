"""Element types and reductions, and the codes under which C++ knows them.

The codes are those of ``src/dtypes.h``. They also travel between ranks through shared memory, so a code never changes
its meaning: new ones are appended. Imports NumPy and ml_dtypes (which gives NumPy its bfloat16) only.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["BFLOAT16", "DTYPE_CODES", "FLOAT16", "FLOAT32", "FLOAT64", "REDUCTION_CODES", "Array", "numpy_dtype"]

Array = npt.NDArray[Any]
"""A NumPy array of any element type; the kernels take 1-D contiguous ones."""

DTYPE_CODES: dict[str, int] = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
}
"""Code of each element type, by ``numpy.dtype.name``."""

REDUCTION_CODES: dict[str, int] = {"sum": 0, "max": 1, "min": 2}
"""Code of each reduction."""

FLOAT32: np.dtype[Any] = np.dtype("float32")
FLOAT64: np.dtype[Any] = np.dtype("float64")
FLOAT16: np.dtype[Any] = np.dtype("float16")
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


def native_dtypes() -> dict[np.dtype[Any], int]:
    """Return the code of each ``numpy.dtype``. Byte-swapped dtypes are not in it: no kernel serves them."""
    return {BFLOAT16 if name == "bfloat16" else np.dtype(name): code for name, code in DTYPE_CODES.items()}


def numpy_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the NumPy dtype for ``dtype``, which may also be the name of an ml_dtypes type.

    >>> numpy_dtype("float32").itemsize, numpy_dtype("bfloat16").itemsize
    (4, 2)
    """
    return np.dtype(dtype)
