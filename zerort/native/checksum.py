"""CRC-32C (Castagnoli): the checksum of everything that zerort stores.

One checksum covers a range, and `crc32c_combine` puts those of neighbouring ranges together, so that threads and ranks
can each sum up their own part. Imports the siblings of this folder only.
"""

from __future__ import annotations

from zerort.native import reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = ["crc32c", "crc32c_combine"]

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
