"""`BlockRows`: codes at rest. Every block is a row of bytes, its scale before its codes.

    int8    │ scale, 4 bytes │ 256 codes, 256 bytes │    260 bytes for 256 elements
    int4    │ scale, 2 bytes │ 128 codes,  64 bytes │     66 bytes for 128 elements

A payload of `Format` has all scales first, as a message does. Rows are cut between any two blocks, into shards, chunks
and extents of a checkpoint, and put together again, without being coded anew (decision 0150).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from zerort.codec.formats import INT4, INT8, Format
from zerort.codec.summands import kernels_for
from zerort.errors import CallError
from zerort.typing import is_on_gpu

__all__ = ["ROWS", "BlockRows"]

_TOGETHER: Final = 1 << 18
"""Elements that are coded at once: a multiple of every block, so small that they stay in a cache."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Blocks of a format as rows of bytes. Arrays are 1-D, contiguous; they are coded on the host, decoded anywhere."""

    format: Format

    @property
    def name(self) -> str:
        """What the format is called."""
        return self.format.name

    @property
    def numel(self) -> int:
        """Elements of a row."""
        return self.format.block

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.format.nbytes(self.numel)

    @property
    def width(self) -> Fraction:
        """Bytes per element."""
        return Fraction(self.nbytes, self.numel)

    def nbytes_of(self, numel: int) -> int:
        """Return the bytes of some elements, in whole rows.

        >>> ROWS["int8"].nbytes_of(257), ROWS["int4"].nbytes_of(257)
        (520, 198)
        """
        return -(-numel // self.numel) * self.nbytes

    def bytes_of(self, elements: slice) -> slice:
        """Return where the rows of elements lie that begin with a row."""
        return slice(elements.start // self.numel * self.nbytes, self.nbytes_of(elements.stop))

    def encode(self, rows: Any, source: Any) -> None:
        """Write ``source`` as rows, rounded to nearest; the last one is filled up with zeros.

        Args:
            rows: `nbytes_of` bytes, uint8.
            source: float32, float16 or bfloat16; only read.

        Raises:
            CallError: ``rows`` is of another length.
        """
        table = self._table(rows, source.size)
        for first in range(0, source.size, _TOGETHER):
            part = source[first : first + _TOGETHER]
            blocks = -(-part.size // self.numel)
            if part.size < blocks * self.numel:
                whole = np.zeros(blocks * self.numel, source.dtype)
                whole[: part.size] = part
                part = whole
            payload = np.empty(self.format.nbytes(part.size), np.uint8)
            self.format.encode(payload, part)
            scales, codes = self._parts(payload, blocks)
            begin = first // self.numel
            table[begin : begin + blocks, :1] = scales
            table[begin : begin + blocks, 1:] = codes

    def decode(self, out: Any, rows: Any) -> None:
        """Write the values of rows to ``out``: float32, float16 or bfloat16. The last row may have more than it takes.

        Raises:
            CallError: ``rows`` is of another length.
        """
        table = self._table(rows, out.size)
        if is_on_gpu(out):
            kernels_for(out).decode_rows(out, rows, bits=self.format.bits)
            return
        room = np.empty(self.format.nbytes(min(len(table) * self.numel, _TOGETHER)), np.uint8)
        for first in range(0, out.size, _TOGETHER):
            part = out[first : first + _TOGETHER]
            blocks = -(-part.size // self.numel)
            scales, codes = self._parts(room[: blocks * self.nbytes], blocks)
            begin = first // self.numel
            scales[:] = table[begin : begin + blocks, :1]
            codes[:] = table[begin : begin + blocks, 1:]
            whole = part if part.size == blocks * self.numel else np.empty(blocks * self.numel, out.dtype)
            self.format.decode(whole, room[: blocks * self.nbytes])
            if whole is not part:
                part[:] = whole[: part.size]

    def _table(self, rows: Any, numel: int) -> Any:
        if rows.dtype != np.uint8 or rows.ndim != 1 or rows.size != self.nbytes_of(numel):
            raise CallError(
                f"Expected {self.nbytes_of(numel)} bytes (uint8, 1-D) for {numel} elements in rows of {self.name}, got "
                f"{rows.dtype.name} of shape {rows.shape}. `BlockRows.nbytes_of` gives their number."
            )
        return rows.view(self._word).reshape(-1, self.nbytes // self._word.itemsize)

    def _parts(self, payload: Any, blocks: int) -> tuple[Any, Any]:
        """Return the scales and the codes of a payload of whole blocks, a row for each block."""
        words = payload.view(self._word)
        return words[:blocks].reshape(blocks, 1), words[blocks:].reshape(blocks, -1)

    @property
    def _word(self) -> np.dtype[Any]:
        """As wide as a scale: copies move so many bytes at once."""
        return np.dtype(np.uint32 if self.format.bits == 8 else np.uint16)


ROWS: Final = {format.name: BlockRows(format) for format in (INT8, INT4)}
"""All formats that values rest in, by name."""
