"""What a collective's arguments must be, and the cure when they are not.

Each function takes what the user gave and fills a `Call`, or raises `CallError`. They look at this rank's arguments
only; whether the ranks fit together is found out when they meet.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from zerort.comm import geometry
from zerort.comm.arrays import Tensors, address_of_any, is_writeable
from zerort.comm.geometry import Counts
from zerort.comm.guard.call import Call
from zerort.errors import CallError
from zerort.native.dtypes import DTYPE_CODES, REDUCTION_CODES, numpy_dtype
from zerort.typing import Array, type_name

__all__ = [
    "Given",
    "check_counts",
    "check_dtype",
    "check_name",
    "check_numel",
    "fill_all_gather",
    "fill_all_reduce",
    "fill_all_to_all",
    "fill_barrier",
    "fill_broadcast",
    "fill_reduce",
    "fill_reduce_scatter",
    "fill_split",
    "fill_tensors",
]


class Given(NamedTuple):
    """What a user gave to a collective."""

    source: Any
    out: Any
    counts: Any = None
    root: int = -1
    reduction: str = ""


def fill_split(call: Call, rank: int, size: int, given: Given) -> None:
    """A color for this rank, or none, and its place among those of the same color."""
    color, key = given.source, given.out
    for what, value in (("color", 0 if color is None else color), ("key", key)):
        if not isinstance(value, (int, np.integer)) or not -(2**31) < value < 2**31 or (what == "color" and value < 0):
            raise CallError(
                f"split: Expected a {what} that is a whole number{' ≥ 0, or None' if what == 'color' else ''}, "
                f"got {value!r}."
            )


def fill_tensors(
    call: Call,
    rank: int,
    size: int,
    given: Given,
    *,
    fill: Callable[[Call, int, int, Given], None],
    tensors: Tensors,
) -> None:
    """What ``fill`` does, with a framework's tensors: an array takes part as it is, and a new result is a tensor."""
    source, out = (
        one if one is None or isinstance(one, np.ndarray) else tensors.to_array(one)
        for one in (given.source, given.out)
    )
    fill(call, rank, size, given._replace(source=source, out=out))
    if call.result is not None:
        call.result = tensors.from_array(call.result) if given.out is None else given.out


def fill_barrier(call: Call, rank: int, size: int, given: Given) -> None:
    """Nothing to check, and no result."""
    call.delivers = False


def fill_all_gather(call: Call, rank: int, size: int, given: Given) -> None:
    """Every rank's source, side by side, in every rank's out."""
    source, out, counts, _, _ = given
    flat = _source(call, source)
    if counts is None:
        shares = (flat.size,) * size
        call.numel = flat.size
    else:
        shares = check_counts(call, counts, size)
        call.numel = sum(shares)
        if flat.size != shares[rank]:
            raise CallError(
                f"{call.op}: Expected a source of counts[{rank}] = {shares[rank]} elements, got {flat.size}."
            )
    call.geometry = geometry.of_all_gather(shares, rank)
    _result(call, out, sum(shares), in_place=call.geometry.places[rank])


def fill_reduce_scatter(call: Call, rank: int, size: int, given: Given) -> None:
    """The reduction of every rank's source, cut into one range per rank."""
    source, out, counts, _, reduction = given
    flat = _source(call, source)
    _reduction(call, reduction)
    if counts is None:
        share, rest = divmod(flat.size, size)
        if rest:
            raise CallError(
                f"{call.op}: Expected a source that {size} ranks can share evenly, got {flat.size} elements. "
                f"Say who gets what with counts=, e.g. Partition.build({flat.size}, {size}).counts."
            )
        shares = (share,) * size
    else:
        shares = check_counts(call, counts, size)
        if flat.size != sum(shares):
            raise CallError(f"{call.op}: Expected a source of sum(counts) = {sum(shares)} elements, got {flat.size}.")
    call.numel = flat.size
    call.geometry = geometry.of_reduce_scatter(shares, rank)
    _result(call, out, shares[rank], in_place=-call.geometry.takes[rank][0])


def fill_all_reduce(call: Call, rank: int, size: int, given: Given) -> None:
    """The reduction of every rank's source, in every rank's out."""
    source, out, _, _, reduction = given
    flat = _source(call, source)
    _reduction(call, reduction)
    call.numel = flat.size
    _result(call, out, flat.size, in_place=0, like=source)


