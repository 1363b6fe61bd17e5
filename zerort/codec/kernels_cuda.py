"""The formats of codes over CuPy arrays: what `zerort.native` has for the host, with its bits.

Unlike the host's, kernels take float16 and bfloat16 as they are: no room for float32 besides. They are queued on the
current stream and return at once. The source is `kernels_cuda.cu`, compiled by NVRTC when first used
(`device.cuda.kernel_module`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerort.device.cuda.kernel_module import KernelModule
from zerort.device.cuda.library import cupy
from zerort.errors import CallError
from zerort.native.reference.blocks import BLOCKS, code_nbytes
from zerort.native.reference.largest import largest_count

__all__ = [
    "OPTIONS",
    "SOURCE",
    "cast_into",
    "decode_blocks",
    "decode_rows",
    "encode_blocks",
    "encode_largest",
    "narrow_with_residual",
    "sum_largest",
    "sum_payloads",
]

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--fmad=false", "--ftz=false", "--std=c++17")
"""As for the optimizers: each operation rounds once, and subnormals stay."""

_THREADS = 256
_WARP = 32
_LARGEST_BLOCK = 1024
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 3}
_MODULE = KernelModule(SOURCE, OPTIONS)


def encode_blocks(
    source: Any,
    scales: Any,
    codes: Any,
    *,
    bits: int,
    start: int = 0,
    keys: tuple[int, int] | None = None,
    residual: Any = None,
    base: Any = None,
) -> None:
    """Write a scale for each block of ``source`` and a code for each element; see `zerort.native.encode_blocks`.

    With a ``residual``, bfloat16 and as many elements, it is of ``source + residual``, and what codes lose of that is
    written there (`SummandFormat.encode_with_feedback`). With a ``base``, of the dtype of ``source`` and as long, it is
    of ``source - base``.
    """
    _check_blocks("source", source, scales, codes, bits, start)
    key0, key1 = keys if keys is not None else (0, 0)
    rounding = (np.int32(keys is not None), np.uint32(key0), np.uint32(key1))
    arguments = (
        source,
        _dtype(source),
        scales,
        codes,
        np.int32(bits),
        np.uint64(start),
        *rounding,
        _pointer(residual, source.size),
        _pointer(base, source.size, dtype=source.dtype.name),
    )
    _launch("encode_blocks", source.size, *arguments, threads=_WARP * -(-source.size // BLOCKS[bits]))


def decode_blocks(out: Any, scales: Any, codes: Any, *, bits: int, adds: bool = False) -> None:
    """Write the values of codes to ``out``, or add them to it; see `zerort.native.decode_blocks`."""
    _check_blocks("out", out, scales, codes, bits, 0)
    arguments = (out, _dtype(out), scales, codes, np.int32(bits), np.int32(adds))
    _launch("decode_blocks", out.size, *arguments, threads=out.size)


def decode_rows(out: Any, rows: Any, *, bits: int) -> None:
    """Write the values of rows to ``out``, whose last one may have more than it takes; see `BlockRows`.

    Args:
        out: float32, float16 or bfloat16.
        rows: As many as it takes: uint8, of which the first begins at a multiple of 4 bytes, or 2 for codes of 4 bits.
        bits: 8 or 4.
    """
    _check_values("out", out)
    _check("rows", rows, "uint8", rows.size)
    _launch("decode_rows", out.size, out, _dtype(out), rows, np.int32(bits), threads=out.size)


def narrow_with_residual(out: Any, source: Any, residual: Any) -> None:
    """Write ``source + residual`` as bfloat16, and what that loses into ``residual``, bfloat16 too."""
    _check_values("source", source)
    _check("out", out, "bfloat16", source.size)
    lost = _pointer(residual, source.size)
    _launch("narrow_with_residual", out.size, out, source, _dtype(source), lost, threads=out.size)


def sum_payloads(out: Any, payloads: Sequence[Any], *, bits: int) -> None:
    """Write the sum of what payloads hold, in order and in float32, to ``out``, rounded once.

    Args:
        out: float32, float16 or bfloat16.
        payloads: At least one, all as long and at equal distances: uint8.
        bits: Of their codes: 8, 4 or 16.

    Raises:
        CallError: They lie otherwise.
    """
    _check_values("out", out)
    _launch("sum_payloads", out.size, out, _dtype(out), *_strided(payloads), np.int32(bits), threads=out.size)


def encode_largest(source: Any, payload: Any, *, block: int, keep: int, residual: Any = None) -> None:
    """Write the ``keep`` largest elements of each block of ``source``, which are cast to bfloat16, and where they are.

    Args:
        source: float32, float16 or bfloat16.
        payload: uint8: positions of all blocks, then values (`LargestFormat`).
        block: Elements of a block: 1,024.
        keep: How many of them.
        residual: float32, as many elements: it is of ``source + residual``, and what is not sent is written there.
    """
    _check_values("source", source)
    count = _largest_count(source.size, block, keep)
    _check("payload", payload, "uint8", 4 * count)
    words = payload.view(np.uint16)
    lost = _pointer(residual, source.size, dtype="float32")
    arguments = (source, _dtype(source), words, words[count:], np.int32(keep), lost)
    _launch("encode_largest", source.size, *arguments, threads=_WARP * -(-source.size // block))


def sum_largest(out: Any, payloads: Sequence[Any], *, block: int, keep: int) -> None:
    """Write the sum of what payloads of `encode_largest` hold to ``out``; as in `sum_payloads`."""
    _check_values("out", out)
    _check("a payload", payloads[0], "uint8", 4 * _largest_count(out.size, block, keep))
    arguments = (out, _dtype(out), *_strided(payloads), np.int32(keep))
    _launch("sum_largest", out.size, *arguments, threads=_THREADS * -(-out.size // block))


def _largest_count(numel: int, block: int, keep: int) -> int:
    if block != _LARGEST_BLOCK:
        raise CallError(f"Expected blocks of {_LARGEST_BLOCK} elements on GPUs, got {block}.")
    return largest_count(numel, block=block, keep=keep)


def _strided(payloads: Sequence[Any]) -> tuple[Any, np.int64, np.int32]:
    """Return the first of several payloads for a kernel, their distance, and how many there are."""
    first = payloads[0]
    places = [one.data.ptr for one in payloads]
    stride = places[1] - places[0] if len(places) > 1 else 0
    if places != [places[0] + number * stride for number in range(len(places))]:
        raise CallError("Expected payloads at equal distances, got others. Let every sender send as much.")
    for one in payloads:
        _check("a payload", one, "uint8", first.size)
    return first, np.int64(stride), np.int32(len(payloads))


def cast_into(out: Any, source: Any) -> None:
    """Convert float32 to bfloat16 or float16, to nearest even, or back; see `zerort.native.cast_into`."""
    names = (out.dtype.name, source.dtype.name)
    if not {*names} <= _DTYPES.keys() or "float32" not in names:
        raise CallError(f"Expected float32 and bfloat16 or float16, got {names[1]} to {names[0]}. Convert it first.")
    _check("out", out, names[0], source.size)
    _check("source", source, names[1], source.size)
    _launch("cast_values", out.size, out, _dtype(out), source, _dtype(source), threads=out.size)


def _pointer(beside: Any, numel: int, *, dtype: str = "bfloat16") -> Any:
    """Return an array that lies beside a source for a kernel, or a null pointer."""
    if beside is None:
        return np.uintp(0)
    _check("what lies beside source", beside, dtype, numel)
    return beside


def _dtype(array: Any) -> np.int32:
    return np.int32(_DTYPES[array.dtype.name])


def _launch(name: str, numel: int, *arguments: Any, threads: int) -> None:
    if numel:
        _MODULE.get_function(name)((-(-threads // _THREADS),), (_THREADS,), (np.int64(numel), *arguments))


def _check_blocks(name: str, array: Any, scales: Any, codes: Any, bits: int, start: int) -> None:
    if bits not in BLOCKS:
        raise CallError(f"Expected bits of 8 or 4, got {bits!r}. Use one of these.")
    if start % BLOCKS[bits]:
        raise CallError(
            f"Expected start to be a multiple of a block, {BLOCKS[bits]} elements, got {start}. Cut arrays between "
            "blocks."
        )
    _check_values(name, array)
    _check("scales", scales, "float32" if bits == 8 else "uint16", -(-array.size // BLOCKS[bits]))
    _check("codes", codes, "int8" if bits == 8 else "uint8", code_nbytes(bits, array.size))


def _check_values(name: str, array: Any) -> None:
    """Refuse arrays that codes are neither made of nor decoded to."""
    name_of_dtype = getattr(getattr(array, "dtype", None), "name", "")
    _check(name, array, name_of_dtype if name_of_dtype in _DTYPES else "float32", array.size)


def _check(name: str, array: Any, dtype: str, numel: int) -> None:
    if not isinstance(array, cupy.ndarray):
        raise CallError(
            f"Expected {name} to be a CuPy array like the others, got {type(array).__name__}. Copy it to the GPU first."
        )
    if array.dtype.name != dtype or array.shape != (numel,) or not array.flags.c_contiguous:
        raise CallError(
            f"Expected {name} of {numel} elements of {dtype}, 1-D and contiguous, got {array.dtype.name} of shape "
            f"{array.shape}."
        )
