"""`Reserve`: addresses for the whole of an array, of which the ranges in use alone have memory (decision 0179).

    addresses    0 ──────────────────────────────────────────── numel
    in use                   ├──────── take ────────┤
    later              ├──────── take ────────┤─────┤            what stays has not moved; `give_back` lets the rest go

Ranges of ranks move along an array when it is cut anew. In addresses of its own, what a rank keeps stays where it is,
and memory is touched for what arrives alone: the first touch of a page costs more than a copy of its bytes.

Outside of ranges in use the addresses are readable, as zeros, and no memory stands behind them: neither a limit of the
process (``ulimit -d``) nor a host that grants no more than it has counts them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from typing import TYPE_CHECKING, Final

import numpy as np

from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, DtypeLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LEAST_NBYTES", "Reserve"]

LEAST_NBYTES: Final = 1 << 20
"""Of a whole array, from which on a range of it is worth addresses of its own: each takes some mappings."""

_HUGE_FROM: Final = 1 << 22
"""Bytes from which on huge pages are asked for, as NumPy does."""

_HUGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
"""Not in Python's mmap, or not in that of all our versions."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Reserve:
    """Addresses for a 1-D array; see `Reserve.open`. They go when the last array of them does."""

    def __init__(self, mapped: mmap.mmap, dtype: np.dtype[np.generic]) -> None:
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._dtype = dtype
        self._address: int = self._bytes.ctypes.data
        self._forbid(0, self._bytes.size)

    @classmethod
    def open(cls, numel: int, dtype: DtypeLike) -> Self | None:
        """Return addresses for ``numel`` elements; None: too few, or this process may not have addresses at will."""
        kind = numpy_dtype(dtype)
        nbytes = numel * kind.itemsize
        if not nbytes or nbytes < LEAST_NBYTES or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return None
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return cls(mmap.mmap(-1, nbytes, flags=flags), kind)
        except OSError:  # a host that grants no more than it has, or another limit
            return None

    def take(self, first: int, last: int) -> Array:
        """Return the elements from ``first`` to ``last``: with the values that are there, else zeros.

        Raises:
            MemoryError: The process may not have so much.
        """
        begin, end = self._pages(first, last)
        if begin < end and _libc.mprotect(self._address + begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"Expected {end - begin:,} bytes of memory, got: {os.strerror(ctypes.get_errno())}.")
        self._ask_for_huge_pages(begin, end)
        size = self._dtype.itemsize
        return self._bytes[first * size : last * size].view(self._dtype)

    def give_back(self, first: int, last: int, *, keep: tuple[int, int]) -> None:
        """Let the memory of some elements go, except for pages on which there are some of ``keep``.

        Args:
            first: Where they begin.
            last: Where they end. Nobody uses them any more.
            keep: Where those begin and end that are in use.
        """
        begin, end = self._pages(first, last)
        kept, until = self._pages(*keep) if keep[0] < keep[1] else (end, end)
        for one, other in ((begin, min(end, kept)), (max(begin, until), end)):
            if one < other:
                self._forbid(one, other)

    def _forbid(self, begin: int, end: int) -> None:
        """Have addresses without memory behind them."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        place = self._address + begin
        if _libc.mmap(place, end - begin, mmap.PROT_READ, flags, -1, 0) != place:
            # What is there stays: a process has too many mappings to split one of them.
            _libc.madvise(place, end - begin, mmap.MADV_DONTNEED)

    def _pages(self, first: int, last: int) -> tuple[int, int]:
        """Return the bytes of the pages on which elements are."""
        size, page = self._dtype.itemsize, mmap.PAGESIZE
        return (first * size // page * page, -(-last * size // page) * page) if first < last else (0, 0)

    def _ask_for_huge_pages(self, begin: int, end: int) -> None:
        """Ask for huge pages in all that are within a range: those at its ends would hold more than is asked for."""
        low = -(-(self._address + begin) // _HUGE_PAGE) * _HUGE_PAGE
        high = (self._address + end) // _HUGE_PAGE * _HUGE_PAGE
        if end - begin >= _HUGE_FROM and low < high:
            _libc.madvise(low, high - low, mmap.MADV_HUGEPAGE)  # refused where an administrator said so
