"""What a kernel takes, and what is said about anything else.

The NumPy forms are checked here on every call. Compiled kernels check for themselves, faster, and only refuse; the
facade then comes here to have it explained, so there is one set of messages: ``Expected X, got Y.`` and the cure.
Imports `dtypes` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerort.native.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, REDUCTION_CODES, Array, native_dtypes
from zerort.native.reference.blocks import BLOCKS, code_nbytes
from zerort.native.reference.largest import largest_count
from zerort.native.reference.moments import MOMENT_BLOCK, moment_nbytes

__all__ = [
    "check_add",
    "check_ages",
    "check_blocks",
    "check_cast",
    "check_changes",
    "check_copy",
    "check_copy_checked",
    "check_float",
    "check_late",
    "check_master",
    "check_moments",
    "check_optimizer",
    "check_planes",
    "check_positions",
    "check_reduce",
    "check_reduction",
    "check_rows",
    "check_square_sums",
    "check_touch",
    "extent",
]

_ALL = tuple(native_dtypes())
_FLOATS = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
_UINT16 = np.dtype(np.uint16)
UPDATES = {
    FLOAT32: (FLOAT32, (FLOAT32, BFLOAT16, FLOAT16), (BFLOAT16, FLOAT16)),
    FLOAT64: (FLOAT64, (FLOAT64,), ()),
    _UINT16: (FLOAT32, (FLOAT32, BFLOAT16, FLOAT16), (BFLOAT16,)),
}
"""What the fused optimizers take with each dtype of parameter: (state, gradients, copies of the new parameter). uint16
is the remainder of a float32 parameter whose other half is the copy."""
CASTS = frozenset({(FLOAT32, other) for other in (BFLOAT16, FLOAT16, FLOAT64)}) | frozenset(
    {(other, FLOAT32) for other in (BFLOAT16, FLOAT16, FLOAT64)}
)
"""Pairs (to, from) of different dtypes that `cast_into` converts."""
SUMS = frozenset({(FLOAT32, BFLOAT16), (FLOAT32, FLOAT16), (FLOAT64, BFLOAT16), (FLOAT64, FLOAT16), (FLOAT64, FLOAT32)})
"""Pairs (to, from) of different dtypes that `add_into` adds."""


def extent(array: Array) -> tuple[int, int]:
    """Return the first and one past the last address of a contiguous array."""
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def _overlap(a: Array, b: Array) -> bool:
    (start_a, end_a), (start_b, end_b) = extent(a), extent(b)
    return start_a < end_b and start_b < end_a


def _same_memory(a: Array, b: Array) -> bool:
    return extent(a) == extent(b)


def _check_contiguous(name: str, array: Any, *, writable: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise ValueError(
            f"Expected {name} to be a NumPy array, got {type(array).__name__}. Pass an array of host memory, "
            f"such as numpy.asarray({name}) gives."
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"Expected {name} to be contiguous, got strides {array.strides} for shape {array.shape}. "
            f"Pass numpy.ascontiguousarray({name}), or a slice without a step."
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"Expected {name} to be writable, got a read-only array. Pass an array that owns its memory.")


def _check_array(
    name: str,
    array: Any,
    dtypes: Sequence[np.dtype[Any]] = _ALL,
    *,
    numel: int | None = None,
    writable: bool = False,
) -> None:
    """Raise unless `array` is a 1-D contiguous array of one of `dtypes`, and of `numel` elements if that is given."""
    _check_contiguous(name, array, writable=writable)
    if array.ndim != 1:
        raise ValueError(f"Expected {name} to be 1-D, got shape {array.shape}. Pass {name}.reshape(-1).")
    if array.dtype not in dtypes:
        wanted = ", ".join(dtype.name for dtype in dtypes)
        got = array.dtype.name if array.dtype.isnative else f"byte-swapped {array.dtype.name}"
        raise ValueError(f"Expected {name} of dtype {wanted}, got {got}. Convert it with astype first.")
    if not array.flags.aligned:
        raise ValueError(
            f"Expected {name} to be aligned to its {array.itemsize}-byte elements, got address {extent(array)[0]:#x}. "
            f"Pass a copy, or start the buffer at a multiple of {array.itemsize} bytes."
        )
    if numel is not None and array.size != numel:
        raise ValueError(
            f"Expected {name} of {numel} elements, got {array.size}. All arrays of a call are of one length."
        )


def check_reduction(reduction: str) -> None:
    """Raise unless `reduction` is one that the kernels know."""
    if reduction not in REDUCTION_CODES:
        raise ValueError(f"Expected reduction {', '.join(REDUCTION_CODES)}, got {reduction!r}. Use one of these.")


def check_reduce(out: Any, sources: Any) -> None:
    """Raise unless `reduce_into` can work on these."""
    _check_array("out", out, writable=True)
    if not isinstance(sources, Sequence) or len(sources) == 0:
        got = "none" if isinstance(sources, Sequence) else type(sources).__name__
        raise ValueError(f"Expected sources to be a sequence of one or more arrays, got {got}. Pass a list of arrays.")
    for rank, source in enumerate(sources):
        name = f"sources[{rank}]"
        _check_array(name, source, (out.dtype,), numel=out.size)
        if _overlap(out, source) and not _same_memory(out, source):
            raise ValueError(
                f"Expected out to be {name} itself or apart from it, got ranges that overlap in part. "
                "Pass out= memory of its own."
            )


def check_cast(out: Any, source: Any) -> None:
    """Raise unless `cast_into` can work on these."""
    _check_array("out", out, writable=True)
    _check_array("source", source, numel=out.size)
    if out.dtype == source.dtype:
        return
    if (out.dtype, source.dtype) not in CASTS:
        raise ValueError(
            "Expected the same dtype, or float32 on one side and bfloat16, float16 or float64 on the other, "
            f"got {source.dtype.name} to {out.dtype.name}. Go by way of float32."
        )
    _check_apart(out, source)


def _check_apart(out: Array, source: Array) -> None:
    if _overlap(out, source):
        raise ValueError("Expected out and source apart, got ranges that overlap. Pass out= memory of its own.")


def check_copy(out: Any, source: Any) -> None:
    """Raise unless `copy_into` can work on these."""
    _check_array("out", out, writable=True)
    _check_array("source", source, (out.dtype,), numel=out.size)


def check_copy_checked(out: Any, source: Any) -> None:
    """Raise unless `copy_checked` can work on these."""
    _check_array("out", out, _FLOATS, writable=True)
    check_cast(out, source)
    _check_apart(out, source)


def check_add(out: Any, source: Any) -> None:
    """Raise unless `add_into` can work on these."""
    _check_array("out", out, _FLOATS, writable=True)
    _check_array("source", source, _FLOATS, numel=out.size)
    if out.dtype != source.dtype and (out.dtype, source.dtype) not in SUMS:
        raise ValueError(
            f"Expected a source of out's dtype or of lower precision, got {source.dtype.name} to add to "
            f"{out.dtype.name}. Accumulate in {source.dtype.name}, or cast the source first."
        )
    if not _same_memory(out, source):
        _check_apart(out, source)


def check_float(array: Any) -> None:
    """Raise unless `first_nonfinite` and `square_sum` can work on this."""
    _check_array("array", array, _FLOATS)


def check_square_sums(out: Any, array: Any, block: Any) -> None:
    """Raise unless `square_sums_into` can work on these."""
    check_float(array)
    if type(block) is not int or block < 1:
        raise ValueError(
            f"Expected block to be a number of elements of at least 1, got {block!r}. Use array.size for one."
        )
    _check_array("out", out, (FLOAT64,), writable=True)
    if out.size != -(-array.size // block):
        raise ValueError(
            f"Expected out of {-(-array.size // block)} elements, one for each block of {block} out of {array.size}, "
            f"got {out.size}. Pass numpy.empty(-(-array.size // block))."
        )
    _check_apart(out, array)


def check_touch(array: Any) -> None:
    """Raise unless `touch` can work on this."""
    _check_contiguous("array", array, writable=True)


def check_rows(values: Any, table: Any, rows: Any, width: Any, *, takes: bool) -> None:
    """Raise unless `take_rows` or `put_rows` can work on these."""
    _check_array("table", table, writable=not takes)
    _check_array("rows", rows, (np.dtype(np.int64),))
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"Expected a width of 1 or more, got {width!r}.")
    _check_array("values", values, (table.dtype,), numel=rows.size * width, writable=takes)
    last = table.size // width - 1
    if rows.size and not (rows.min() >= 0 and rows.max() <= last):
        raise ValueError(f"Expected rows from 0 to {last}, got {rows.min()} to {rows.max()}.")
    _check_all_apart({"values": values, "table": table})


def check_late(param: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
    """Raise unless `late_adamw_` and `adamw_rows_` can work on these."""
    _check_array("param", param, (FLOAT32, FLOAT64), writable=True)
    for name, state in {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        _check_array(name, state, (param.dtype,), numel=param.size, writable=True)
    _check_all_apart({"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


def check_ages(param: Any, ages: Any, *numbers: Any) -> None:
    """Raise unless `late_adamw_` can bring rows of these ages up to date; `numbers` are by age, the terms last."""
    _check_array("ages", ages, (np.dtype(np.int64),))
    if (param.size % ages.size if ages.size else param.size) != 0:
        raise ValueError(f"Expected rows of one width, got {param.size} elements for {ages.size} ages.")
    kept = numbers[0].size
    for name, one, count in zip(("decays", "means", "squares", "terms"), numbers, (1, 1, 1, 7), strict=True):
        _check_array(name, one, (FLOAT64,), numel=count * kept)
    if ages.size and not (ages.min() >= 0 and ages.max() < kept):
        raise ValueError(f"Expected ages from 0 to {kept - 1}, got {ages.min()} to {ages.max()}.")


def check_optimizer(param: Any, grad: Any, copy_out: Any, **states: Any) -> None:
    """Raise unless a fused optimizer can work on these; `states` are its arrays by name."""
    _check_array("param", param, tuple(UPDATES), writable=True)
    kept, grads, copies = UPDATES[param.dtype]
    _check_array("grad", grad, grads, numel=param.size)
    for name, state in states.items():
        _check_array(name, state, (kept,), numel=param.size, writable=True)
    is_remainder = param.dtype == _UINT16
    if is_remainder and copy_out is None:
        raise ValueError("Expected copy_out, the bfloat16 half of the parameter, with a remainder, got None. Pass it.")
    named: dict[str, Array] = {"param": param, "grad": grad, **states}
    if copy_out is not None:
        if not copies:
            raise ValueError(
                f"Expected no copy_out with parameters of {param.dtype.name}, got one. Cast them yourself."
            )
        _check_array("copy_out", copy_out, copies, numel=param.size, writable=True)
        # Element i of the gradient is read before element i of the copy is written.
        if is_remainder or not _same_memory(grad, copy_out):
            named["copy_out"] = copy_out
    _check_all_apart(named)


def check_master(param: Any, remainder: Any, master: Any, *, splits: bool) -> None:
    """Raise unless `round_master`, `split_master` or `join_master` can work on these."""
    _check_array("master", master, (FLOAT32,), writable=not splits)
    _check_array("param", param, (BFLOAT16,), numel=master.size, writable=splits)
    named = {"master": master, "param": param}
    if remainder is not None:
        _check_array("remainder", remainder, (_UINT16,), numel=master.size, writable=splits)
        named["remainder"] = remainder
    _check_all_apart(named)


def check_moments(name: str, array: Any, payload: Any, start: Any, *, encodes: bool) -> None:
    """Raise unless `encode_moments` or `decode_moments` can work on these; `name` is that of the float32 array."""
    if type(start) is not int or not 0 <= start < 1 << 63 or start % MOMENT_BLOCK:
        raise ValueError(
            f"Expected start to be a multiple of a block, {MOMENT_BLOCK} elements, got {start!r}. Cut arrays between "
            "blocks."
        )
    _check_array(name, array, (FLOAT32,), writable=not encodes)
    _check_array("payload", payload, (np.dtype(np.uint8),), numel=moment_nbytes(array.size), writable=encodes)
    if extent(payload)[0] % 4:
        raise ValueError("Expected payload at a multiple of 4 bytes, got another place. Cut payloads between blocks.")
    _check_apart(array, payload)


def check_blocks(
    name: str, array: Any, scales: Any, codes: Any, bits: Any, start: Any, *, encodes: bool, base: Any = None
) -> None:
    """Raise unless `encode_blocks` or `decode_blocks` can work on these; `name` is that of the float32 array."""
    if bits not in BLOCKS:
        raise ValueError(f"Expected bits of 8 or 4, got {bits!r}. Use one of these.")
    block = BLOCKS[bits]
    if type(start) is not int or not 0 <= start < 1 << 63 or start % block:
        raise ValueError(
            f"Expected start to be a multiple of a block, {block} elements, got {start!r}. Cut arrays between blocks."
        )
    _check_array(name, array, (FLOAT32,), writable=not encodes)
    scale, code = (FLOAT32, np.dtype(np.int8)) if bits == 8 else (np.dtype(np.uint16), np.dtype(np.uint8))
    _check_array("scales", scales, (scale,), numel=-(-array.size // block), writable=encodes)
    _check_array("codes", codes, (code,), numel=code_nbytes(bits, array.size), writable=encodes)
    _check_all_apart({name: array, "scales": scales, "codes": codes})
    if base is not None:
        _check_array("base", base, (FLOAT32,), numel=array.size, writable=False)
        _check_all_apart({"base": base, "scales": scales, "codes": codes})


def check_largest(source: Any, positions: Any, block: Any, keep: Any) -> None:
    """Raise unless `find_largest` can work on these."""
    if type(block) is not int or type(keep) is not int or not 1 <= keep <= block <= 1 << 16:
        raise ValueError(
            f"Expected keep from 1 to block, and that at most 65,536, got keep={keep!r} and block={block!r}."
        )
    _check_array("source", source, (FLOAT32,), writable=False)
    numel = largest_count(source.size, block=block, keep=keep)
    _check_array("positions", positions, (np.dtype(np.uint16),), numel=numel, writable=True)
    _check_apart(positions, source)


_UNSIGNED = tuple(np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))


def check_changes(**arrays: Any) -> None:
    """Raise unless these are arrays of bits, of one dtype and length."""
    first = next(iter(arrays.values()))
    for name, array in arrays.items():
        _check_array(name, array, _UNSIGNED if array is first else (first.dtype,))
        _check_array(name, array, numel=first.size)


def check_positions(array: Any, positions: Any, values: Any, *, bitmap: bool = False) -> None:
    """Raise unless these can be the positions and values of changes in ``array``."""
    _check_array("positions", positions, (np.dtype(np.uint8),), numel=-(-array.size // 8) if bitmap else None)
    _check_array("values", values, (array.dtype,))


def check_planes(planes: Any, elements: Any) -> None:
    """Raise unless these are elements and their planes."""
    _check_array("elements", elements)
    _check_array("planes", planes, (np.dtype(np.uint8),), numel=elements.nbytes)
    _check_apart(planes, elements)


def _check_all_apart(named: dict[str, Array]) -> None:
    names = list(named)
    for i, a in enumerate(names):
        for b in names[:i]:
            if _overlap(named[a], named[b]):
                raise ValueError(f"Expected {a} and {b} apart, got ranges that overlap. Give each memory of its own.")
