"""The fused optimizers, casts and measurements over CuPy arrays: what `zerort.native` has for the host, for a GPU.

    adamw_blocks_                         AdamW over moments in 8 bits
    adamw_ sgd_ lion_                     one pass over parameter, gradient and state; writes a half-precision copy too
    round_master split_master join_master master weights of 16-bit parameters
    cast_into copy_checked                float32 from or to float64, float16, bfloat16
    add_into                              a sum in the wider of two dtypes
    square_sums_into square_sum unscale_  the norm's parts; unscaled and checked in the same pass
    first_nonfinite look_for_nonfinite    where a NaN or an infinity stands; now, or the promise of it

**Bound.** All give the host's bits (decision 0043), except `square_sum`, which adds in another order: within 1e-12 of
it, relatively. Kernels are queued on the current stream and return at once; only `square_sum` and `first_nonfinite`,
which return numbers, wait. The source is `kernels_cuda.cu`, compiled by NVRTC when first used
(`device.cuda.kernel_module`).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import numpy as np

from zerort.device.cuda.kernel_module import KernelModule
from zerort.device.cuda.library import cupy
from zerort.errors import CallError
from zerort.native.dtypes import DTYPE_CODES
from zerort.native.reference.moments import MOMENT_BLOCK, moment_nbytes
from zerort.native.scalars import adamw_scalars, lion_scalars, sgd_scalars

__all__ = [
    "OPTIONS",
    "SOURCE",
    "SUM_BLOCK",
    "adamw_",
    "adamw_blocks_",
    "add_into",
    "cast_into",
    "check",
    "copy_checked",
    "first_nonfinite",
    "join_master",
    "lion_",
    "look_for_nonfinite",
    "round_master",
    "sgd_",
    "split_master",
    "square_sum",
    "square_sums_into",
    "unscale_",
]

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--fmad=false", "--ftz=false", "--std=c++17")
"""What NVRTC is told: a product fused with a sum rounds once, where the host rounds twice; and subnormals stay. CuPy
wants a standard."""

_THREADS = 256
_WARP = 32
_NOT_FOUND = np.iinfo(np.uint64).max
_FLOATS = ("float32", "float64", "float16", "bfloat16")


class _Update(NamedTuple):
    """What an optimizer takes with parameters and state of one dtype, as on the host."""

    computed_in: str
    state: str
    grads: tuple[str, ...]
    copies: tuple[str, ...]


_UPDATES = {
    "float32": _Update("float", "float32", ("float32", "bfloat16", "float16"), ("bfloat16", "float16")),
    "float64": _Update("double", "float64", ("float64",), ()),
    "uint16": _Update("float", "float32", ("float32", "bfloat16", "float16"), ("bfloat16",)),
}
TEMPLATES = tuple(f"{name}<{kind}>" for name in ("adamw", "sgd", "lion") for kind in ("float", "double"))
"""The kernels of the optimizers."""

_MODULE = KernelModule(SOURCE, OPTIONS, TEMPLATES)

SUM_BLOCK = 1024
"""Elements that are summed on the GPU where all are asked for: the host adds up the rest."""


def adamw_(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    copy_out: Any = None,
) -> None:
    """Make one step of AdamW; see `zerort.native.adamw_`."""
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    _check_optimizer(param, grad, copy_out, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    copy = (_pointer(copy_out), _code(copy_out))
    _optimize("adamw", param, grad, exp_avg, exp_avg_sq, *copy, scalars=scalars)


def adamw_blocks_(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    start: int,
    keys: tuple[tuple[int, int], tuple[int, int]],
    grad_scale: float = 1.0,
    copy_out: Any = None,
) -> None:
    """Make one step of AdamW over moments in blocks; see `zerort.native.adamw_blocks_`."""
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    if start % MOMENT_BLOCK:
        raise CallError(f"Expected start to be a multiple of a block, {MOMENT_BLOCK} elements, got {start}.")
    _check_optimizer(param, grad, copy_out)
    if param.dtype.name == "float64":
        raise CallError("Expected parameters in float32 with moments in blocks, got float64. Keep whole moments.")
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, payload in moments.items():
        _check(name, payload, ("uint8",), numel=moment_nbytes(param.size))
    _check_apart({"param": param, "grad": grad, **moments})
    halves = (_pointer(None), param) if param.dtype.name == "uint16" else (param, _pointer(None))
    rounding = (np.uint64(start), *(np.uint32(key) for pair in keys for key in pair))
    arguments = (*halves, grad, _code(grad), exp_avg, exp_avg_sq, _pointer(copy_out), _code(copy_out), *rounding)
    threads = _WARP * -(-param.size // MOMENT_BLOCK)
    _launch("adamw_blocks", param.size, *arguments, *map(np.float32, scalars), threads=threads)


def sgd_(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    grad_scale: float = 1.0,
    copy_out: Any = None,
) -> None:
    """Make one step of SGD; see `zerort.native.sgd_`."""
    scalars = sgd_scalars(lr, momentum, dampening, weight_decay, grad_scale, nesterov=nesterov)
    if momentum == 0.0:
        momentum_buffer = None
    elif momentum_buffer is None:
        raise CallError(f"Expected a momentum_buffer with momentum {momentum}, got None. Pass one, or momentum=0.")
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    _check_optimizer(param, grad, copy_out, **states)
    copy = (_pointer(copy_out), _code(copy_out))
    flags = (np.int32(first), np.int32(nesterov))
    _optimize("sgd", param, grad, _pointer(momentum_buffer), *copy, *flags, scalars=scalars)


def lion_(
    param: Any,
    grad: Any,
    exp_avg: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    copy_out: Any = None,
) -> None:
    """Make one step of Lion; see `zerort.native.lion_`."""
    scalars = lion_scalars(lr, beta1, beta2, weight_decay, grad_scale)
    _check_optimizer(param, grad, copy_out, exp_avg=exp_avg)
    copy = (_pointer(copy_out), _code(copy_out))
    _optimize("lion", param, grad, exp_avg, *copy, scalars=scalars)


def cast_into(out: Any, source: Any) -> None:
    """Convert ``source`` to ``out``'s dtype; see `zerort.native.cast_into`."""
    _check("out", out, _FLOATS)
    _check("source", source, _FLOATS, numel=out.size)
    names = {out.dtype.name, source.dtype.name}
    if len(names) > 1 and "float32" not in names:
        raise CallError(
            "Expected the same dtype, or float32 on one side and bfloat16, float16 or float64 on the other, "
            f"got {source.dtype.name} to {out.dtype.name}. Go by way of float32."
        )
    _check_apart({"out": out, "source": source})
    if len(names) == 1:
        out.data.copy_from_device_async(source.data, source.nbytes)
    else:
        _launch("cast", out.size, out, _code(out), source, _code(source))


