"""Arrays on the GPU for tests: `put` copies bytes, for CuPy 13 makes no bfloat16 arrays of NumPy's by itself."""

from typing import Any

import cupy
import numpy as np


def put(array: Any) -> Any:
    """Return a copy of a NumPy array on the current GPU."""
    whole = np.ascontiguousarray(array)
    raw = cupy.asarray(whole.reshape(-1).view(np.uint8))
    return cupy.ndarray(array.shape, array.dtype, memptr=raw.data)
