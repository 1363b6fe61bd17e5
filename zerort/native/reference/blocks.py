"""Blockwise int8 and int4 in NumPy: the definition of the two formats.

    largest   of the block's finite magnitudes
    scale     largest / limit, at least the smallest normal float32; int4: rounded up to a bfloat16
    code      value / scale, rounded to nearest even, or up with the probability of what rounding down loses
    value     code * scale

A block with a NaN or an infinity has a negative scale and two codes fewer for numbers: limit is NaN, limit - 1 and its
negative are the infinities. Each operation rounds to float32, in the order written here.

Codes may be of a difference: value - base is encoded, and base + value decoded, where a base that is not finite counts
as 0. So what is decoded may be the next base, whatever it was: a NaN or an infinity arrives, and does not stay.
"""

from __future__ import annotations

import numpy as np

from zerort.native.dtypes import Array

__all__ = ["BLOCKS", "LIMITS", "code_nbytes", "decode_blocks", "encode_blocks", "hashed_indices"]

BLOCKS = {8: 256, 4: 128}
"""Elements of a block, by bits of a code."""
LIMITS = {8: 127, 4: 7}
"""Largest code, by its bits."""

_SMALLEST_NORMAL = np.float32(2.0**-126)
_TOGETHER = 1024
"""Blocks that are worked on at once."""


def code_nbytes(bits: int, numel: int) -> int:
    """Return the bytes of the codes of ``numel`` elements. Two codes of 4 bits share a byte."""
    return numel if bits == 8 else numel // 128 * 64 + (numel % 128 + 1) // 2


def encode_blocks(
    source: Array,
    scales: Array,
    codes: Array,
    bits: int,
    start: int,
    *,
    stochastic: bool,
    keys: tuple[int, int],
    base: Array | None = None,
) -> None:
    """Write the scales and codes of ``source``; see `zerort.native.encode_blocks`."""
    block = BLOCKS[bits]
    if base is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            source = source - _counted(base)
    whole = source.size // block * block
    for begin in range(0, whole, _TOGETHER * block):
        end = min(begin + _TOGETHER * block, whole)
        rows = source[begin:end].reshape(-1, block)
        found, rounded = _encode(rows, bits, start + begin, stochastic, keys)
        scales[begin // block : end // block] = found
        codes[code_nbytes(bits, begin) : code_nbytes(bits, end)] = _packed(rounded, bits)
    if whole < source.size:
        found, rounded = _encode(source[None, whole:], bits, start + whole, stochastic, keys)
        scales[-1:] = found
        codes[code_nbytes(bits, whole) :] = _packed(rounded, bits)


def decode_blocks(out: Array, scales: Array, codes: Array, bits: int, *, adds: bool = False) -> None:
    """Write the values of ``codes`` to ``out``; see `zerort.native.decode_blocks`."""
    if adds:
        values = np.empty_like(out)
        decode_blocks(values, scales, codes, bits)
        with np.errstate(over="ignore"):
            out[:] = np.where(np.isfinite(values), _counted(out) + values, values)
        return
    block = BLOCKS[bits]
    whole = out.size // block * block
    for begin in range(0, whole, _TOGETHER * block):
        end = min(begin + _TOGETHER * block, whole)
        packed = codes[code_nbytes(bits, begin) : code_nbytes(bits, end)].reshape(-1, code_nbytes(bits, block))
        out[begin:end] = _decode(packed, scales[begin // block : end // block], bits, block).reshape(-1)
    if whole < out.size:
        out[whole:] = _decode(codes[None, code_nbytes(bits, whole) :], scales[-1:], bits, out.size - whole)[0]


def _counted(base: Array) -> Array:
    return np.where(np.isfinite(base), base, np.float32(0))


def _encode(rows: Array, bits: int, start: int, stochastic: bool, keys: tuple[int, int]) -> tuple[Array, Array]:  # noqa: FBT001
    """Return the scales of blocks, as they are stored, and their codes as int8."""
    finite = np.isfinite(rows)
    marked = ~finite.all(axis=1)
    limit = np.where(marked, LIMITS[bits] - 2, LIMITS[bits]).astype(np.float32)[:, None]
    largest = np.where(finite, np.abs(rows), np.float32(0)).max(axis=1, keepdims=True)
    scale = np.maximum(largest / limit, _SMALLEST_NORMAL)
    if bits == 4:
        scale = ((scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        quotient = rows / scale
        if stochastic:
            shifted = quotient + _uniform(start, rows.shape, keys)
            rounded = np.clip(np.floor(shifted), -limit, limit)
        else:
            rounded = np.rint(quotient)
    codes = np.where(finite, rounded, np.float32(0)).astype(np.int8)
    codes[np.isnan(rows)] = LIMITS[bits]
    codes[np.isinf(rows)] = LIMITS[bits] - 1
    codes[np.isneginf(rows)] = 1 - LIMITS[bits]
    signed = np.where(marked, -scale[:, 0], scale[:, 0])
    return signed if bits == 8 else (signed.view(np.uint32) >> 16).astype(np.uint16), codes


def _decode(packed: Array, scales: Array, bits: int, count: int) -> Array:
    scale = scales if bits == 8 else (scales.astype(np.uint32) << 16).view(np.float32)
    codes = packed
    if bits == 4:
        nibbles = np.concatenate([packed & 15, packed >> 4], axis=1)[:, :count]
        codes = ((nibbles ^ 8).astype(np.int8) - 8).astype(np.int8)
    values: Array = codes.astype(np.float32) * np.abs(scale)[:, None]
    marked = (scale < 0)[:, None]
    values[marked & (codes == LIMITS[bits])] = np.nan
    values[marked & (codes == LIMITS[bits] - 1)] = np.inf
    values[marked & (codes == 1 - LIMITS[bits])] = -np.inf
    return values


def _packed(codes: Array, bits: int) -> Array:
    """Return codes as they are stored; of 4 bits, elements k and half + k of a block share byte k."""
    if bits == 8:
        return codes.reshape(-1)
    rows, count = codes.shape
    half = (count + 1) // 2
    nibbles = np.zeros((rows, 2 * half), np.uint8)
    nibbles[:, :count] = codes.view(np.uint8) & 15
    packed: Array = (nibbles[:, :half] | nibbles[:, half:] << 4).reshape(-1)
    return packed


def _uniform(start: int, shape: tuple[int, ...], keys: tuple[int, int]) -> Array:
    """Return numbers in [0, 1), each a function of the keys and its element's global index."""
    words = hashed_indices(start, shape, keys)
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def hashed_indices(start: int, shape: tuple[int, ...], keys: tuple[int, int]) -> Array:
    """Return 32 bits for each element, a function of the keys and its global index."""
    index = np.arange(start, start + shape[0] * shape[1], dtype=np.uint64)
    high, low = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    key = _mixed(np.uint32(keys[0]) + high * np.uint32(0x9E3779B9))
    words: Array = _mixed(_mixed(low ^ key) ^ np.uint32(keys[1])).reshape(shape)
    return words


def _mixed(words: Array) -> Array:
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed: Array = words ^ words >> np.uint32(16)
    return mixed
