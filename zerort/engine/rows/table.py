"""`RowTable`: this rank's rows of a table, when each was last up to date, and their update.

    touched   ─┬─ 17 ─┬─ 17 ─┬─ 3 ─┬─ 12 ─┬─ …      the update that each row is up to date with
               └ row 0 ┘                            now = 17: row 2 has missed 14 updates

An update costs what its rows cost, and a thousandth of the table: that much is brought up to date in turn with every
update, so that no row is ever older than the numbers that are kept for it (decision 0155).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import Partition
from zerort.optim import ElementwiseOptimizer
from zerort.optim.kernels import kernels_for
from zerort.optim.late import MOST_MISSED, LateUpdates
from zerort.typing import Array

__all__ = ["RowTable", "row_bounds", "touched_nbytes"]

_BLOCK: Final = 1 << 15
"""Elements that are copied out, updated and copied back at once."""


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
        late: What makes up for updates that rows have missed; None: nothing does (``lazy=True``).
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
        self._late = late
        self._now = 0  # updates that `touched` knows of
        self._touched = np.zeros(0 if late is None else self.count, np.int32)
        self._swept = 0  # the row that is brought up to date next, needed or not

    def _as_rows(self, column: ChunkedArray) -> Array:
        return column.memory[: self.count * self.width].reshape(self.count, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept to bring rows up to date."""
        return self._touched.nbytes + (0 if self._late is None else self._late.nbytes)

    def values(self, rows: Array) -> Array:
        """Return some rows, up to date, in new memory: counted from this rank's first, in any order, also twice."""
        if self._late is not None:
            late = np.sort(rows[self._touched[rows] != self._now])
            self.catch_up(late[np.diff(late, prepend=-1) != 0])
        found: Array = self._parameter[rows]
        return found

    def catch_up(self, rows: Array | None = None) -> None:
        """Bring rows up to date, given each once; None: all of this rank's."""
        if self._late is None:
            return
        late = np.flatnonzero(self._touched != self._now) if rows is None else rows[self._touched[rows] != self._now]
        for first in range(0, late.size, self._block_rows):
            here = late[first : first + self._block_rows]
            state = {kind: column[here] for kind, column in self._state.items()}
            target = state.pop("master") if "master" in state else self._parameter[here]
            self._late.catch_up_(target, state, self._now - self._touched[here])
            for kind, values in state.items():
                self._state[kind][here] = values
            self._put(here, target)
        self._touched[late] = self._now

    def _put(self, rows: Array, target: Array) -> None:
        """Write rows of the parameters, or of their master weights and what these round to."""
        if "master" not in self._state:
            self._parameter[rows] = target
            return
        rounded = np.empty(target.shape, self._parameter.dtype)
        kernels_for(target).round_master(rounded.reshape(-1), target.reshape(-1))
        self._state["master"][rows] = target
        self._parameter[rows] = rounded

    @property
    def _block_rows(self) -> int:
        return max(_BLOCK // self.width, 1)

    def update_(self, rows: Array, gradients: Array, *, lr: float, step: int, grad_scale: float) -> None:
        """Update some rows; the others miss this update, or are brought up to date with it.

        Args:
            rows: Counted from this rank's first, ascending, each once.
            gradients: A row for each.
            lr: Learning rate of this update.
            step: How many updates the table has had, this one included.
            grad_scale: Gradients are multiplied by it first.
        """
        self.catch_up(rows)
        for first in range(0, rows.size, self._block_rows):
            here = rows[first : first + self._block_rows]
            state = {kind: column[here] for kind, column in self._state.items()}
            target = state.pop("master") if "master" in state else self._parameter[here]
            self._optimizer.update_(
                target.reshape(-1),
                gradients[first : first + self._block_rows].reshape(-1),
                {kind: values.reshape(-1) for kind, values in state.items()},
                lr=lr,
                step=step,
                grad_scale=grad_scale,
                copy_out=None,
            )
            for kind, values in state.items():
                self._state[kind][here] = values
            self._put(here, target)
        if self._late is not None:
            self._late.advance(lr=lr, step=step)
            self._now += 1
            self._touched[rows] = self._now
            self._sweep()

    def _sweep(self) -> None:
        """Bring the rows up to date whose turn it is: each at least once in `MOST_MISSED` updates."""
        rows = -(-self.count // MOST_MISSED)
        first, self._swept = self._swept, self._swept + rows
        self.catch_up(np.arange(first, min(self._swept, self.count)))
        if self._swept >= self.count:
            self._swept = 0
