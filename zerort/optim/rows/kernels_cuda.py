"""Rows of tables over CuPy arrays: what `kernels.py` has for the host, for a GPU.

Numbers of rows, ages and what updates do by age are arrays of the host, and are copied to the GPU for each call, on the
current stream like everything here: nothing waits. Rows that are brought up to date have the host's bits, and so have
sums of two summands and those in the order of their values; of three and more in the order given, they are within
rounding of the host's. The source is `kernels_cuda.cu`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from zerort.device.cuda.kernel_module import KernelModule
from zerort.device.cuda.library import cupy
from zerort.native.scalars import adamw_scalars
from zerort.typing import Array

__all__ = [
    "OPTIONS",
    "ROW_BLOCK",
    "SOURCE",
    "TEMPLATES",
    "adamw_rows_",
    "empty",
    "late_adamw_",
    "late_lion_",
    "late_sgd_",
    "put_rows",
    "sum_rows",
    "sum_rows_by_value",
    "take_rows",
]

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--fmad=false", "--ftz=false", "--std=c++17")
"""What NVRTC is told: as for the kernels of dense updates."""

ROW_BLOCK: Final = 1 << 19
"""Elements that are copied out, computed with and copied back at once: enough for a GPU, and bounded memory."""

_THREADS: Final = 256
_WARP: Final = 32
_WORDS: Final = {2: "Bits16", 4: "Bits32", 8: "Bits64"}
_FLOATS: Final = {"float32": "float", "float64": "double"}

TEMPLATES = (
    *(f"{name}<{word}>" for name in ("take_rows", "put_rows") for word in _WORDS.values()),
    *(
        f"{name}<{kind}>"
        for name in ("sum_rows", "adamw_rows", "late_adamw", "late_sgd", "late_lion")
        for kind in _FLOATS.values()
    ),
)
"""The kernels."""

_MODULE = KernelModule(SOURCE, OPTIONS, TEMPLATES)


def empty(numel: int, dtype: np.dtype[Any]) -> Any:
    """Return memory for some elements, from CuPy's pool."""
    return cupy.empty(numel * dtype.itemsize, np.uint8).view(dtype)


def take_rows(out: Any, table: Any, rows: Array, width: int) -> None:
    """Copy rows of a table; see `zerort.native.take_rows`. ``rows`` are an array of the host."""
    _check_rows(table, rows, width)
    _launch(f"take_rows<{_WORDS[table.itemsize]}>", out.size, out, table, _there(rows), np.int64(width))


def put_rows(table: Any, values: Any, rows: Array, width: int) -> None:
    """Write rows of a table; see `zerort.native.put_rows`. ``rows`` are an array of the host."""
    _check_rows(table, rows, width)
    _launch(f"put_rows<{_WORDS[table.itemsize]}>", values.size, table, values, _there(rows), np.int64(width))


def sum_rows(values: Any, order: Array, starts: Array) -> Any:
    """Return sums of rows; see `kernels.sum_rows`."""
    return _summed(values, order, starts, by_value=False)


def sum_rows_by_value(values: Any, order: Array, starts: Array) -> Any:
    """Return sums of rows, the smallest first; see `kernels.sum_rows_by_value`."""
    return _summed(values, order, starts, by_value=True)


def _summed(values: Any, order: Array, starts: Array, *, by_value: bool) -> Any:
    width = values.shape[1]
    out = empty(starts.size * width, values.dtype)
    cuts = np.append(starts, order.size)
    arguments = (out, values, _there(order), _there(cuts), np.int64(width), np.int32(by_value))
    _launch(f"sum_rows<{_FLOATS[values.dtype.name]}>", out.size, *arguments)
    return out.reshape(-1, width)


def adamw_rows_(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    rows: Array,
    *,
    width: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Make one step of AdamW over some rows; see `zerort.native.adamw_rows_`. ``rows`` are an array of the host."""
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    _check_rows(param, rows, width)
    rounded = map(param.dtype.type, scalars)
    arguments = (param, grad, exp_avg, exp_avg_sq, _there(rows), np.int64(width), *rounded)
    _launch(f"adamw_rows<{_FLOATS[param.dtype.name]}>", grad.size, *arguments)


def late_adamw_(
    param: Any,
    mean: Any,
    square: Any,
    ages: Array,
    *,
    decays: Array,
    means: Array,
    squares: Array,
    terms: Array,
    updates: Array,
    eps: float,
    error: float,
) -> None:
    """Make up for missed updates of AdamW; see `kernels.late_adamw_`."""
    rows, width = param.shape
    numbers = _there(np.concatenate([decays, means, squares, terms.reshape(-1), updates.reshape(-1)]))
    arguments = (param, mean, square, np.int64(width), _there(ages), numbers, np.int64(decays.size))
    how = (np.float64(eps), np.float64(error))
    _launch(f"late_adamw<{_FLOATS[param.dtype.name]}>", rows, *arguments, *how, threads=rows * _WARP)


def late_sgd_(param: Any, running: Any, ages: Array, *, matrix: Array) -> None:
    """Make up for missed updates of SGD; see `kernels.late_sgd_`."""
    buffer = np.uint64(0) if running is None else running
    arguments = (buffer, np.int64(param.shape[1]), _there(ages), _there(matrix.reshape(-1)), np.int64(matrix.shape[2]))
    _launch(f"late_sgd<{_FLOATS[param.dtype.name]}>", param.size, param, *arguments)


def late_lion_(param: Any, mean: Any, ages: Array, *, decays: Array, moved: Array, means: Array) -> None:
    """Make up for missed updates of Lion; see `kernels.late_lion_`."""
    numbers = _there(np.concatenate([decays, moved, means]))
    arguments = (param, mean, np.int64(param.shape[1]), _there(ages), numbers, np.int64(decays.size))
    how = (np.int32(means[1] > 0.5), np.finfo(param.dtype).tiny)
    _launch(f"late_lion<{_FLOATS[param.dtype.name]}>", param.size, *arguments, *how)


def _there(numbers: Array) -> Any:
    """Return a copy of numbers of the host on the GPU, for what is launched next; they are the caller's again."""
    return cupy.asarray(np.ascontiguousarray(numbers))


def _check_rows(table: Any, rows: Array, width: int) -> None:
    """Refuse rows that are not there: a kernel would write into other memory."""
    last = table.size // width - 1
    if rows.size and not (rows.min() >= 0 and rows.max() <= last):
        raise ValueError(f"Expected rows from 0 to {last}, got {rows.min()} to {rows.max()}.")


def _launch(name: str, numel: int, *arguments: Any, threads: int | None = None) -> None:
    """Queue a kernel over ``numel`` elements, or rows, on the current stream."""
    if numel:
        blocks = -(-(numel if threads is None else threads) // _THREADS)
        _MODULE.get_function(name)((blocks,), (_THREADS,), (np.int64(numel), *arguments))
