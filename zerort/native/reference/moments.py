"""NumPy forms of `zerort.native.moments`: what a block of moments in 8 bits is.

    block     256 elements as 260 bytes: a float32 scale, the largest magnitude, and a code for each element
    code      0: zero; c: top - c steps of 1/8 octave below the scale; of signed moments the highest bit is the sign
    top       127 of signed moments (15.75 octaves), 255 of those that have no sign (31.75 octaves)
    value     float32 with the bits of 1.0 - (top - c) * 2**20, times the scale
    rounding  up or down by chance, so that the mean is the value; the chance is a function of keys and global index

What is below the smallest code becomes zero, but unsigned moments that are not zero keep the smallest code: they are
divided by. The scale of a block with a NaN or an infinity is NaN, and so is every value of it. Each operation rounds to
float32, in the order written here.
"""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import Array
from zerort.native.reference.blocks import hashed_indices

__all__ = ["MOMENT_BLOCK", "MOMENT_NBYTES", "decode_moments", "encode_moments", "moment_nbytes"]

MOMENT_BLOCK = 256
"""Elements of a block."""
MOMENT_NBYTES = 260
"""Bytes of a block."""

_ONE = np.int64(0x3F800000)


def moment_nbytes(numel: int) -> int:
    """Return the bytes of ``numel`` moments, in whole blocks.

    >>> moment_nbytes(256), moment_nbytes(257)
    (260, 520)
    """
    return -(-numel // MOMENT_BLOCK) * MOMENT_NBYTES


def encode_moments(payload: Array, source: Array, start: int, *, is_signed: bool, keys: tuple[int, int]) -> None:
    """Write the blocks of ``source``; see `zerort.native.encode_moments`."""
    rows = payload.reshape(-1, MOMENT_NBYTES)
    whole = source.size // MOMENT_BLOCK
    if whole:
        _encode(rows[:whole], source[: whole * MOMENT_BLOCK].reshape(whole, -1), start, is_signed, keys)
    if whole < len(rows):
        rest = source[None, whole * MOMENT_BLOCK :]
        _encode(rows[whole:], rest, start + whole * MOMENT_BLOCK, is_signed, keys)


def decode_moments(out: Array, payload: Array, *, is_signed: bool) -> None:
    """Write the values of ``payload``; see `zerort.native.decode_moments`."""
    rows = payload.reshape(-1, MOMENT_NBYTES)
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    codes, top = rows[:, 4:].astype(np.int64), 127 if is_signed else 255
    steps = codes & top
    bits = np.where(steps == 0, 0, _ONE - ((top - steps) << 20))
    if is_signed:
        bits |= codes >> 7 << 31
    with np.errstate(invalid="ignore"):
        values = bits.astype(np.uint32).view(np.float32) * scales
    out[:] = values.reshape(-1)[: out.size]


def _encode(rows: Array, source: Array, start: int, is_signed: bool, keys: tuple[int, int]) -> None:  # noqa: FBT001
    top = 127 if is_signed else 255
    bits = source.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.max(axis=1, keepdims=True)
    broken = largest >= 0x7F800000
    scales = np.where(broken, 0x7FC00000, largest).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = (magnitude.astype(np.uint32).view(np.float32) / scales).view(np.uint32).astype(np.int64)
    chance = hashed_indices(start, source.shape, keys).astype(np.int64) >> 12
    least = np.where(magnitude != 0, 0 if is_signed else 1, 0)
    code = np.maximum(top - ((_ONE - quotient + chance) >> 20), least)
    if is_signed:
        code |= np.where(code == 0, 0, bits >> 31 << 7)
    rows[:, :4] = scales.view(np.uint8).reshape(len(rows), 4)
    rows[:, 4 : 4 + source.shape[1]] = np.where(broken | (largest == 0), 0, code).astype(np.uint8)
