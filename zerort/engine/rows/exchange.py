"""`RowExchange`: rows between ranks. Each row has one owner, and ascending rows are in the order of their owners.

    fetch     who asks ── rows ──> owners ── values ──> who asks      up to date
    sum       gradients ── rows, values ──> owners, who sum them      in an order that does not depend on the ranks
              with copies of the model: those of all copies, each owner the same

Both begin with how many rows go from each rank to each other; a rank that cannot go on says so there. A row travels
once from a rank to another, however often it is named. Numbers of rows travel between arrays of the host, values where
they lie: between GPUs over NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from zerort.comm import Group
from zerort.comm.agreed import Copies, agreed, passed_on, raise_together
from zerort.errors import StorageError
from zerort.optim.kernels import bucket_kernels_for, row_kernels_for
from zerort.typing import Array, Device

__all__ = ["RowExchange", "cast_rows", "coalesced", "summed_over_ranks", "taken_rows", "unique_rows"]


class RowExchange:
    """Moves rows of one table between the ranks that hold it.

    Args:
        group: The ranks.
        bounds: Where each rank's rows begin, and the end of the last.
        width: Elements of a row.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
        copies: The ranks that hold the same rows of other copies of the model; None: there is one.
        others: Other copies of the model, which have to hear of a failure, too; None: there is one.
    """

    def __init__(
        self,
        group: Group,
        bounds: Array,
        *,
        width: int,
        name: str,
        traffic: Counter[str],
        copies: Group | None = None,
        others: Copies | None = None,
    ) -> None:
        self._group = group
        self._copies, self._others = copies, others
        self._bounds = bounds
        self._width = width
        self._name = name[:50]
        self._traffic = traffic
        self._index = np.dtype(np.int32 if bounds[-1] <= np.iinfo(np.int32).max else np.int64)

    def fetch(
        self,
        rows: Array,
        values_of: Callable[[Array], Array],
        *,
        error: Exception | None = None,
        can_fail: bool = False,
    ) -> Array:
        """Return some rows, in the order given: new memory, which is nobody else's. Every rank calls this.

        Args:
            rows: Which, counted in the whole table: in any order, also twice. Ascending ones, each once, are neither
                sorted nor copied (`unique_rows`).
            values_of: Returns rows of this rank, counted from its first, as other ranks ask for them.
            error: What is wrong with this rank's: raised on every rank.
            can_fail: Whether ``values_of`` reads from a disk, which may refuse on one rank; the same on every rank.
        """
        wanted, places = unique_rows(rows)
        counts = self._counts(wanted, error)
        asked = self._travel(wanted.astype(self._index), counts, name=f"rows of {self._name}")
        mine: Array = wanted  # of no use to anybody if reading fails
        together = agreed(self._group, f"rows of {self._name}", catching=StorageError, others=self._others)
        with together if can_fail else nullcontext():
            mine = values_of(asked - self._first)
        found = self._travel(mine.reshape(-1), counts.T * self._width, name=f"rows of {self._name}")
        values = found.reshape(-1, self._width)
        return values if places is None else taken_rows(values, places, device=self._group.device)

    def fetch_all(self, values_of: Callable[[Array], Array], *, can_fail: bool) -> Array:
        """Return all rows, 1-D: new memory, which is nobody else's. Every rank calls this; see `fetch`."""
        mine: Array = self._bounds  # of no use to anybody if reading fails
        together = agreed(self._group, f"rows of {self._name}", catching=StorageError, others=self._others)
        with together if can_fail else nullcontext():
            mine = values_of(np.arange(self._bounds[self._group.rank + 1] - self._first))
        counts = np.diff(self._bounds) * self._width
        self._traffic["all_gather"] += int(counts.sum()) * mine.itemsize
        ticket = self._group.all_gather(mine.reshape(-1), counts=counts.tolist(), name=f"rows of {self._name}")
        found: Array = ticket.wait()  # not-gpu: copies of the model have no rows on GPUs
        return found

    def _counts(self, rows: Array, error: Exception | None) -> Array:
        """Return how many rows go from each rank to each owner, given this rank's, ascending; or raise on all ranks."""
        mine = np.append(np.diff(np.searchsorted(rows, self._bounds)), error is not None)
        # not-gpu: between arrays of the host
        told = self._group.all_gather(mine.astype(np.int64), name=f"rows of {self._name}").wait()
        told = told.reshape(self._group.size, -1)
        if told[:, -1].any():
            with passed_on(self._others):
                raise_together(self._group, error, name=f"rows of {self._name}")
        return told[:, :-1]

    def sum(self, rows: Array, values: Array, *, summed_in: np.dtype[Any]) -> tuple[Array, Array]:
        """Return the rows of this rank that some rank has values for, and their sums. Every rank calls this.

        Args:
            rows: This rank's, ascending, counted in the whole table.
            values: A row for each.
            summed_in: The dtype of the sums.

        Returns:
            Rows counted from this rank's first, ascending, each once, and a row of sums for each.
        """
        counts = self._counts(rows, None)
        came = self._travel(rows.astype(self._index), counts, name=f"gradient rows of {self._name}")
        summands = self._travel(values.reshape(-1), counts * self._width, name=f"gradient rows of {self._name}")
        if self._copies is not None:
            came, summands = self._of_copies(self._copies, came, summands)
        wide = cast_rows(summands.reshape(-1, self._width), summed_in, device=self._group.device)
        return summed_over_ranks(came - self._first, wide)

    def _of_copies(self, copies: Group, rows: Array, values: Array) -> tuple[Array, Array]:
        """Return what the owners of these rows have got in all copies of the model, the same on each.

        Not summed yet: so the sums have the bits of a mesh of any shape.
        """
        name = f"copies of {self._name}"
        counts = copies.all_gather(np.array([rows.size]), name=name).wait()  # not-gpu: between arrays of the host
        self._traffic["all_gather"] += int(counts.sum()) * (rows.itemsize + self._width * values.itemsize)
        every = copies.all_gather(rows, counts=counts.tolist(), name=name)
        summands = copies.all_gather(values, counts=(self._width * counts).tolist(), name=name)
        return every.wait(), summands.wait()  # not-gpu: copies of the model have no rows on GPUs

    @property
    def _first(self) -> int:
        return int(self._bounds[self._group.rank])

    def _travel(self, source: Array, counts: Array, *, name: str) -> Array:
        """Give each rank its part, and return what came; counts the bytes that a rank gets on average."""
        group = self._group
        if group.size == 1:
            return source
        self._traffic["all_to_all"] += int(counts.sum()) * source.itemsize // group.size
        numel = int(counts[:, group.rank].sum())
        on_host = isinstance(source, np.ndarray)
        out = np.empty(numel, source.dtype) if on_host else group.device.scratch(numel, source.dtype)
        ticket = group.all_to_all(source, out=out, counts=counts.tolist(), name=name)
        found: Array = group.device.order_after(ticket)  # gpu-wait: rows_come_before_what_is_computed_with_them
        return found


