"""CRC-32C (Castagnoli): the checksum of everything that zerort stores.

One checksum covers a range, and `crc32c_combine` puts those of neighbouring ranges together, so that threads and ranks
can each sum up their own part. Imports the siblings of this folder only.
"""

from __future__ import annotations

import numpy as np

from zerort.native import reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = ["crc32c", "crc32c_combine", "crc32c_grains"]

_LARGEST = 0xFFFFFFFF


def crc32c(data: bytes | bytearray | memoryview | Array, value: int = 0) -> int:
    """Return the CRC-32C of a contiguous buffer or array of any dtype and shape.

    Args:
        data: The bytes.
        value: The checksum of what came before, to go on from there.

    Returns:
        The checksum of all of it, from 0 to 2**32 - 1.

    Raises:
        ValueError: If `data` is not a contiguous buffer, or `value` no checksum.
    """
    _check_value("value", value)
    if kernels is not None:
        result: int | None = kernels.crc32c(data, value)
        if result is not None:
            return result
    _check_buffer(data)
    use_numpy_form()
    return reference.crc32c(data, value)


def crc32c_grains(data: Array, grain: int, *, copy_out: Array | None = None) -> Array:
    """Return the CRC-32C of every ``grain`` bytes of an array, and of the rest: one call, however many there are.

    Args:
        data: Contiguous, of any dtype.
        grain: Bytes that one checksum covers.
        copy_out: Where to copy the bytes on the way, while they are in the cache: uint8, at least as long.

    Raises:
        ValueError: If an array is not contiguous, ``copy_out`` is too short, or ``grain`` is not above 0.
    """
    if grain <= 0:
        raise ValueError(f"Expected a grain of at least one byte, got {grain}.")
    _check_buffer(data)
    octets = reference.bytes_of(data)
    if copy_out is not None and copy_out.nbytes < octets.nbytes:
        raise ValueError(f"Expected copy_out to hold {octets.nbytes} bytes, got {copy_out.nbytes}.")
    sums = np.empty(-(-octets.size // grain), np.uint32)
    if kernels is not None and kernels.crc32c_grains(octets, grain, sums, copy_out):
        return sums
    use_numpy_form()
    return reference.crc32c_grains(octets, grain, copy_out)


def crc32c_combine(a: int, b: int, length_of_b: int) -> int:
    """Return the CRC-32C of A followed by B, from the checksums of both.

    Args:
        a: Checksum of A.
        b: Checksum of B, taken on its own.
        length_of_b: Length of B in bytes.

    Raises:
        ValueError: If `a` or `b` is no checksum, or the length is negative.
    """
    _check_value("a", a)
    _check_value("b", b)
    if not 0 <= length_of_b < 1 << 63:
        raise ValueError(f"Expected length_of_b of 0 to 2**63 - 1, got {length_of_b}. Pass B's length in bytes.")
    if kernels is not None:
        return int(kernels.crc32c_combine(a, b, length_of_b))
    use_numpy_form()
    return reference.crc32c_combine(a, b, length_of_b)


def _check_value(name: str, value: int) -> None:
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"Expected {name} from 0 to 2**32 - 1, got {value}. Pass what crc32c returned, or 0 to start.")


def _check_buffer(data: object) -> None:
    try:
        reference.bytes_of(data)
    except (TypeError, ValueError, BufferError) as error:
        raise ValueError(
            f"Expected data to be a contiguous buffer or array, got {type(data).__name__} ({error}). "
            "Pass bytes, or numpy.ascontiguousarray(data)."
        ) from None
