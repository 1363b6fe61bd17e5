"""`JoinedHalves`: float32 master weights that are kept as bfloat16 parameters and remainders, for checkpoints.

    read      parameter and remainder, each from where it rests, joined
    write     split into both

So a checkpoint holds masters, whatever form they have in memory, and any form reads what another one wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerort.device import Done, Ticket, joined
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.native import BFLOAT16, join_master, split_master
from zerort.native.dtypes import FLOAT32
from zerort.typing import Array

__all__ = ["JoinedHalves"]


class JoinedHalves:
    """A range of master weights as one float32 array. Any thread may read and write it.

    Args:
        param: The parameters, bfloat16.
        remainder: The lower halves of the masters, uint16, from the same element on.
        first: The element of both at which the range begins.
        size: Elements of the range.
    """

    def __init__(self, param: ChunkedArray, remainder: ChunkedArray, *, first: int, size: int) -> None:
        self._param = param
        self._remainder = remainder
        self._first = first
        self.size = size

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the masters."""
        return FLOAT32

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Fill ``out`` with the masters from ``first`` on."""
        param, remainder = np.empty(out.size, BFLOAT16), np.empty(out.size, np.uint16)
        begin = self._first + first
        halves = [self._param.read(begin, param), self._remainder.read(begin, remainder)]
        joined(halves, result=out).wait()  # not-gpu: copies of pageable memory are done when they return
        join_master(out, param, remainder)
        return Done(out)

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Set the masters from ``first`` on."""
        param, remainder = np.empty(source.size, BFLOAT16), np.empty(source.size, np.uint16)
        split_master(param, remainder, source)
        begin = self._first + first
        halves = [self._param.write(begin, param), self._remainder.write(begin, remainder)]
        joined(halves, result=source).wait()  # not-gpu: copies of pageable memory are done when they return
        return Done(source)
