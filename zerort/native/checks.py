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

__all__ = [
    "check_add",
    "check_cast",
    "check_copy",
    "check_copy_checked",
    "check_float",
    "check_optimizer",
    "check_reduce",
    "check_reduction",
    "check_square_sums",
    "check_touch",
    "extent",
]

_ALL = tuple(native_dtypes())
_FLOATS = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
UPDATES = {FLOAT32: ((FLOAT32, BFLOAT16, FLOAT16), (BFLOAT16, FLOAT16)), FLOAT64: ((FLOAT64,), ())}
"""What the fused optimizers take with each dtype of parameter and state: (gradients, copies of the new parameter)."""
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


def check_optimizer(param: Any, grad: Any, copy_out: Any, **states: Any) -> None:
    """Raise unless a fused optimizer can work on these; `states` are its arrays by name."""
    _check_array("param", param, tuple(UPDATES), writable=True)
    grads, copies = UPDATES[param.dtype]
    _check_array("grad", grad, grads, numel=param.size)
    for name, state in states.items():
        _check_array(name, state, (param.dtype,), numel=param.size, writable=True)
    named: dict[str, Array] = {"param": param, "grad": grad, **states}
    if copy_out is not None:
        if not copies:
            raise ValueError(
                f"Expected no copy_out with parameters of {param.dtype.name}, got one. Cast them yourself."
            )
        _check_array("copy_out", copy_out, copies, numel=param.size, writable=True)
        # Element i of the gradient is read before element i of the copy is written.
        if not _same_memory(grad, copy_out):
            named["copy_out"] = copy_out
    names = list(named)
    for i, a in enumerate(names):
        for b in names[:i]:
            if _overlap(named[a], named[b]):
                raise ValueError(f"Expected {a} and {b} apart, got ranges that overlap. Give each memory of its own.")