def round_master(param: Any, master: Any) -> None:
    """Round float32 master weights to their parameters; see `zerort.native.round_master`."""
    if param.dtype.name == "float16":
        cast_into(param, master)
    else:
        _split(param, None, master)


def split_master(param: Any, remainder: Any, master: Any) -> None:
    """Write parameters and the 16 bits that they lack; see `zerort.native.split_master`."""
    _split(param, remainder, master)


def _split(param: Any, remainder: Any, master: Any) -> None:
    _check_master(param, remainder, master)
    _launch("split_master", master.size, param, _pointer(remainder), master)


def join_master(master: Any, param: Any, remainder: Any) -> None:
    """Write the master weights that both were made of; see `zerort.native.join_master`."""
    _check_master(param, remainder, master)
    _launch("join_master", master.size, master, param, remainder)


def copy_checked(out: Any, source: Any) -> None:
    """Copy or cast ``source`` into ``out``, and look at nothing: a number would have to be waited for."""
    cast_into(out, source)


def check(array: Any) -> None:
    """Look at nothing, for the same reason; see `look_for_nonfinite`."""


def add_into(out: Any, source: Any) -> None:
    """Add ``source`` to ``out``; see `zerort.native.add_into`."""
    _check("out", out, _FLOATS)
    _check("source", source, _FLOATS, numel=out.size)
    if source.dtype.itemsize > out.dtype.itemsize:
        raise CallError(
            f"Expected a source no wider than out, {out.dtype.name}, got {source.dtype.name}. Cast it first: cast_into."
        )
    _check_apart({"out": out, "source": source})
    _launch("add", out.size, out, _code(out), source, _code(source))


def square_sums_into(out: Any, array: Any, block: int) -> None:
    """Write the sum of squares of each block into ``out``; see `zerort.native.square_sums_into`."""
    _check("array", array, _FLOATS)
    _check("out", out, ("float64",), numel=_blocks(array, block))
    _measure(array, block, out, None)


def square_sum(array: Any) -> float:
    """Return the sum of the squares of all elements, computed in float64."""
    _check("array", array, _FLOATS)
    sums = cupy.empty(_blocks(array, SUM_BLOCK), np.float64)
    square_sums_into(sums, array, SUM_BLOCK)
    return float(sums.get().sum())


def unscale_(array: Any, scale: float, *, block: int = SUM_BLOCK) -> tuple[Any, Any]:
    """Multiply ``array`` by ``scale`` in place, and measure the result in the same pass.

    Returns:
        On the GPU, so that nothing waits: the sum of squares of each block (float64), and the index of the first
        element that is not finite (one uint64, its largest value if there is none).
    """
    _check("array", array, _FLOATS)
    sums = cupy.empty(_blocks(array, block), np.float64)
    return sums, _measure(array, block, sums, scale)


def first_nonfinite(array: Any) -> int:
    """Return the index of the first NaN or infinity, or -1 if all elements are finite."""
    return int(look_for_nonfinite(array))


