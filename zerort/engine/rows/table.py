"""`RowTable`: this rank's rows of a table, when each was last up to date, and their update.

    touched   ─┬─ 17 ─┬─ 17 ─┬─ 3 ─┬─ 12 ─┬─ …      the update that each row is up to date with
               └ row 0 ┘                            now = 17: row 2 has missed 14 updates

An update costs what its rows cost, and a thousandth of the table: that much is brought up to date in turn with every
update, so that no row is ever older than the numbers that are kept for it (decision 0155). Which rows is decided by
their numbers in the whole table, whatever the ranks (decision 0172). Where every step has a digest, rows miss nothing:
all of them are updated, by the kernels of dense tables and with their bits (decision 0185).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.rows.memory import RowsInMemory
from zerort.engine.rows.stored import StoredRows
from zerort.layout import Partition
from zerort.optim.kernels import row_kernels_for
from zerort.optim.late import MOST_MISSED, LateUpdates
from zerort.typing import Array

__all__ = ["RowTable", "row_bounds", "touched_nbytes"]

_NEIGHBOURS: Final = 16
"""Rows that are brought up to date together, needed or not, at least: one after the other where they lie."""

_STRETCHES: Final = 64
"""Stretches of a long table that an update brings up to date, at least: some for every rank, long ones for disks."""


def neighbours_of(rows: int) -> int:
    """Return how many rows are brought up to date together: by the table's length alone, whatever the ranks.

    >>> neighbours_of(1_000), neighbours_of(4_000_000)
    (16, 32)
    """
    most = max(rows // (_STRETCHES * MOST_MISSED), 1)
    return max(_NEIGHBOURS, 1 << (most.bit_length() - 1))


def row_bounds(partition: Partition, shape: tuple[int, ...]) -> Array:
    """Return where each rank's rows begin, and the end of the last: cuts are between rows.

    >>> row_bounds(Partition.of_counts((6, 9, 49)), (7, 3))
    array([0, 2, 5, 7])
    """
    rows, width = shape
    bounds: Array = np.minimum(np.array([*partition.offsets, partition.numel]) // width, rows)
    return bounds


def touched_nbytes(rows: int) -> int:
    """Return the bytes that are kept for when some rows were last up to date."""
    return rows * np.dtype(np.int32).itemsize


class RowTable:
    """This rank's rows of a table.

    Args:
        shape: Of the whole table: rows and width.
        partition: Which rank holds which elements.
        rank: This one.
        where: Where this rank's rows are, and how they are changed there.
        late: What makes up for updates that rows have missed; None: nothing does (``lazy=True``), or none is missed.
        updates_all: Whether rows without a gradient are updated, too, with a gradient of zeros.
        now: Updates that ``late`` has counted.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        partition: Partition,
        rank: int,
        *,
        where: RowsInMemory | StoredRows,
        late: LateUpdates | None,
        updates_all: bool = False,
        now: int = 0,
    ) -> None:
        self.rows, self.width = shape
        self.bounds = row_bounds(partition, shape)
        """Where each rank's rows begin, and the end of the last."""
        self.first, last = (int(self.bounds[at]) for at in (rank, rank + 1))
        self.count = last - self.first
        """Rows of this rank."""
        self.where = where
        """Where this rank's rows are."""
        self._updates_all = updates_all
        self.late = late
        """What makes up for updates that rows have missed; the same on every rank."""
        self.now = now
        """Updates that it has counted."""
        self.touched = np.full(0 if late is None else self.count, now, np.int32)
        """The update that each row of this rank is up to date with; empty if rows miss none, or stay as they are."""

    @property
    def touched_column(self) -> ChunkedArray:
        """`touched` as an array that can move to other ranks, which hold rows by `partition`."""
        return ChunkedArray("touched", (0, self.touched.size), self.touched)

    @property
    def partition(self) -> Partition:
        """Which rank holds which rows."""
        return Partition.of_counts(tuple(int(count) for count in np.diff(self.bounds)))

    @property
    def nbytes(self) -> int:
        """Bytes that are kept to bring rows up to date."""
        return self.touched.nbytes + (0 if self.late is None else self.late.nbytes)

    def _ages(self, rows: Array) -> Array | None:
        """Return how many updates each of some rows has missed; None: rows miss none, or stay as they are."""
        return None if self.late is None else (self.now - self.touched[rows]).astype(np.int64)

    def values(self, rows: Array) -> Array:
        """Return some rows, up to date, in new memory: counted from this rank's first, in any order, also twice."""
        rows = rows.astype(np.int64, copy=False)
        ages = self._ages(rows)
        if ages is not None and self.where.in_place:
            late = np.sort(rows[ages != 0])
            self.catch_up(late[np.diff(late, prepend=-1) != 0])
            ages = None
        return self.where.take(rows, late=self.late, ages=ages)

    def catch_up(self, rows: Array | None = None) -> None:
        """Bring rows up to date, given each once, ascending; None: all of this rank's."""
        if self.late is None:
            return
        late = np.flatnonzero(self.touched != self.now) if rows is None else rows[self.touched[rows] != self.now]
        self.where.change(late, late=self.late, ages=self._ages(late))
        self.touched[late] = self.now

    def restart(self) -> None:
        """Count from here on: all rows are up to date, on every rank, whatever each has counted."""
        self.now = 0
        self.touched[:] = 0

    def update_(self, rows: Array, gradients: Array, *, lr: float, step: int, grad_scale: float) -> None:
        """Update some rows; the others miss this update, or are brought up to date with it.

        Args:
            rows: Counted from this rank's first, ascending, each once.
            gradients: A row for each.
            lr: Learning rate of this update.
            step: How many updates the table has had, this one included.
            grad_scale: Gradients are multiplied by it first.
        """
        rows = rows.astype(np.int64, copy=False)
        settings = {"lr": lr, "step": step, "grad_scale": grad_scale}
        if self._updates_all:
            self._update_all(rows, gradients, **settings)
        else:
            self.where.change(rows, late=self.late, ages=self._ages(rows), gradients=gradients, **settings)
        if self.late is not None:
            self.late.advance(lr=lr, step=step)
            self.now += 1
            self.touched[rows] = self.now
            self._sweep(step)

    def _update_all(self, rows: Array, gradients: Array, **settings: Any) -> None:
        """Update all rows of this rank, those that are not named with a gradient of zeros."""
        for first in range(0, self.count, self.where.most):
            every = np.arange(first, min(first + self.where.most, self.count))
            kernels = row_kernels_for(gradients)
            whole = kernels.empty(every.size * self.width, gradients.dtype)
            whole.view(np.uint8).fill(0)
            here = slice(*np.searchsorted(rows, [first, first + every.size]))
            kernels.put_rows(whole, gradients[here].reshape(-1), rows[here] - first, self.width)
            self.where.change(every, gradients=whole.reshape(-1, self.width), **settings)

    def _sweep(self, step: int) -> None:
        """Bring the rows up to date whose turn it is: each once in `MOST_MISSED` updates, whichever rank holds it."""
        together = neighbours_of(self.rows)
        turn = step % MOST_MISSED
        begin = self.first // together // MOST_MISSED * MOST_MISSED + turn
        ahead = np.arange(begin * together, self.first + self.count, MOST_MISSED * together)
        rows = (ahead[:, np.newaxis] + np.arange(together)).reshape(-1) - self.first
        self.catch_up(rows[(rows >= 0) & (rows < self.count)])
