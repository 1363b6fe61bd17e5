"""Know how many bytes an element of each dtype takes and how parameters of it are trained, by the dtype's name.

Names, not NumPy types: a layout is written into checkpoints and compared between ranks and frameworks, and a string
means the same to all of them. The names are those of NumPy and ml_dtypes, so ``str(array.dtype)`` is always the key.
One table says how each is trained (decision 0062).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from zerort.errors import CallError

__all__ = ["ITEMSIZES", "TRAINABLE", "Training", "gradient_dtype", "itemsize"]

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


@dataclass(frozen=True, slots=True)
class Training:
    """How parameters of one dtype are trained."""

    updated_in: str
    """What the optimizer computes in and keeps its state in; if it is another dtype, there are master weights in it."""

    sums: Mapping[str, str]
    """What gradients are collected and summed in, by the ``gradient_dtype`` that is asked for."""


TRAINABLE: Final[Mapping[str, Training]] = MappingProxyType(
    {
        "float32": Training("float32", {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}),
        "bfloat16": Training("float32", {"bfloat16": "bfloat16", "float32": "float32"}),
        "float16": Training("float32", {"float16": "float16", "float32": "float32"}),
        # Beside others whose sums are asked for in float32, sums in float64 stay as they are.
        "float64": Training("float64", {"float64": "float64", "float32": "float64"}),
    }
)
"""Dtypes that optimizers can train."""


def gradient_dtype(dtype: str, wanted: str | None, *, over_nccl: bool = False, what: str | None = None) -> str:
    """Return what the gradients of trainable parameters are collected and summed in.

    The host sums float16 in float32 and rounds once. NCCL adds in the array's dtype, rank after rank: two gradients of
    40,000 are infinite there, though their mean is not.

    Args:
        dtype: Of the parameters.
        wanted: What is asked for; None: the parameters' dtype, but float32 where NCCL would sum float16.
        over_nccl: Whether NCCL sums them.
        what: The parameters, for the error.

    Raises:
        CallError: It cannot be had for this dtype.

    >>> gradient_dtype("bfloat16", None), gradient_dtype("bfloat16", "float32"), gradient_dtype("float64", "float32")
    ('bfloat16', 'float32', 'float64')
    """
    if wanted is None:
        return "float32" if over_nccl and dtype == "float16" else dtype
    sums = TRAINABLE[dtype].sums
    if wanted not in sums:
        raise CallError(
            f"Expected gradient_dtype to be {' or '.join(sums)} for {what or f'parameters of {dtype}'}, got {wanted}."
        )
    return sums[wanted]
