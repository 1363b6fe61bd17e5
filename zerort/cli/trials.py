"""`Trial`: one collective on given arrays: fill them, run it, count what is wrong.

[Note: the pattern]
Element i of rank r is ``(i + 17 r) mod 61 + r mod 3``. 61 is prime, so a block that lands at another place, or comes
from another rank, differs nearly everywhere; the values are small whole numbers, so sums are exact before they are
rounded once, and every result is compared bit by bit. What a result must overwrite is scrubbed first. May import: comm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zerort.cli.operations import HALVES, Expected, Operation
from zerort.comm import Group, SharedShards
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["Pattern", "Trial", "mpi_trials", "our_trials", "shared_trial"]

_PERIOD = 61
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
            bits = _bits(array[first : first + count])
            period = _bits(self._period(rank, position))
            whole = count // _PERIOD * _PERIOD
            found += int(np.count_nonzero(bits[:whole].reshape(-1, _PERIOD) != period))
            found += int(np.count_nonzero(bits[whole:] != period[: count - whole]))
        return found

    def _period(self, rank: int | None, position: int) -> Array:
        values = np.roll(self._sum if rank is None else self._rows[rank], -(position % _PERIOD))
        # Half precision is summed in fp32 and rounded once; integers wrap around.
        return values.astype(np.float32).astype(self._kind) if self._kind.kind in "fV" else values.astype(self._kind)


class Trial(NamedTuple):
    """One way to run one collective."""

    run: Callable[[], object]
    """Runs it once and waits for its end."""
    check: Callable[[], int]
    """Fills the arrays anew, runs it once, and counts this rank's wrong elements."""


def our_trials(group: Group, operation: Operation, full: Array, other: Array, pattern: Pattern) -> dict[str, Trial]:
    """Return our collective out of place and, where it can be, in place.

    Args:
        group: Whose collective.
        operation: Which.
        full: 1-D, this rank's array of the full size; the source, and in place also the out.
        other: A second one like it.
        pattern: What to fill in.
    """
    verb = getattr(group, operation.name)

    def call(source: Array, out: Array) -> object:
        return verb(source, out=out).wait()

    mine = _mine(full, group)
    source = full[: mine.size] if operation.source_is_share else full
    out = other[: mine.size] if operation.out_is_share else other
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
    if operation.reduces and full.dtype.name in HALVES:
        return {}
    comm, share = mpi.COMM_WORLD, full.size // group.size
    source = full[:share] if operation.source_is_share else full
    out = other[:share] if operation.out_is_share else other
    # Moving needs bytes only, and MPI has never heard of bfloat16.
    seen: Callable[[Array], Array] = _bits if full.dtype.name in HALVES else lambda array: array
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


def _trial(
    run: Callable[[], object], operation: Operation, source: Array, out: Array, pattern: Pattern, group: Group
) -> Trial:
    share = min(source.size, out.size) // (1 if operation.source_is_share or operation.out_is_share else group.size)
    expected = operation.expects(group.rank, group.size, share)

    def check() -> int:
        _scrub(out)
        pattern.fill(source, group.rank)
        run()
        return pattern.wrong(out, expected)

    return Trial(run, check)


def _mine(full: Array, group: Group) -> Array:
    share = full.size // group.size
    return full[group.rank * share : (group.rank + 1) * share]


def _scrub(array: Array) -> None:
    array.view(np.uint8)[:] = _SCRUB


def _bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")
