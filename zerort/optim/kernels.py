"""Which kernels serve an array, or a device: those of `zerort.native` on the host, those of `kernels_cuda` on a GPU.

Both have the same names and arguments: ``adamw_ adamw_blocks_ sgd_ lion_ round_master split_master join_master
cast_into square_sum square_sums_into first_nonfinite``. Those over rows of tables are a room of their own (`rows/`).
"""

from __future__ import annotations

from typing import Any

from zerort import native
from zerort.buffer import HOST_KERNELS, BucketKernels
from zerort.optim.rows import kernels as host_rows
from zerort.typing import Device, is_on_gpu

__all__ = ["bucket_kernels_for", "kernels_for", "row_kernels_for"]


def kernels_for(array: Any) -> Any:
    """Return the module whose kernels work on ``array``, and on what lies beside it.

    >>> import numpy as np
    >>> kernels_for(np.ones(3)).__name__
    'zerort.native'
    """
    if is_on_gpu(array):
        from zerort.optim import kernels_cuda

        return kernels_cuda
    return native


def row_kernels_for(array: Any) -> Any:
    """Return the module whose kernels work on rows of tables where ``array`` lies: `rows.kernels`, or its CUDA form."""
    if is_on_gpu(array):
        from zerort.optim.rows import kernels_cuda

        return kernels_cuda
    return host_rows


def bucket_kernels_for(device: Device) -> BucketKernels:
    """Return the kernels that gradients on a device are collected with."""
    if device.in_host_memory:
        return HOST_KERNELS
    from zerort.optim import kernels_cuda

    return kernels_cuda
