"""Arrays that are not NumPy's: what a group must know of them to carry them, and how any array is looked at.

A transport that reaches other memory than the host's names it with a `DeviceArrays`; its groups then take both kinds of
arrays. A framework's tensors of the host are taken as the arrays that they lie on, once its binding has told how
(`accept_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from zerort.native import address_of

__all__ = ["DeviceArrays", "Tensors", "accept_tensors", "address_of_any", "is_writeable", "tensors_like"]


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


class Tensors(NamedTuple):
    """A framework's tensors in host memory."""

    to_array: Callable[[Any], Any]
    """Returns a tensor as an array over the same memory; raises `CallError` for one that is not the host's."""
    from_array: Callable[[Any], Any]
    """Returns an array as a tensor over the same memory."""


_tensors: dict[type, Tensors] = {}


def accept_tensors(kind: type, tensors: Tensors) -> None:
    """Have groups take a framework's tensors, instances of ``kind``, from now on."""
    _tensors[kind] = tensors


def tensors_like(*values: Any) -> Tensors | None:
    """Return what converts the first of ``values`` that is a framework's tensor; None if none is."""
    for value in values:
        for kind, tensors in _tensors.items():
            if isinstance(value, kind):
                return tensors
    return None
