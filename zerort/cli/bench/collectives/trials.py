"""`Trial`: one collective on given arrays: fill them, run it, count what is wrong.

[Note: the pattern]
Element i of rank r is ``(i + 17 r) mod 61 + r mod 3``. 61 is prime, so a block that lands at another place, or comes
from another rank, differs nearly everywhere; the values are small whole numbers, so sums are exact, and every result is
compared bit by bit. Of 16-bit floats, which hold few whole numbers, the remainders are summed that all ranks together
can: then sums are exact in any order, wherever they are rounded on their way between hosts. What a result must
overwrite is scrubbed first.

[Note: the error of a sum]
16-bit floats that fill their mantissa have sums that must be rounded, and libraries differ in how often they do so.
`Trial.error` sums such numbers, ``1 + k / 2**bits``, and compares with the exact sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zerort.cli.bench.collectives.operations import HALVES, Expected, Operation
from zerort.comm import Group, SharedShards
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["Pattern", "RoundedPattern", "Trial", "mpi_datatype", "mpi_trials", "our_trials", "shared_trial"]

_PERIOD = 61
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
_MPICH_BFLOAT16 = 0x4C00024C  # MPIX_BFLOAT16 of MPICH 5's mpi.h, for which mpi4py 4.1 has no name
_SCRUB = 0xA5  # makes no small whole number of any type wider than a byte


class Pattern:
    """What the ranks' arrays hold, and what sums of them must be.

    Args:
        dtype: Of the elements, by name.
        size: How many ranks there are.
    """

    def __init__(self, dtype: str, size: int) -> None:
        self._kind = numpy_dtype(dtype)
        steps = np.arange(_PERIOD, dtype=np.int64)
        self._rows = [(steps + 17 * rank) % _PERIOD + rank % 3 for rank in range(size)]
        if dtype in HALVES:
            largest = 2 ** (_MANTISSA_BITS[dtype] + 1) // size
            self._rows = [
                row % (largest + 1) if largest else (row % _PERIOD == 0).astype(np.int64) for row in self._rows
            ]
        self._sum = np.sum(self._rows, axis=0)

    def fill(self, array: Array, rank: int) -> None:
        """Write rank's pattern from its first position on."""
        period = self._period(rank, 0)
        whole = array.size // _PERIOD * _PERIOD
        array[:whole].reshape(-1, _PERIOD)[:] = period
        array[whole:] = period[: array.size - whole]

    def wrong(self, array: Array, expected: list[Expected]) -> int:
        """Count the elements that differ from what is expected."""
        found = 0
        for first, count, rank, position in expected:
            period = _bits(self._period(rank, position))
            for rows in _periods(array[first : first + count]):
                found += int(np.count_nonzero(rows != period[: rows.shape[1]]))
        return found

    def _period(self, rank: int | None, position: int) -> Array:
        values = np.roll(self._sum if rank is None else self._rows[rank], -(position % _PERIOD))
        # Through fp32, from which NumPy has a way to bf16; integers wrap around.
        return values.astype(np.float32).astype(self._kind) if self._kind.kind in "fV" else values.astype(self._kind)


class RoundedPattern(Pattern):
    """16-bit floats that fill their mantissa, so that sums of them must be rounded.

    Args:
        dtype: Of the elements, by name: one of `HALVES`.
        size: How many ranks there are.
    """

    def __init__(self, dtype: str, size: int) -> None:
        super().__init__(dtype, size)
        self._mantissa = 2 ** _MANTISSA_BITS[dtype]
        self._rows = [1 + 37 * row % self._mantissa / self._mantissa for row in self._rows]
        self._sum = np.sum(self._rows, axis=0)  # exact: float64 has bits to spare

    def error(self, array: Array, expected: list[Expected]) -> float:
        """Return the largest distance from the exact sums, in units of the last place: 0.5 if rounded once."""
        largest = 0.0
        for first, count, _, position in expected:
            exact = np.roll(self._sum, -(position % _PERIOD))
            unit = 2.0 ** np.floor(np.log2(exact)) / self._mantissa
            for rows in _periods(array[first : first + count]):
                width = rows.shape[1]
                for bits in (rows.min(0), rows.max(0)):  # ordered as positive floats are
                    distance = np.abs(bits.view(self._kind).astype(np.float64) - exact[:width]) / unit[:width]
                    largest = max(largest, float(np.nan_to_num(distance, nan=np.inf).max()))
        return largest


class Trial(NamedTuple):
    """One way to run one collective."""

    run: Callable[[], object]
    """Runs it once and waits for its end."""
    check: Callable[[], int]
    """Fills the arrays anew, runs it once, and counts this rank's wrong elements."""
    error: Callable[[], float] | None = None
    """For sums of 16-bit floats: the same with a `RoundedPattern`; the error of this rank's result, in last places."""