def taken_rows(values: Array, rows: Array, *, device: Device) -> Array:
    """Return some rows, in any order, also twice, in new memory of a device.

    Args:
        values: 2-D.
        rows: Which, int64, of the host.
        device: Of ``values``.
    """
    width = values.shape[1]
    out: Array = device.scratch(rows.size * width, values.dtype)
    row_kernels_for(values).take_rows(out, device.flat(values), rows, width)
    return out.reshape(-1, width)


def cast_rows(values: Array, dtype: np.dtype[Any], *, device: Device) -> Array:
    """Return rows in another dtype, infinite where it has no such number; themselves if they have it.

    Args:
        values: 2-D.
        dtype: The same, or float32 on one side.
        device: Of ``values``.
    """
    if values.dtype == dtype:
        return values
    out: Array = device.scratch(values.size, dtype)
    bucket_kernels_for(device).cast_into(out, device.flat(values))
    return out.reshape(values.shape)


def unique_rows(rows: Array) -> tuple[Array, Array | None]:
    """Return rows ascending, each once, and the place of each given one among them; None: they are given so.

    >>> unique_rows(np.array([5, 2, 5]))
    (array([2, 5]), array([1, 0, 1]))
    >>> unique_rows(np.array([2, 5]))
    (array([2, 5]), None)
    >>> unique_rows(np.array([5, 2], np.uint32))[0].tolist()
    [2, 5]
    """
    if (rows[1:] > rows[:-1]).all():  # differences of unsigned numbers would wrap around
        return rows, None
    wanted, places = np.unique(rows, return_inverse=True)
    return wanted, places.reshape(-1)


def coalesced(rows: Array, values: Array) -> tuple[Array, Array]:
    """Return rows ascending, each once, and the sums of their values, in the order in which they were given.

    >>> coalesced(np.array([5, 2, 5]), np.array([[1.0], [2.0], [3.0]]))
    (array([2, 5]), array([[2.],
           [4.]]))
    """
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = _starts(rows)
    return rows[starts], row_kernels_for(values).sum_rows(values, order, starts)


def summed_over_ranks(rows: Array, values: Array) -> tuple[Array, Array]:
    """Return the same as `coalesced`, with sums whose bits do not depend on which rank has sent which summand.

    Of three and more, the smallest is added first.

    Args:
        rows: As they came from one rank after the other; a rank's may come several times.
        values: A row for each.
    """
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = _starts(rows)
    return rows[starts], row_kernels_for(values).sum_rows_by_value(values, order, starts)


def _starts(rows: Array) -> Array:
    """Return where each row begins in a list of ascending ones."""
    return np.flatnonzero(np.diff(rows, prepend=-1)) if rows.size else np.zeros(0, np.int64)
