"""Arrays that are not NumPy's: what a group must know of them to carry them, and how any array is looked at.

A transport that reaches other memory than the host's names it with a `DeviceArrays`; its groups then take both kinds of
arrays.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from zerort.native import address_of

__all__ = ["DeviceArrays", "address_of_any", "is_writeable"]


class DeviceArrays(Protocol):
    """Arrays in the memory of one device. They look like NumPy's, and lie at ``array.data.ptr``."""

    mark: str
    """What stands before their dtype where ranks compare their calls, so that no rank takes the host's for these."""
    title: str
    """What errors call them."""

    def owns(self, array: Any) -> bool:
        """Say whether ``array`` is one of them, on this rank's device."""

    def empty(self, numel: int, dtype: np.dtype[Any]) -> Any:
        """Return a new one, 1-D."""


def address_of_any(array: Any) -> int:
    """Return where a contiguous array begins, on the host or on a device."""
    address: int = address_of(array) if isinstance(array, np.ndarray) else array.data.ptr
    return address


def is_writeable(array: Any) -> bool:
    """Say whether an array can be written to; those on a device always can."""
    return not isinstance(array, np.ndarray) or array.flags.writeable
