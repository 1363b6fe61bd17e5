"""Arrays of which many elements are zero, losslessly: the others, then a bitmap that says where they are.

    values      those whose bits are not all zero, in order: -0.0 is one
    bitmap      bit i % 8 of byte i // 8: element i is among them

How many values there are follows from the payload's length. Host arrays only; elements of 1, 2, 4 or 8 bytes (decision
0177).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from zerort import native
from zerort.typing import Array

__all__ = ["decode_sparse", "encode_sparse", "sparse_nbytes"]


_TOGETHER: Final = 1 << 16
"""Elements that are decoded at once, apart: others may read ``out`` who have decoded the same there."""


def sparse_nbytes(elements: Array) -> int:
    """Return the bytes of an array's payload.

    >>> sparse_nbytes(np.array([0, 1.5, 0, 0, 0, 0, 0, 0, 2.0], np.float32))
    10
    """
    bits = _bits(elements)
    return native.find_changes(np.zeros_like(bits), bits)[0] * bits.itemsize + _bitmap_nbytes(bits.size)


def encode_sparse(elements: Array) -> Array | None:
    """Return an array's payload, uint8; None if that is no shorter than its bytes.

    Args:
        elements: 1-D and contiguous; only read.
    """
    bits = _bits(elements)
    zeros = np.zeros_like(bits)
    count, _ = native.find_changes(zeros, bits)
    nbytes = count * bits.itemsize + _bitmap_nbytes(bits.size)
    if nbytes >= bits.nbytes:
        return None
    payload = np.empty(nbytes, np.uint8)
    values, bitmap = _parts(payload, bits)
    native.write_changes(zeros, bits, bitmap, values, bitmap=True)
    return payload


def decode_sparse(out: Array, payload: Array) -> None:
    """Write the array of a payload to ``out``, as long and of the dtype that it was encoded from; each element once.

    Args:
        out: 1-D, contiguous, writable.
        payload: uint8, at an address that the elements' size divides.

    Raises:
        ValueError: It holds something else.
    """
    bits = _bits(out)
    rest = payload.size - _bitmap_nbytes(bits.size)
    if rest < 0 or rest % bits.itemsize:
        raise ValueError(f"a bitmap of {bits.size} elements and values of {bits.itemsize} bytes, got {payload.size}")
    values, bitmap = _parts(payload, bits)
    room, at = np.empty(min(bits.size, _TOGETHER), bits.dtype), 0
    for first in range(0, bits.size, _TOGETHER):
        part, where = bits[first : first + _TOGETHER], bitmap[first // 8 : (first + _TOGETHER) // 8]
        some = room[: part.size]
        some.fill(0)
        count = int(np.unpackbits(where).sum())
        native.apply_changes(some, where, values[at : at + count], bitmap=True)
        part[:] = some
        at += count
    if at != values.size:
        raise ValueError(f"{values.size} values, got a bitmap of {at}")


def _parts(payload: Array, bits: Array) -> tuple[Array, Array]:
    end = payload.size - _bitmap_nbytes(bits.size)
    return payload[:end].view(bits.dtype), payload[end:]


def _bitmap_nbytes(numel: int) -> int:
    return -(-numel // 8)


def _bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")
