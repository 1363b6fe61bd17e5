"""Lossless deltas: the elements of an array whose bits differ from a base, with their positions.

    byte 0        how positions are written: 0 gaps, 1 bitmap, 2 none (all elements are there)
    byte 1        bytes of an element
    8 … 16        number of elements of the array
    16 … 24       number of values
    then          the values, absolute; then the positions (`native.reference.changes`)

The smallest of the three ways is taken, so a delta has at most 24 bytes more than the array. Values are absolute: a
delta that is applied twice does no harm, and errors do not add up. CuPy's arrays give the same bytes (decision 0188).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from zerort import native
from zerort.errors import CallError
from zerort.typing import Array, is_on_gpu

__all__ = ["HEADER_NBYTES", "DeltaSize", "apply_delta", "delta_nbytes", "encode_delta", "measure_delta"]

_GAPS, _BITMAP, _ALL = 0, 1, 2
_HEADER = struct.Struct("<BB6xQQ")
HEADER_NBYTES = _HEADER.size
"""Bytes of a delta without changes."""


class DeltaSize(NamedTuple):
    """What a delta takes."""

    way: int
    """How positions are written."""
    changed: int
    """Elements that differ."""
    nbytes: int
    """Bytes of the delta, its header included."""


def delta_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a delta of an array at their most."""
    return HEADER_NBYTES + numel * itemsize


def measure_delta(base: Array, now: Array, *, room: Array | None = None) -> DeltaSize:
    """Return what the changes from ``base`` to ``now`` take, of arrays as `encode_delta` takes them.

    Raises:
        ValueError: If the arrays are not alike.
    """
    before, after = _bits(base), _bits(now)
    if is_on_gpu(after):
        from zerort.codec import changes_cuda

        changed, gap_nbytes = changes_cuda.find_changes(before, after, room=room)
    else:
        changed, gap_nbytes = native.find_changes(before, after)
    numel, itemsize = after.size, after.itemsize
    sizes = {
        _GAPS: gap_nbytes + changed * itemsize,
        _BITMAP: -(-numel // 8) + changed * itemsize,
        _ALL: numel * itemsize,
    }
    way = min(sizes, key=lambda one: (sizes[one], one))
    return DeltaSize(way, changed, HEADER_NBYTES + sizes[way])


def encode_delta(
    base: Array, now: Array, *, size: DeltaSize | None = None, out: Array | None = None, room: Array | None = None
) -> Array:
    """Return the changes from ``base`` to ``now`` as bytes.

    Args:
        base: 1-D, contiguous, elements of 1, 2, 4 or 8 bytes.
        now: The same dtype and length. Compared and carried as bits: NaN and -0.0 too.
        size: What `measure_delta` said of these very arrays, if it was asked.
        out: Where to put them: uint8, of the delta's bytes, at an address that 8 divides; new memory if None.
        room: Of a GPU, where its kernels note what they find (`marks_nbytes`); new memory if None.

    Raises:
        ValueError: If the arrays are not alike, or not those that were measured, which a GPU does not look at again.
    """
    way, changed, nbytes = measure_delta(base, now, room=room) if size is None else size
    before, after = _bits(base), _bits(now)
    count = after.size if way == _ALL else changed
    if is_on_gpu(after):
        from zerort.codec import changes_cuda

        there = type(now)((nbytes,), np.uint8) if out is None else out
        changes_cuda.write_delta(there, before, after, way=way, count=count, room=room)
        return there
    payload = np.empty(nbytes, np.uint8) if out is None else out
    payload[:HEADER_NBYTES] = np.frombuffer(_HEADER.pack(way, after.itemsize, after.size, count), np.uint8)
    values, positions = _parts(payload, count, after.itemsize)
    if way == _ALL:
        values[:] = after
    else:
        native.write_changes(before, after, positions, values, bitmap=way == _BITMAP)
    return payload


def apply_delta(target: Array, payload: Array, *, room: Array | None = None) -> None:
    """Make ``target``, which is the base bit for bit, what the delta was encoded from.

    Args:
        target: 1-D, contiguous, writable.
        payload: What `encode_delta` returned: uint8, at an address that 8 divides.
        room: As in `encode_delta`.

    Raises:
        CallError: If it is a delta of another array, or damaged. Part of it may have been applied. On a GPU nobody
            looks: nothing is written outside of ``target``.
    """
    bits = _bits(target)
    if is_on_gpu(bits):
        from zerort.codec import changes_cuda

        changes_cuda.apply_payload(bits, payload, is_delta=True, room=room)
        return
    if payload.size < HEADER_NBYTES:
        raise CallError(f"Expected a delta of at least {HEADER_NBYTES} bytes, got {payload.size}. It is damaged.")
    way, itemsize, numel, count = _HEADER.unpack(payload[:HEADER_NBYTES].tobytes())
    if (itemsize, numel) != (bits.itemsize, bits.size):
        raise CallError(
            f"Expected a delta of {bits.size} elements of {bits.itemsize} bytes, got one of {numel} elements of "
            f"{itemsize} bytes. It belongs to another array."
        )
    if way not in (_GAPS, _BITMAP, _ALL) or count > numel or HEADER_NBYTES + count * itemsize > payload.size:
        raise CallError(f"Expected {count} values in the delta, got {payload.size} bytes. It is damaged.")
    values, positions = _parts(payload, count, itemsize)
    if way == _ALL and (count != numel or positions.size):
        raise CallError(f"Expected all {numel} values in the delta, got {count}. It is damaged.")
    if way == _ALL:
        bits[:] = values
    else:
        try:
            native.apply_changes(bits, positions, values, bitmap=way == _BITMAP)
        except ValueError as error:
            raise CallError(str(error)) from None


def _parts(payload: Array, count: int, itemsize: int) -> tuple[Array, Array]:
    """Return a payload's values and positions."""
    end = HEADER_NBYTES + count * itemsize
    return payload[HEADER_NBYTES:end].view(f"u{itemsize}"), payload[end:]


def _bits(array: Any) -> Any:
    return array.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array
