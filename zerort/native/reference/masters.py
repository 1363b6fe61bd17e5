"""NumPy forms of `zerort.native.masters`: bfloat16 parameters, and what of float32 master weights they lack.

parameter    (bits + 0x8000) >> 16        NaN: 0x7fc0 with its sign, and a remainder of 0
remainder    bits & 0xffff
master       (parameter << 16) + the remainder as a signed number
"""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import Array

__all__ = ["join_master", "split_master"]


def split_master(param: Array, remainder: Array | None, master: Array) -> None:
    """Write the rounded parameter, and the lower half of the master's bits if there is a ``remainder``."""
    bits, broken = master.view(np.uint32), np.isnan(master)
    if remainder is not None:
        remainder[:] = np.where(broken, 0, bits & 0xFFFF)
    rounded = np.where(broken, bits & 0x80000000 | 0x7FC00000, bits + np.uint32(0x8000))
    param.view(np.uint16)[:] = rounded >> 16


def join_master(master: Array, param: Array, remainder: Array) -> None:
    """Write the master that both were made of."""
    high, low = param.view(np.uint16).astype(np.uint32), remainder.astype(np.uint32)
    master.view(np.uint32)[:] = (high << 16) + low - ((low & 0x8000) << 1)
