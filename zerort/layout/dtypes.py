"""Know how many bytes an element of each dtype takes, by the dtype's name.

Names, not NumPy types: a layout is written into checkpoints and compared between ranks and frameworks, and a string
means the same to all of them. The names are those of NumPy and ml_dtypes, so ``str(array.dtype)`` is always the key.
Imports only `zerort.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from zerort.errors import CallError

__all__ = ["ITEMSIZES", "itemsize"]

ITEMSIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)


def itemsize(dtype: str) -> int:
    """Return the size of one element, in bytes.

    Args:
        dtype: The dtype's name, such as ``"float32"``.

    Raises:
        CallError: If the name is not in `ITEMSIZES`.

    >>> itemsize("bfloat16")
    2
    """
    # The type is asked first: a numpy.dtype compares equal to its name, and would be let in or not by its hash.
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise CallError(
            f"Expected the name of a dtype out of {', '.join(ITEMSIZES)}; got {dtype!r}. "
            "For an array, pass str(array.dtype)."
        )
    return ITEMSIZES[dtype]