def look_for_nonfinite(array: Any) -> SupportsInt:
    """Look for the first NaN or infinity; the number is there for whoever asks, and waits: ``int(promise)``."""
    _check("array", array, _FLOATS)
    return _Index(_measure(array, SUM_BLOCK, None, None))


class _Index:
    """Where something is on the GPU, or -1."""

    __slots__ = ("_at", "_found")

    def __init__(self, found: Any) -> None:
        self._found = found
        self._at: int | None = None

    def __int__(self) -> int:
        if self._at is None:
            found = int(self._found.get()[0])
            self._at = -1 if found == _NOT_FOUND else found
        return self._at


def _measure(array: Any, block: int, sums: Any, scale: float | None) -> Any:
    first = cupy.full(1, _NOT_FOUND, np.uint64)
    scaling = (np.int32(scale is not None), np.float64(1.0 if scale is None else scale))
    arguments = (array, _code(array), np.int64(block), *scaling, _pointer(sums), first)
    _launch("measure", array.size, *arguments, threads=_blocks(array, block) * _WARP)
    return first


def _optimize(name: str, param: Any, grad: Any, *arguments: Any, scalars: tuple[float, ...]) -> None:
    """Queue an optimizer's kernel for the parameter's dtype, which its scalars are rounded to."""
    row = _UPDATES[param.dtype.name]
    halves = (_pointer(None), param) if param.dtype.name == "uint16" else (param, _pointer(None))
    rounded = map(np.dtype(row.state).type, scalars)
    _launch(f"{name}<{row.computed_in}>", param.size, *halves, grad, _code(grad), *arguments, *rounded)


def _launch(name: str, numel: int, *arguments: Any, threads: int | None = None) -> None:
    """Queue a kernel over ``numel`` elements on the current stream."""
    wanted = numel if threads is None else threads
    if numel:
        blocks = -(-wanted // _THREADS)
        _MODULE.get_function(name)((blocks,), (_THREADS,), (np.int64(numel), *arguments))


def _blocks(array: Any, block: int) -> int:
    if type(block) is not int or block < 1:
        raise CallError(f"Expected block to be a number of elements of at least 1, got {block!r}.")
    count: int = -(-array.size // block)
    return count


def _code(array: Any) -> np.int32:
    return np.int32(0 if array is None else DTYPE_CODES[array.dtype.name])


def _pointer(array: Any) -> Any:
    return np.uint64(0) if array is None else array


def _check(name: str, array: Any, dtypes: tuple[str, ...], *, numel: int | None = None) -> None:
    if not isinstance(array, cupy.ndarray):
        raise CallError(
            f"Expected {name} to be a CuPy array like the others, got {type(array).__name__}. Copy it to the GPU first."
        )
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise CallError(f"Expected {name} to be 1-D and contiguous, got shape {array.shape}, strides {array.strides}.")
    if array.dtype.name not in dtypes:
        raise CallError(f"Expected {name} of dtype {', '.join(dtypes)}, got {array.dtype.name}. Convert it first.")
    if numel is not None and array.size != numel:
        raise CallError(f"Expected {name} of {numel} elements, got {array.size}.")


def _check_optimizer(param: Any, grad: Any, copy_out: Any, **states: Any) -> None:
    _check("param", param, tuple(_UPDATES))
    _, kept, grads, copies = _UPDATES[param.dtype.name]
    _check("grad", grad, grads, numel=param.size)
    for name, state in states.items():
        _check(name, state, (kept,), numel=param.size)
    is_remainder = param.dtype.name == "uint16"
    if is_remainder and copy_out is None:
        raise CallError("Expected copy_out, the bfloat16 half of the parameter, with a remainder, got None. Pass it.")
    named = {"param": param, "grad": grad, **states}
    if copy_out is not None:
        if not copies:
            raise CallError(f"Expected no copy_out with parameters of {param.dtype.name}, got one. Cast them yourself.")
        _check("copy_out", copy_out, copies, numel=param.size)
        # A thread reads its element of the gradient before it writes the copy's, which must be in the same place.
        if is_remainder or (copy_out.data.ptr, copy_out.nbytes) != (grad.data.ptr, grad.nbytes):
            named["copy_out"] = copy_out
    _check_apart(named)


def _check_master(param: Any, remainder: Any, master: Any) -> None:
    _check("master", master, ("float32",))
    _check("param", param, ("bfloat16",), numel=master.size)
    named = {"master": master, "param": param}
    if remainder is not None:
        _check("remainder", remainder, ("uint16",), numel=master.size)
        named["remainder"] = remainder
    _check_apart(named)


def _check_apart(named: dict[str, Any]) -> None:
    ranges = sorted((array.data.ptr, array.data.ptr + array.nbytes, name) for name, array in named.items())
    for (_, end, left), (start, _, right) in itertools.pairwise(ranges):
        if start < end:
            raise CallError(f"Expected {left} and {right} apart, got ranges that overlap. Give each memory of its own.")
