"""`DecodedArray`: elements of an array that rests as blocks of codes, read between steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerort.codec import BlockRows
from zerort.device import Done, Ticket
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.typing import Array

__all__ = ["DecodedArray"]


class DecodedArray:
    """Elements of an array that rests as blocks, decoded as they are read. Any thread may read it.

    Args:
        codes: The blocks' bytes.
        rows: The blocks.
        dtype: What to decode to.
        size: Elements.
    """

    streams = True  # it has no elements in memory

    def __init__(self, codes: ChunkedArray, rows: BlockRows, *, dtype: np.dtype[Any], size: int) -> None:
        self.dtype = dtype
        self.size = size
        self._codes = codes
        self._rows = rows

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Fill ``out`` with the elements from ``first`` on."""
        rows = self._rows
        begin = first // rows.numel * rows.numel
        place = rows.bytes_of(slice(begin, first + out.size))
        octets = np.empty(place.stop - place.start, np.uint8)
        self._codes.read(place.start, octets).wait()  # not-gpu: copies to pageable memory are done when they return
        whole = np.empty(first + out.size - begin, self.dtype)
        rows.decode(whole, octets)
        out[:] = whole[first - begin :]
        return Done(out)

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Refuse: codes are written where they rest."""
        raise NotImplementedError
