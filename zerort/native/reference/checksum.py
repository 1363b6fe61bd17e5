"""NumPy form of CRC-32C: many lanes side by side, put together in a tree.

A state is a polynomial over GF(2), bits reversed: bit 31 is x^0. Appending n zero bytes multiplies it by x^(8n), which
is linear: a range is cut into lanes of equal length, all lanes take a word at a time (one table lookup per half word),
and neighbours are joined by shifting the left one by the right one's length.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from zerort.native.dtypes import Array

__all__ = ["bytes_of", "crc32c", "crc32c_combine", "crc32c_grains"]

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
_ALL_ONES = 0xFFFFFFFF
_LANES = 2048  # enough to hide NumPy's cost per call; their states and the tables stay in cache
_LANE_BYTES = 1024
_CHUNK = _LANES * _LANE_BYTES
_SMALL = 512  # below this many bytes a loop in Python is no slower

_Words = np.ndarray[Any, np.dtype[np.uint32]]


def crc32c(data: object, value: int = 0) -> int:
    """Return the CRC-32C of a buffer."""
    octets = bytes_of(data)
    state = value ^ _ALL_ONES
    start = 0
    lanes = _LANES
    while lanes >= 2:
        # As many whole chunks as there are, then ever fewer lanes of what is left.
        span = lanes * _lane_bytes(lanes)
        while octets.size - start >= span:
            chunk = octets[start : start + span].reshape(lanes, -1)
            state = _multiply(_power(span), state) ^ _sum_up(chunk)
            start += span
        lanes //= 2
    table = _byte_table()
    for octet in octets[start:].tolist():
        state = (state >> 8) ^ table[(state ^ octet) & 0xFF]
    return state ^ _ALL_ONES


def _lane_bytes(lanes: int) -> int:
    return _LANE_BYTES if lanes == _LANES else max(64, _SMALL // lanes)


def crc32c_grains(octets: Array, grain: int, copy_out: Array | None) -> Array:
    """Return the CRC-32C of every ``grain`` bytes."""
    if copy_out is not None:
        copy_out[: octets.size] = octets
    return np.array([crc32c(octets[at : at + grain]) for at in range(0, octets.size, grain)], np.uint32)


def crc32c_combine(a: int, b: int, length_of_b: int) -> int:
    """Return the CRC-32C of A followed by B."""
    return _multiply(_power(length_of_b), a) ^ b


def bytes_of(data: object) -> Array:
    """Return a contiguous buffer's memory as a 1-D uint8 array.

    Raises:
        TypeError: If `data` is no buffer.
        ValueError: If it is not contiguous.
        BufferError: If its owner will not lend it.
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("not contiguous")
        return data.reshape(-1).view(np.uint8)  # not memoryview: that knows no bfloat16
    view = memoryview(data)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _times_x(a: int) -> int:
    return (a >> 1) ^ (_POLYNOMIAL if a & 1 else 0)


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _ALL_ONES
        b = _times_x(b)
    return product


@lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """Return x^(8 · nbytes)."""
    result, base = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, base)
        base = _multiply(base, base)
        nbytes >>= 1
    return result


@lru_cache(maxsize=64)
def _shift_tables(nbytes: int) -> tuple[_Words, _Words]:
    """Return what `nbytes` zero bytes make of a state, for its lower and its upper half."""
    power = _power(nbytes)
    images = [_multiply(power, 1 << bit) for bit in range(32)]
    tables = np.zeros((2, 1 << 16), np.uint32)
    for table, bits in zip(tables, (images[:16], images[16:]), strict=True):
        for bit, image in enumerate(bits):  # linear: the image of a number is the sum of its bits' images
            np.bitwise_xor(table[: 1 << bit], np.uint32(image), out=table[1 << bit : 2 << bit])
    return tables[0], tables[1]


@lru_cache(maxsize=1)
def _byte_table() -> list[int]:
    low, _ = _shift_tables(1)
    return [int(entry) for entry in low[:256]]


def _shift(states: _Words, nbytes: int) -> _Words:
    low, high = _shift_tables(nbytes)
    image: _Words = low[states & np.uint32(0xFFFF)]
    image ^= high[states >> np.uint32(16)]
    return image


def _sum_up(chunk: Array) -> int:
    """Return the state that the bytes of a (lanes, bytes) array leave, starting from 0; lanes a power of two."""
    words = np.ascontiguousarray(np.ascontiguousarray(chunk).view("<u4").T).astype(np.uint32, copy=False)
    states: _Words = np.zeros(chunk.shape[0], np.uint32)
    for word in words:  # one word of every lane at a time
        states = _shift(states ^ word, 4)
    length = chunk.shape[1]
    while states.size > 1:
        states = _shift(states[0::2], length) ^ states[1::2]
        length *= 2
    return int(states[0])