def our_trials(
    group: Group, operation: Operation, full: Array, other: Array, pattern: Pattern, *, new: bool = False
) -> dict[str, Trial]:
    """Return our collective out of place and, where it can be, in place.

    Args:
        group: Whose collective.
        operation: Which.
        full: 1-D, this rank's array of the full size; the source, and in place also the out.
        other: A second one like it.
        pattern: What to fill in.
        new: Leave the result to the collective: no out is given, and nothing is done in place.
    """
    verb = getattr(group, operation.name)

    def call(source: Array, out: Array) -> object:
        return verb(source, out=out).wait()

    mine = _mine(full, group)
    source = full[: mine.size] if operation.source_is_share else full
    out = other[: mine.size] if operation.out_is_share else other
    if new:
        return {"out": _trial(lambda: verb(source).wait(), operation, source, out, pattern, group)}
    trials = {"out": _trial(lambda: call(source, out), operation, source, out, pattern, group)}
    if operation.moved_in_place is not None:
        from_mine = mine if operation.source_is_share else full
        into_mine = mine if operation.out_is_share else full
        trials["in"] = _trial(lambda: call(from_mine, into_mine), operation, from_mine, into_mine, pattern, group)
    return trials


def shared_trial(group: Group, operation: Operation, shards: SharedShards, pattern: Pattern) -> Trial:
    """Return the gather of an array of which the node holds one copy."""
    full, mine = shards

    def run() -> object:
        return group.all_gather(mine, out=full).wait()

    def check() -> int:
        group.barrier().wait()  # nobody may still read what is about to be scrubbed
        _scrub(mine)
        pattern.fill(mine, group.rank)
        run()
        return pattern.wrong(full, operation.expects(group.rank, group.size, mine.size))

    return Trial(run, check)


def mpi_trials(
    mpi: Any, group: Group, operation: Operation, full: Array, other: Array, pattern: Pattern
) -> dict[str, Trial]:
    """Return the MPI library's own, out of place and in place where it has that; none for what it cannot reduce."""
    kind = None
    if full.dtype.name in HALVES:
        kind = mpi_datatype(mpi, full.dtype.name) if operation.reduces else mpi.UINT16_T  # moving needs bytes only
        if kind is None:
            return {}

    def seen(array: Array) -> Any:
        return array if kind is None else [_bits(array), kind]

    comm, share = mpi.COMM_WORLD, full.size // group.size
    source = full[:share] if operation.source_is_share else full
    out = other[:share] if operation.out_is_share else other
    trials = {}
    if operation.mpi is not None:
        run, between = operation.mpi, (seen(source), seen(out))
        trials["mpi"] = _trial(lambda: run(mpi, comm, *between), operation, source, out, pattern, group)
    if operation.mpi_in_place is not None:
        run_in_place, within = operation.mpi_in_place, seen(full)
        from_mine = _mine(full, group) if operation.source_is_share else full
        into = full[:share] if operation.out_is_share else full  # MPI leaves a scattered sum at the front
        trials["mpi in"] = _trial(lambda: run_in_place(mpi, comm, within), operation, from_mine, into, pattern, group)
    return trials


def mpi_datatype(mpi: Any, dtype: str) -> Any | None:
    """Return MPI's datatype that sums a 16-bit float; None if this library has none, or mpi4py cannot reach it."""
    kind = {"float16": mpi.FLOAT16_T, "bfloat16": mpi.BFLOAT16_T}[dtype]
    if kind != mpi.DATATYPE_NULL:
        return kind
    vendor, version = mpi.get_vendor()
    if dtype == "bfloat16" and vendor == "MPICH" and version >= (5,):
        kind = mpi.Datatype.fromhandle(_MPICH_BFLOAT16)
        return kind if kind.Get_name() == "MPIX_BFLOAT16" else None
    return None


def _trial(
    run: Callable[[], object], operation: Operation, source: Array, out: Array, pattern: Pattern, group: Group
) -> Trial:
    share = min(source.size, out.size) // (1 if operation.source_is_share or operation.out_is_share else group.size)
    expected = operation.expects(group.rank, group.size, share)

    def run_on(filled: Pattern) -> Array:
        _scrub(out)
        filled.fill(source, group.rank)
        made = run()
        return made if isinstance(made, np.ndarray) else out

    def check() -> int:
        return pattern.wrong(run_on(pattern), expected)

    dtype = source.dtype.name
    if not operation.reduces or dtype not in HALVES:
        return Trial(run, check)
    rounded = RoundedPattern(dtype, group.size)
    return Trial(run, check, lambda: rounded.error(run_on(rounded), expected))


def _mine(full: Array, group: Group) -> Array:
    share = full.size // group.size
    return full[group.rank * share : (group.rank + 1) * share]


def _scrub(array: Array) -> None:
    array.view(np.uint8)[:] = _SCRUB


def _bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def _periods(array: Array) -> Iterator[Array]:
    """Yield the bits of an array as rows of a period each, then those that are left as a shorter row."""
    bits, whole = _bits(array), array.size // _PERIOD * _PERIOD
    if whole:
        yield bits[:whole].reshape(-1, _PERIOD)
    if whole < array.size:
        yield bits[whole:].reshape(1, -1)
