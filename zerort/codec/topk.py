"""`LargestFormat`: of each block the few elements of the largest magnitude, as bfloat16, and where they are.

    block of 1,024      0.1 -7 0.02 3 … 0.4      keep 11 of them for 1 %
    payload             positions (uint16) of all blocks, then values (bfloat16): 4 bytes for each that is kept

All others are decoded as zero: with feedback they wait until they have grown (decision 0148). Each block has as many,
so the length of a payload depends on nothing but the number of elements. Of equal magnitudes the first is taken; NaN
and infinity are above all numbers. On GPUs a warp finds the least magnitude that is kept bit by bit (decision 0189).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zerort import native
from zerort.codec.summands import Coded, SummandFormat, kernels_for, pieces
from zerort.errors import CallError
from zerort.native.reference.largest import largest_count
from zerort.typing import is_on_gpu

__all__ = ["LARGEST_BLOCK", "LargestFormat"]

LARGEST_BLOCK: Final = 1024
"""Elements of a block."""


@dataclass(frozen=True, slots=True)
class LargestFormat(SummandFormat):
    """The largest elements of each block."""

    fraction: float
    """How many of all, above 0 and at most 1; at least one of each block."""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"top {self.fraction:g}"

    @property
    def block(self) -> int:
        """Elements of a block: arrays are cut at multiples of it."""
        return LARGEST_BLOCK

    @property
    def residual_dtype(self) -> str:
        """What waits to be sent: sums over many steps, to which 16 bits would add nothing more after a few hundred."""
        return "float32"

    @property
    def keep(self) -> int:
        """How many elements of a block are kept."""
        return max(1, math.ceil(self.fraction * LARGEST_BLOCK))

    def nbytes(self, numel: int) -> int:
        """Return the length of the payload of ``numel`` elements.

        >>> LargestFormat(0.01).nbytes(1024), LargestFormat(0.01).nbytes(1024) / 4096
        (44, 0.0107421875)
        """
        return 4 * self._kept(numel)

    def encode(self, payload: Any, source: Any, *, start: int = 0) -> None:
        """Write the largest elements of ``source`` into ``payload``; see `SummandFormat.encode`."""
        coded = Coded(source.size, payload)
        if is_on_gpu(source):
            self._encode_there(coded, source, None, start=start)
            return
        for values, part in pieces(source):
            native.cast_into(values, source[part])
            self._encode_part(coded, values, part.start, start=start)

    def decode(self, out: Any, payload: Any) -> None:
        """Write the values of ``payload`` into ``out``: float32, float16 or bfloat16."""
        self.decode_sum(out, [[Coded(out.size, payload)]])

    def encode_with_feedback(self, payload: Any, source: Any, residual: Any, *, start: int = 0) -> None:
        """Write ``source + residual`` into ``payload``, and what is not sent into ``residual``: on GPUs in one pass."""
        if is_on_gpu(source):
            self._encode_there(Coded(source.size, payload), source, residual, start=start)
        else:
            SummandFormat.encode_with_feedback(self, payload, source, residual, start=start)

    def decode_sum(self, out: Any, summands: Sequence[Sequence[Coded]]) -> None:
        """Write the sum of several summands into ``out``: on GPUs in one pass, of a payload each."""
        if is_on_gpu(out):
            payloads = [one.payload for (one,) in summands]
            kernels_for(out).sum_largest(out, payloads, block=LARGEST_BLOCK, keep=self.keep)
        else:
            SummandFormat.decode_sum(self, out, summands)

    def _encode_there(self, coded: Coded, source: Any, residual: Any, *, start: int) -> None:
        """Encode on a GPU."""
        self._check_start(start)
        kernels = kernels_for(source)
        kernels.encode_largest(source, coded.payload, block=LARGEST_BLOCK, keep=self.keep, residual=residual)

    def _kept(self, numel: int) -> int:
        return largest_count(numel, block=LARGEST_BLOCK, keep=self.keep)

    def _encode_part(self, coded: Coded, values: Any, first: int, *, start: int) -> None:
        self._check_start(start)
        positions, kept = self._entries(coded, first, values.size)
        native.find_largest(values, positions, block=LARGEST_BLOCK, keep=self.keep)
        native.cast_into(kept, values[self._places(positions, values.size)])

    def _decode_part(self, values: Any, coded: Coded, first: int) -> None:
        positions, kept = self._entries(coded, first, values.size)
        wide = np.empty(kept.size, np.float32)
        native.cast_into(wide, kept)
        values.fill(0)
        values[self._places(positions, values.size)] = wide

    def _check_start(self, start: int) -> None:
        if start % LARGEST_BLOCK:
            raise CallError(f"Expected an array that starts a block of {LARGEST_BLOCK} elements, got start={start}.")

    def _entries(self, coded: Coded, first: int, numel: int) -> tuple[Any, Any]:
        """Return the positions and values of some elements of a payload."""
        if coded.payload.dtype != np.uint8 or coded.payload.shape != (self.nbytes(coded.numel),):
            raise CallError(
                f"Expected a payload of {self.nbytes(coded.numel)} bytes (uint8, 1-D) for {coded.numel} elements in "
                f"{self.name}, got {coded.payload.dtype.name} of shape {coded.payload.shape}."
            )
        own = slice(self._kept(first), self._kept(first) + self._kept(numel))
        words = coded.payload.view(np.uint16)
        middle = words.size // 2
        return words[:middle][own], words[middle:][own].view(native.BFLOAT16)

    def _places(self, positions: Any, numel: int) -> Any:
        """Return where positions within blocks are within all ``numel`` elements."""
        blocks = np.repeat(np.arange(-(-numel // LARGEST_BLOCK)) * LARGEST_BLOCK, self.keep)[: positions.size]
        return blocks + positions
