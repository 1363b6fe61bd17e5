"""`SummandFormat`: what gradients travel in: coded with feedback by their sender, decoded and summed by an owner.

    encode_with_feedback    source + residual ── codes ──> payload,  what they lose ──> residual
    decode_sum              payloads of several senders ── float32, in order ──> out, rounded once

A format says how a part of an array is coded and decoded, between two of its blocks; what is common is here.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from zerort import native
from zerort.typing import is_on_gpu

__all__ = ["TOGETHER", "Coded", "SummandFormat", "codes_directly", "empty_like", "kernels_for", "pieces"]

TOGETHER: Final = 1 << 16
"""Elements that pass through float32 at once; a multiple of all blocks."""


class Coded(NamedTuple):
    """Codes, and of how many elements."""

    numel: int
    payload: Any


class SummandFormat(abc.ABC):
    """A way to write float32 values in fewer bytes. Arrays are 1-D and contiguous, all of one device."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Elements of a block: arrays are cut at multiples of it."""

    @property
    def residual_dtype(self) -> str:
        """What is kept of losses between steps: one step's, of which 16 bits are enough."""
        return "bfloat16"

    @abc.abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the length of the payload of ``numel`` elements."""

    @abc.abstractmethod
    def encode(self, payload: Any, source: Any, *, start: int = 0) -> None:
        """Write ``source``, float32, float16 or bfloat16, into ``payload``, `nbytes` bytes.

        Args:
            payload: uint8, aligned to 4 bytes.
            source: Only read.
            start: Global index of its first element, a multiple of `block`.
        """

    @abc.abstractmethod
    def _encode_part(self, coded: Coded, values: Any, first: int, *, start: int) -> None:
        """Write float32 ``values`` into a payload, as its elements from ``first`` on, with which a block begins.

        Args:
            coded: The payload.
            values: Only read; they end with a block, or with the payload.
            first: Where they are.
            start: Global index of the payload's first element.
        """

    @abc.abstractmethod
    def _decode_part(self, values: Any, coded: Coded, first: int) -> None:
        """Write elements of a payload into float32 ``values``, from element ``first`` on, with which a block begins."""

    def encode_with_feedback(self, payload: Any, source: Any, residual: Any, *, start: int = 0) -> None:
        """Write ``source + residual`` into ``payload``, and what the codes lose of that into ``residual``.

        NaN and infinity pass, and leave nothing to make up for.

        Args:
            payload: `nbytes` bytes, uint8, aligned to 4 bytes.
            source: float32, float16 or bfloat16; only read.
            residual: `residual_dtype`, as many elements: what was lost before.
            start: Global index of the first element, a multiple of `block`.
        """
        kernels, coded = kernels_for(source), Coded(source.size, payload)
        room = empty_like(source, min(source.size, TOGETHER))
        for wanted, part in pieces(source):
            kernels.cast_into(wanted, source[part])
            back = room[: wanted.size]
            kernels.cast_into(back, residual[part])
            wanted += back
            self._encode_part(coded, wanted, part.start, start=start)
            self._decode_part(back, coded, part.start)
            with np.errstate(invalid="ignore"):
                wanted -= back
            wanted[~np.isfinite(wanted)] = 0
            kernels.cast_into(residual[part], wanted)

    def decode_sum(self, out: Any, summands: Sequence[Sequence[Coded]]) -> None:
        """Write the sum of what is decoded of several summands into ``out``, in order and in float32; rounded once.

        Args:
            out: float32, float16 or bfloat16.
            summands: At least one: payloads that lie side by side, all together of as many elements. Each but the last
                ends with a block.
        """
        kernels = kernels_for(out)
        parts = [list(_placed(summand)) for summand in summands]
        cuts = {*range(0, out.size, TOGETHER), out.size, *(first for each in parts for first, _ in each)}
        room, again = (empty_like(out, min(out.size, TOGETHER)) for _ in range(2))
        for first, last in pairwise(sorted(cuts)):
            values = room[: last - first]
            for number, each in enumerate(parts):
                start, coded = next(one for one in reversed(each) if one[0] <= first and one[1].numel)
                into = again[: values.size] if number else values
                self._decode_part(into, coded, first - start)
                if number:
                    values += into
            if out.dtype.itemsize == 2:
                kernels.cast_into(out[first:last], values)
            else:
                out[first:last] = values


def _placed(summand: Sequence[Coded]) -> Iterator[tuple[int, Coded]]:
    """Yield where each of some payloads that lie side by side begins, and itself."""
    first = 0
    for coded in summand:
        yield first, coded
        first += coded.numel


def pieces(array: Any) -> Iterator[tuple[Any, slice]]:
    """Yield room for some elements of an array as float32, and where they are."""
    room = empty_like(array, min(array.size, TOGETHER))
    for first in range(0, array.size, TOGETHER):
        last = min(first + TOGETHER, array.size)
        yield room[: last - first], slice(first, last)


def empty_like(array: Any, numel: int) -> Any:
    """Return float32 memory on the device of ``array``."""
    return type(array)((numel,), np.float32)


def kernels_for(array: Any) -> Any:
    """Return the kernels of an array's device."""
    if is_on_gpu(array):
        from zerort.codec import kernels_cuda

        return kernels_cuda
    return native


def codes_directly(array: Any) -> bool:
    """Say whether blocks of an array are coded and decoded without room for them as float32: on GPUs, always."""
    return array.dtype.itemsize != 2 or is_on_gpu(array)
