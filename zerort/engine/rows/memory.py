"""`RowsInMemory`: rows of this rank that lie in memory: looked at, brought up to date and updated where they are.

Rows that are looked at are brought up to date where they lie: that costs no more than a copy, and the update need not
do it again. Not with copies of the model, whose ranks look at different rows and stay equal to the bit, and not within
a budget, which may have the same rows on a disk with another number of ranks (decision 0193).

Memory is that of the host, or of a GPU: kernels are those of the arrays. On a GPU they are queued on the caller's
stream, as gathers and gradients are: what comes next there sees what they have done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerort.engine.rows.exchange import cast_rows, taken_rows
from zerort.optim import ElementwiseOptimizer
from zerort.optim.kernels import kernels_for, row_kernels_for
from zerort.optim.late import LateUpdates
from zerort.optim.optimizer import row_blocks
from zerort.typing import Array, Device

__all__ = ["RowsInMemory"]


class RowsInMemory:
    """Rows one after the other, in memory.

    Args:
        parameter: Parameters of this rank's rows, 1-D.
        state: The same of every kind of state, and of master weights (``master``) if there are any.
        width: Elements of a row.
        optimizer: What updates them.
        device: Whose memory it is.
        in_place: Whether rows that are looked at are brought up to date where they lie.
    """

    def __init__(
        self,
        parameter: Array,
        state: Mapping[str, Array],
        *,
        width: int,
        optimizer: ElementwiseOptimizer,
        device: Device,
        in_place: bool = True,
    ) -> None:
        self.in_place = in_place
        """Whether rows that are looked at are brought up to date where they lie."""
        self._parameter = parameter
        self._master = state.get("master")
        self._target = parameter if self._master is None else self._master  # what an update changes
        self._state = {kind: column for kind, column in state.items() if kind != "master"}
        self._width = width
        self._optimizer = optimizer
        self._device = device

    @property
    def most(self) -> int:
        """Rows that are best changed at once, if all are."""
        elements: int = row_kernels_for(self._parameter).ROW_BLOCK
        return max(elements // self._width, 1)

    def take(self, rows: Array, *, late: LateUpdates | None, ages: Array | None) -> Array:
        """Return the parameters of some rows, in any order, also twice: a row for each, in new memory.

        Args:
            rows: Counted from this rank's first, int64.
            late: What makes up for updates that they have missed; nothing is written.
            ages: How many each has missed; None: none.
        """
        found = taken_rows(self._parameter.reshape(-1, self._width), rows, device=self._device)
        if ages is not None and late is not None:
            behind = np.flatnonzero(ages)
            columns = [self._target, *self._state.values()]
            for here, copies in row_blocks(columns, rows[behind], width=self._width, write=False):
                target, *state = (one.reshape(-1, self._width) for one in copies)
                late.catch_up_(target, dict(zip(self._state, state, strict=True)), ages[behind[here]])
                current = copies[0]
                if self._master is not None:
                    current = self._device.scratch(current.size, found.dtype)
                    kernels_for(current).round_master(current, copies[0])
                row_kernels_for(found).put_rows(found.reshape(-1), current, behind[here], self._width)
        return found

    def change(
        self,
        rows: Array,
        *,
        late: LateUpdates | None = None,
        ages: Array | None = None,
        gradients: Array | None = None,
        **settings: Any,
    ) -> None:
        """Bring rows up to date, then update them.

        Args:
            rows: Counted from this rank's first, int64, ascending, each once.
            late: What makes up for updates that they have missed.
            ages: How many each has missed; None: none.
            gradients: A row for each; None: they are not updated.
            **settings: ``lr``, ``step`` and ``grad_scale`` of the update.
        """
        if ages is not None and late is not None:
            behind = ages != 0
            some, old = rows[behind], ages[behind]
            for here, found in row_blocks([self._target, *self._state.values()], some, width=self._width):
                target, *state = (one.reshape(-1, self._width) for one in found)
                late.catch_up_(target, dict(zip(self._state, state, strict=True)), old[here])
            if gradients is None:
                rows = some
        if gradients is not None:
            wide = cast_rows(gradients, self._target.dtype, device=self._device).reshape(-1)
            self._optimizer.update_rows_(self._target, wide, self._state, rows, width=self._width, **settings)
        if self._master is not None:
            self._round(self._master, rows)

    def _round(self, master: Array, rows: Array) -> None:
        """Write the parameters that master weights of some rows round to."""
        masters = master.reshape(-1, self._width)
        for here, (rounded,) in row_blocks([self._parameter], rows, width=self._width):
            exact = taken_rows(masters, rows[here], device=self._device)
            kernels_for(exact).round_master(rounded, exact.reshape(-1))
