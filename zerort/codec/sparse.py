"""Arrays of which many elements are zero, losslessly: the others, then a bitmap that says where they are.

    values      those whose bits are not all zero, in order: -0.0 is one
    bitmap      bit i % 8 of byte i // 8: element i is among them

How many values there are follows from the payload's length. Elements of 1, 2, 4 or 8 bytes (decision 0177); CuPy's
arrays give the same bytes (decision 0188).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from zerort import native
from zerort.typing import Array, is_on_gpu

__all__ = ["decode_sparse", "encode_sparse", "sparse_nbytes", "write_sparse"]


_TOGETHER: Final = 1 << 16
"""Elements that are decoded at once, apart: others may read ``out`` who have decoded the same there."""


def sparse_nbytes(elements: Array, *, room: Array | None = None) -> int:
    """Return the bytes of an array's payload; ``room`` is that of `measure_delta`.

    >>> sparse_nbytes(np.array([0, 1.5, 0, 0, 0, 0, 0, 0, 2.0], np.float32))
    10
    """
    bits = _bits(elements)
    if is_on_gpu(bits):
        from zerort.codec import changes_cuda

        count, _ = changes_cuda.find_changes(None, bits, room=room)
    else:
        count, _ = native.find_changes(np.zeros_like(bits), bits)
    return count * bits.itemsize + _bitmap_nbytes(bits.size)


def encode_sparse(elements: Array) -> Array | None:
    """Return a host array's payload, uint8; None if that is no shorter than its bytes.

    Args:
        elements: 1-D and contiguous; only read.
    """
    nbytes = sparse_nbytes(elements)
    if nbytes >= elements.nbytes:
        return None
    payload = np.empty(nbytes, np.uint8)
    write_sparse(payload, elements)
    return payload


def write_sparse(payload: Array, elements: Array, *, room: Array | None = None) -> None:
    """Write an array into a payload, which is as long as `sparse_nbytes` says; ``room`` is that of `measure_delta`."""
    bits = _bits(elements)
    if is_on_gpu(bits):
        from zerort.codec import changes_cuda

        changes_cuda.write_sparse(payload, bits, room=room)
        return
    values, bitmap = _parts(payload, bits)
    native.write_changes(np.zeros_like(bits), bits, bitmap, values, bitmap=True)


def decode_sparse(out: Array, payload: Array, *, room: Array | None = None) -> None:
    """Write the array of a payload to ``out``, as long and of the dtype that it was encoded from; each element once.

    Args:
        out: 1-D, contiguous, writable.
        payload: uint8, at an address that the elements' size divides.
        room: As in `measure_delta`.

    Raises:
        ValueError: It holds something else. On a GPU nobody looks: nothing is written outside of ``out``.
    """
    bits = _bits(out)
    if is_on_gpu(bits):
        from zerort.codec import changes_cuda

        changes_cuda.apply_payload(bits, payload, is_delta=False, room=room)
        return
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
