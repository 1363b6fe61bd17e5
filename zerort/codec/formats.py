"""`Format`: float32 as fewer bytes, and back; the formats there are.

| name | block | scale | code | bytes of fp32's | error, in steps of the block |
|---|---|---|---|---|---|
| int8 | 256 | float32 | -127 … 127 | 0.254 | 1/2; stochastic: below 1 |
| int4 | 128 | bfloat16, rounded up | -7 … 7 | 0.129 | 1/2; stochastic: below 1 |
| bfloat16 | 1 | none | | 0.5 | 2**-8 of the value |

A step is the block's scale: its largest magnitude / the largest code. A payload is one array of bytes: the scales, then
the codes. NaN and infinity are decoded as such, in their places; a block that has one keeps two codes fewer for its
numbers, which are decoded as numbers, with steps of largest / 125, or / 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zerort import native
from zerort.codec.rounding import Stochastic
from zerort.codec.summands import TOGETHER, Coded, SummandFormat, codes_directly, empty_like, kernels_for, pieces
from zerort.errors import CallError
from zerort.native.reference.blocks import BLOCKS, LIMITS, code_nbytes
from zerort.typing import is_on_gpu

__all__ = ["BFLOAT16", "FORMATS", "INT4", "INT8", "Format", "find_format"]


@dataclass(frozen=True, slots=True)
class Format(SummandFormat):
    """A way to write float32 values in fewer bytes. Arrays are 1-D and contiguous, all of one device."""

    name: str
    bits: int
    """Bits of a code: 8 or 4 in blocks with a scale, or 16 on its own."""

    @property
    def block(self) -> int:
        """Elements of a block: arrays are cut at multiples of it."""
        return BLOCKS.get(self.bits, 1)

    def nbytes(self, numel: int) -> int:
        """Return the length of the payload of ``numel`` elements.

        >>> INT8.nbytes(1024) / 4096, INT4.nbytes(1024) / 4096, INT4.nbytes(129)
        (0.25390625, 0.12890625, 69)
        """
        return 2 * numel if self.bits == 16 else self._scales_nbytes(numel) + code_nbytes(self.bits, numel)

    def encode(
        self, payload: Any, source: Any, *, start: int = 0, rounding: Stochastic | None = None, base: Any = None
    ) -> None:
        """Write ``source`` into ``payload``, or what it has more than a ``base``.

        Args:
            payload: `nbytes` bytes, uint8, aligned to 4 bytes.
            source: float32, float16 or bfloat16; only read.
            start: Global index of its first element, a multiple of `block`.
            rounding: How codes are rounded; None: to nearest, ties to even.
            base: As many elements of the same dtype, to which `decode` adds: the difference is taken in float32. Where
                it is not finite it counts as 0. Of formats with blocks; only read.

        Raises:
            ValueError: If an array is not what it can work on, or ``start`` lies within a block.
        """
        kernels = kernels_for(source)
        if self.bits == 16:
            if rounding is not None:
                raise CallError("Expected rounding=None with bfloat16, which rounds to nearest even, got Stochastic.")
            self._expect_no_difference(is_one=base is not None)
            kernels.cast_into(self._codes(payload, source.size), source)
            return
        scales, codes = self._scales(payload, source.size), self._codes(payload, source.size)
        keys = None if rounding is None else rounding.keys
        if codes_directly(source):
            kernels.encode_blocks(source, scales, codes, bits=self.bits, start=start, keys=keys, base=base)
            return
        room = None if base is None else empty_like(source, min(source.size, TOGETHER))
        for values, part, of_scales, of_codes in self._pieces(source):
            kernels.cast_into(values, source[part])
            below = None
            if room is not None:
                below = room[: values.size]
                kernels.cast_into(below, base[part])
            places = scales[of_scales], codes[of_codes]
            kernels.encode_blocks(values, *places, bits=self.bits, start=start + part.start, keys=keys, base=below)

    def decode(self, out: Any, payload: Any, *, adds: bool = False) -> None:
        """Write the values of ``payload`` into ``out``: float32, float16 or bfloat16.

        Args:
            out: Where they go.
            payload: What `encode` wrote.
            adds: Whether they are added to ``out``, which holds the ``base`` that they were taken from: in float32,
                rounded once to its dtype. Of formats with blocks.

        Raises:
            ValueError: If an array is not what it can work on.
        """
        kernels = kernels_for(out)
        codes = self._codes(payload, out.size)
        if self.bits == 16:
            self._expect_no_difference(is_one=adds)
            kernels.cast_into(out, codes)
            return
        scales = self._scales(payload, out.size)
        if codes_directly(out):
            kernels.decode_blocks(out, scales, codes, bits=self.bits, adds=adds)
            return
        for values, part, of_scales, of_codes in self._pieces(out):
            if adds:
                kernels.cast_into(values, out[part])
            kernels.decode_blocks(values, scales[of_scales], codes[of_codes], bits=self.bits, adds=adds)
            kernels.cast_into(out[part], values)

    def _expect_no_difference(self, *, is_one: bool) -> None:
        if is_one:
            raise CallError(f"Expected a format with blocks for differences, got {self.name}. Use int8 or int4.")

    def encode_with_feedback(self, payload: Any, source: Any, residual: Any, *, start: int = 0) -> None:
        """Write ``source + residual`` into ``payload``, and what is lost into ``residual``: on GPUs in one pass."""
        if not is_on_gpu(source):
            SummandFormat.encode_with_feedback(self, payload, source, residual, start=start)
            return
        kernels, codes = kernels_for(source), self._codes(payload, source.size)
        if self.bits == 16:
            kernels.narrow_with_residual(codes, source, residual)
            return
        scales = self._scales(payload, source.size)
        kernels.encode_blocks(source, scales, codes, bits=self.bits, start=start, residual=residual)

    def decode_sum(self, out: Any, summands: Sequence[Sequence[Coded]]) -> None:
        """Write the sum of several summands into ``out``: on GPUs in one pass, of a payload each."""
        if not is_on_gpu(out):
            SummandFormat.decode_sum(self, out, summands)
            return
        kernels_for(out).sum_payloads(out, [one.payload for (one,) in summands], bits=self.bits)

    def _encode_part(self, coded: Coded, values: Any, first: int, *, start: int) -> None:
        kernels, last = kernels_for(values), first + values.size
        codes = self._codes(coded.payload, coded.numel)
        if self.bits == 16:
            kernels.cast_into(codes[first:last], values)
            return
        of_scales, of_codes = self._places(first, last)
        scales = self._scales(coded.payload, coded.numel)[of_scales]
        kernels.encode_blocks(values, scales, codes[of_codes], bits=self.bits, start=start + first)

    def _decode_part(self, values: Any, coded: Coded, first: int) -> None:
        kernels, last = kernels_for(values), first + values.size
        codes = self._codes(coded.payload, coded.numel)
        if self.bits == 16:
            kernels.cast_into(values, codes[first:last])
            return
        of_scales, of_codes = self._places(first, last)
        scales = self._scales(coded.payload, coded.numel)[of_scales]
        kernels.decode_blocks(values, scales, codes[of_codes], bits=self.bits)

    def _pieces(self, array: Any) -> Iterator[tuple[Any, slice, slice, slice]]:
        """Yield room for some elements as float32, and where they, their scales and their codes are."""
        for values, part in pieces(array):
            yield values, part, *self._places(part.start, part.stop)

    def _places(self, first: int, last: int) -> tuple[slice, slice]:
        """Return where the scales and the codes of some elements are; of formats with blocks."""
        return (
            slice(first // self.block, -(-last // self.block)),
            slice(code_nbytes(self.bits, first), code_nbytes(self.bits, last)),
        )

    def bound(self, source: Any, *, rounding: Stochastic | None = None) -> Any:
        """Return the largest error that each element of a host array may have, as float64; 0 where it is not finite.

        Half a step of its block, or a whole one if it is rounded stochastically, and what float32 arithmetic loses.
        """
        finite = np.isfinite(source)
        magnitude = np.where(finite, np.abs(source), 0).astype(np.float64)
        if self.bits == 16:
            return np.maximum(magnitude * 2.0**-8, 2.0**-134)
        blocks = -(-source.size // self.block)
        rows = np.zeros((blocks, self.block))
        rows.reshape(-1)[: source.size] = magnitude
        whole = np.ones((blocks, self.block), bool)
        whole.reshape(-1)[: source.size] = finite
        limit = np.where(whole.all(axis=1), LIMITS[self.bits], LIMITS[self.bits] - 2)
        step = np.maximum(rows.max(axis=1) / limit, 2.0**-126)
        if self.bits == 4:
            step = step * (1 + 2.0**-7)  # rounded up to a bfloat16
        part = (0.5 if rounding is None else 1.0) + 2.0**-15
        return np.where(finite, np.repeat(step * part, self.block)[: source.size], 0.0)

    def _scales_nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * (4 if self.bits == 8 else 2)

    def _scales(self, payload: Any, numel: int) -> Any:
        self._check(payload, numel)
        return payload[: self._scales_nbytes(numel)].view(np.float32 if self.bits == 8 else np.uint16)

    def _codes(self, payload: Any, numel: int) -> Any:
        self._check(payload, numel)
        if self.bits == 16:
            return payload.view(native.BFLOAT16)
        codes = payload[self._scales_nbytes(numel) :]
        return codes.view(np.int8) if self.bits == 8 else codes

    def _check(self, payload: Any, numel: int) -> None:
        if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size != self.nbytes(numel):
            raise CallError(
                f"Expected a payload of {self.nbytes(numel)} bytes (uint8, 1-D) for {numel} elements in {self.name}, "
                f"got {payload.dtype.name} of shape {payload.shape}. `Format.nbytes` gives its length."
            )


INT8: Final = Format("int8", 8)
INT4: Final = Format("int4", 4)
BFLOAT16: Final = Format("bfloat16", 16)

FORMATS: Final = {format.name: format for format in (INT8, INT4, BFLOAT16)}
"""All formats by name."""


def find_format(name: str) -> Format:
    """Return the format of that name.

    Raises:
        CallError: If there is none.
    """
    if name not in FORMATS:
        raise CallError(f"Expected one of the formats {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]
