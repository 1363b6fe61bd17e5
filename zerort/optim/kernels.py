"""Which kernels serve an array: those of `zerort.native` on the host, those of `kernels_cuda` on a GPU.

Both have the same names and arguments: ``adamw_ sgd_ lion_ cast_into square_sum square_sums_into first_nonfinite``. May
import: native.
"""

from __future__ import annotations

from typing import Any

from zerort import native

__all__ = ["kernels_for"]


def kernels_for(array: Any) -> Any:
    """Return the module whose kernels work on ``array``, and on what lies beside it.

    >>> import numpy as np
    >>> kernels_for(np.ones(3)).__name__
    'zerort.native'
    """
    if type(array).__module__.partition(".")[0] == "cupy":  # looked at by name: who has no GPU need not have CuPy
        from zerort.optim import kernels_cuda

        return kernels_cuda
    return native