def fill_broadcast(call: Call, rank: int, size: int, given: Given) -> None:
    """Root's source, in every rank's out."""
    source, out, _, root, _ = given
    flat = _source(call, source)
    _root(call, root, size)
    call.numel = flat.size
    call.geometry = geometry.of_all_gather(_only(root, flat.size, size), rank)
    _result(call, out, flat.size, in_place=0)


def fill_reduce(call: Call, rank: int, size: int, given: Given) -> None:
    """The reduction of every rank's source, in root's out."""
    source, out, _, root, reduction = given
    flat = _source(call, source)
    _reduction(call, reduction)
    _root(call, root, size)
    call.numel = flat.size
    shares = _only(root, flat.size, size)
    call.geometry = geometry.of_reduce_scatter(shares, rank)
    if rank == root:
        _result(call, out, flat.size, in_place=0, like=source)
    else:
        # Only root gets a result; an out on another rank is left alone, so that all ranks can make the same call.
        call.out, call.delivers = np.empty(0, flat.dtype), False


def fill_all_to_all(call: Call, rank: int, size: int, given: Given) -> None:
    """What every rank holds for this one, side by side."""
    source, out, counts, _, _ = given
    flat = _source(call, source)
    if counts is None:
        share, rest = divmod(flat.size, size)
        if rest:
            raise CallError(
                f"{call.op}: Expected a source that splits into {size} equal parts, got {flat.size} elements. "
                "Give counts= as a matrix: counts[s][d] elements go from rank s to rank d."
            )
        matrix: tuple[Counts, ...] = ((share,) * size,) * size
        call.numel = flat.size
    else:
        rows = _sequence(call, counts)
        if len(rows) != size:
            raise CallError(f"{call.op}: Expected counts with a row for each of {size} ranks, got {len(rows)} rows.")
        matrix = tuple(check_counts(call, row, size, keep=False) for row in rows)
        call.counts = matrix
        call.numel = sum(map(sum, matrix))
        if flat.size != sum(matrix[rank]):
            raise CallError(
                f"{call.op}: Expected a source of sum(counts[{rank}]) = {sum(matrix[rank])} elements, got {flat.size}."
            )
    call.geometry = geometry.of_all_to_all(matrix, rank)
    _result(call, out, sum(row[rank] for row in matrix), in_place=None)


def _source(call: Call, array: Any) -> Array:
    call.source = flat = _flat(call, array, "source")
    call.where = "" if call.device is None or isinstance(flat, np.ndarray) else call.device.mark
    call.source_address = address_of_any(flat)
    call.nbytes = flat.nbytes
    call.dtype = _dtype_name(flat.dtype)
    return flat


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which NumPy composes anew each time, in 2 µs


def _result(call: Call, out: Any, numel: int, *, in_place: int | None, like: Any = None) -> None:
    """Check ``out``, or make one.

    Args:
        call: Gets ``out`` and ``result``.
        out: What the user gave.
        numel: Elements that the result has.
        in_place: How many elements behind ``out`` the source may start, if they share memory; None if they may not.
        like: Whose shape a new array gets; 1-D if None.
    """
    source = cast(Array, call.source)
    if out is None:
        device = call.device if call.where else None
        call.out = np.empty(numel, source.dtype) if device is None else device.empty(numel, source.dtype)
        call.out_address = address_of_any(call.out)
        call.nbytes = max(call.nbytes, call.out.nbytes)
        call.result = call.out if like is None else call.out.reshape(like.shape)
        return
    flat = _flat(call, out, "out")
    if isinstance(flat, np.ndarray) != isinstance(source, np.ndarray):
        raise CallError(
            f"{call.op}: Expected a {type_name(source)} as out, like the source, got a {type_name(flat)}. Copy it."
        )
    if not is_writeable(flat):
        raise CallError(f"{call.op}: Expected an out that can be written to, got a read-only array. Pass a copy.")
    if flat.dtype != source.dtype:
        raise CallError(f"{call.op}: Expected an out of dtype {source.dtype} like the source, got {flat.dtype}.")
    if flat.size != numel:
        raise CallError(f"{call.op}: Expected an out of {numel} elements, got {flat.size}.")
    here, there = address_of_any(flat), call.source_address
    if here < there + source.nbytes and there < here + flat.nbytes:
        shift = (there - here) // source.itemsize
        if shift != in_place:
            raise CallError(
                f"{call.op}: Expected source and out to share no memory"
                + ("" if in_place is None else f", or source to start {in_place} elements behind out (in place)")
                + f", got {shift} elements. Pass a copy as source, or another out."
            )
    call.out, call.out_address, call.result = flat, here, out
    call.nbytes = max(call.nbytes, flat.nbytes)


