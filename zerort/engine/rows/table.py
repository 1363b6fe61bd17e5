"""`RowTable`: this rank's rows of a table, when each was last up to date, and their update.

    touched   ─┬─ 17 ─┬─ 17 ─┬─ 3 ─┬─ 12 ─┬─ …      the update that each row is up to date with
               └ row 0 ┘                            now = 17: row 2 has missed 14 updates

An update costs what its rows cost, and a thousandth of the table: that much is brought up to date in turn with every
update, so that no row is ever older than the numbers that are kept for it (decision 0155). Which rows is decided by
their numbers in the whole table, whatever the ranks (decision 0172). Where every step has a digest, rows miss nothing:
all of them are updated, by the kernels of dense tables and with their bits (decision 0185).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import Partition
from zerort.native import take_rows
from zerort.optim import ElementwiseOptimizer
from zerort.optim.kernels import kernels_for
from zerort.optim.late import MOST_MISSED, LateUpdates
from zerort.optim.optimizer import row_blocks
from zerort.typing import Array

__all__ = ["RowTable", "row_bounds", "touched_nbytes"]

_NEIGHBOURS: Final = 16
"""Rows that are brought up to date together, needed or not: one after the other in memory."""


_BLOCK: Final = 1 << 15
"""Elements of rows without a gradient that are updated at once."""


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
        parameters: This rank's range of the parameters, in memory.
        state: The same of every kind of state, and of master weights (``master``) if there are any.
        optimizer: What updates them.
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
        parameters: ChunkedArray,
        state: Mapping[str, ChunkedArray],
        optimizer: ElementwiseOptimizer,
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
        self._parameter = self._as_rows(parameters)
        self._state = {kind: self._as_rows(column) for kind, column in state.items()}
        self._optimizer = optimizer
        self._updates_all = updates_all
        self.late = late
        """What makes up for updates that rows have missed; the same on every rank."""
        self.now = now
        """Updates that it has counted."""
        self.touched = np.full(0 if late is None else self.count, now, np.int32)
        """The update that each row of this rank is up to date with; empty if rows stay as they are."""

    def _as_rows(self, column: ChunkedArray) -> Array:
        """Return a column's rows, one after the other."""
        return column.memory[: self.count * self.width]

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

    def values(self, rows: Array) -> Array:
        """Return some rows, up to date, in new memory: counted from this rank's first, in any order, also twice."""
        rows = rows.astype(np.int64, copy=False)
        if self.late is not None:
            late = np.sort(rows[self.touched[rows] != self.now])
            self.catch_up(late[np.diff(late, prepend=-1) != 0])
        found = np.empty((rows.size, self.width), self._parameter.dtype)
        take_rows(found.reshape(-1), self._parameter, rows, self.width)
        return found

    def catch_up(self, rows: Array | None = None) -> None:
        """Bring rows up to date, given each once; None: all of this rank's."""
        if self.late is None:
            return
        late = np.flatnonzero(self.touched != self.now) if rows is None else rows[self.touched[rows] != self.now]
        ages = (self.now - self.touched[late]).astype(np.int64)
        kinds, columns = [kind for kind in self._state if kind != "master"], self._columns
        for here, found in row_blocks(columns, late, width=self.width):
            target, *state = (one.reshape(-1, self.width) for one in found)
            self.late.catch_up_(target, dict(zip(kinds, state, strict=True)), ages[here])
        self._round(late)
        self.touched[late] = self.now

    @property
    def _columns(self) -> list[Array]:
        """What an update changes: parameters, or their master weights, and state."""
        target = self._state.get("master", self._parameter)
        return [target, *(column for kind, column in self._state.items() if kind != "master")]

    def _round(self, rows: Array) -> None:
        """Write the parameters that master weights of some rows round to, if there are any."""
        if "master" in self._state:
            for here, (rounded,) in row_blocks([self._parameter], rows, width=self.width):
                master = np.empty(rounded.size, self._state["master"].dtype)
                take_rows(master, self._state["master"], rows[here], self.width)
                kernels_for(master).round_master(rounded, master)

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
        self.catch_up(rows)
        settings = {"lr": lr, "step": step, "grad_scale": grad_scale}
        self._optimize(rows, gradients, **settings)
        if self._updates_all:
            others = np.delete(np.arange(self.count), rows)
            most = max(_BLOCK // self.width, 1)
            zeros = np.zeros((min(most, others.size), self.width), gradients.dtype)
            for first in range(0, others.size, most):
                some = others[first : first + most]
                self._optimize(some, zeros[: some.size], **settings)
        if self.late is not None:
            self.late.advance(lr=lr, step=step)
            self.now += 1
            self.touched[rows] = self.now
            self._sweep(step)

    def _optimize(self, rows: Array, gradients: Array, **settings: Any) -> None:
        """Update some rows, and round them."""
        target, *state = self._columns
        self._optimizer.update_rows_(
            target,
            gradients.astype(target.dtype, copy=False).reshape(-1),
            dict(zip((kind for kind in self._state if kind != "master"), state, strict=True)),
            rows,
            width=self.width,
            **settings,
        )
        self._round(rows)

    def _sweep(self, step: int) -> None:
        """Bring the rows up to date whose turn it is: each once in `MOST_MISSED` updates, whichever rank holds it."""
        turn = step % MOST_MISSED
        begin = self.first // _NEIGHBOURS // MOST_MISSED * MOST_MISSED + turn
        ahead = np.arange(begin * _NEIGHBOURS, self.first + self.count, MOST_MISSED * _NEIGHBOURS)
        rows = (ahead[:, np.newaxis] + np.arange(_NEIGHBOURS)).reshape(-1) - self.first
        self.catch_up(rows[(rows >= 0) & (rows < self.count)])