def _flat(call: Call, array: Any, what: str) -> Array:
    op, device = call.op, call.device
    if not isinstance(array, np.ndarray) and (device is None or not device.owns(array)):
        other = "" if device is None else f" or a {device.title}"
        raise CallError(
            f"{op}: Expected a numpy.ndarray{other} as {what}, got {type_name(array)}. "
            "Convert it without a copy: np.from_dlpack(x), or np.asarray(x)."
        )
    if not array.flags.c_contiguous:
        raise CallError(
            f"{op}: Expected a contiguous {what}, got strides {array.strides} for shape {array.shape}. "
            "Pass np.ascontiguousarray(x)."
        )
    if array.dtype.hasobject:
        raise CallError(f"{op}: Expected a {what} of numbers, got dtype {array.dtype}.")
    if not array.dtype.isnative or (isinstance(array, np.ndarray) and not array.flags.aligned):
        fault = "unaligned" if array.dtype.isnative else f"of foreign byte order ({array.dtype.str})"
        raise CallError(f"{op}: Expected a {what} as this machine computes with it, got one {fault}. Pass a copy.")
    flat: Array = array if array.ndim == 1 else array.reshape(-1)
    return flat


def _reduction(call: Call, reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in REDUCTION_CODES:
        raise CallError(f"{call.op}: Expected a reduction of {', '.join(REDUCTION_CODES)}, got {reduction!r}.")
    if call.dtype not in DTYPE_CODES:
        raise CallError(
            f"{call.op}: Expected a dtype that can be reduced ({', '.join(DTYPE_CODES)}), got {call.dtype}. "
            "Cast it first."
        )
    call.reduction = reduction


def _root(call: Call, root: int, size: int) -> None:
    if not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise CallError(f"{call.op}: Expected a root from 0 to {size - 1}, got {root!r}.")
    call.root = int(root)


def check_name(call: Call, name: Any) -> None:
    """Refuse a name that is no text."""
    if not isinstance(name, str):
        call.name = ""
        raise CallError(f"{call.op}: Expected a name that is text, got {name!r}.")


def check_dtype(call: Call, dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` as NumPy's."""
    try:
        return numpy_dtype(dtype)
    except TypeError:
        raise CallError(f"{call.op}: Expected a dtype, got {dtype!r}.") from None


def check_numel(call: Call, numel: Any) -> None:
    """Refuse what is no number of elements."""
    if not isinstance(numel, (int, np.integer)) or numel < 0:
        raise CallError(f"{call.op}: Expected numel to be a whole number ≥ 0, got {numel!r}.")


def check_counts(call: Call, counts: Any, size: int, *, keep: bool = True) -> Counts:
    """Return ``counts`` as whole numbers, one per rank; ``keep`` makes them part of what the ranks must agree on."""
    try:
        shares = tuple(map(operator.index, _sequence(call, counts)))
    except TypeError:
        raise CallError(f"{call.op}: Expected whole numbers as counts, got {counts!r}.") from None
    if len(shares) != size or min(shares) < 0:
        raise CallError(f"{call.op}: Expected {size} counts ≥ 0, one per rank, got {shares}.")
    if keep:
        call.counts = shares
    return shares


def _sequence(call: Call, counts: Any) -> Sequence[Any]:
    try:
        return tuple(counts)
    except TypeError:
        raise CallError(f"{call.op}: Expected a sequence as counts, got {type(counts).__name__}.") from None


def _only(root: int, numel: int, size: int) -> Counts:
    return (0,) * root + (numel,) + (0,) * (size - root - 1)
