"""`RowBucket`: a table's gradients, row by row, from the first micro-step to the step; `RowGradient`: their sum.

    add_rows … add_rows     this rank's rows of every micro-step, summed here
    finish_reduce           once all ranks have agreed on the step: rows travel to their owners, who sum them

Rows travel once per step, whatever the micro-steps; those that no rank has a gradient of do not travel. With
`virtual_shards` each micro-step's gradients travel apart, and the owner of a row sums all of them in the order of their
values: the same sums on any number of ranks (decision 0172). It has the
verbs of a `GradientBucket`, as far as units and steps use them. Its memory is that of the rows in it. Numbers of rows
are arrays of the host, values lie where they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.rows.exchange import RowExchange, cast_rows, coalesced, taken_rows
from zerort.errors import CallError
from zerort.layout import FlatLayout
from zerort.native.dtypes import numpy_dtype
from zerort.optim import square_sums_of
from zerort.optim.kernels import bucket_kernels_for, kernels_for, row_kernels_for
from zerort.typing import Array, Device

__all__ = ["RowBucket", "RowGradient"]


@dataclass(frozen=True, slots=True)
class RowGradient:
    """The summed gradient of those rows of this rank that have one: a `SummedGradient`."""

    rows: Array
    """Counted from this rank's first, ascending, each once."""
    values: Array
    """A row for each."""
    numel: int
    """Elements of this rank's range."""
    name: str
    device: Device
    """Of the values."""
    block: int | None = None
    """Elements over which squares are summed, counted from this rank's first; None: all."""

    @property
    def column(self) -> ChunkedArray:
        """This rank's range as it would be with zeros in all other rows: for somebody who wants to look at it."""
        width = self.values.shape[1]
        whole = self.device.scratch(self.numel, self.values.dtype)
        whole.view(np.uint8).fill(0)
        row_kernels_for(whole).put_rows(whole[: self.numel // width * width], self.values.reshape(-1), self.rows, width)
        return ChunkedArray(self.name, (0, self.numel), whole, device=self.device)

    @property
    def sums(self) -> Array:
        """The sum of its squares, or those of each block: a row belongs to the block that it begins in."""
        width = self.values.shape[1]
        (found,) = square_sums_of([self.values.reshape(-1)], self.block and width, device=self.device)
        if self.block is None:
            return found
        blocks = self.rows * width // self.block
        by_block = np.bincount(blocks, weights=found, minlength=-(-self.numel // self.block))
        return by_block.astype(np.float64, copy=False)  # of no rows it counts whole numbers

    def first_nonfinite(self) -> int:
        """Return the first element that is NaN or infinite, or -1."""
        at: int = kernels_for(self.values).first_nonfinite(self.values.reshape(-1))
        row, column = divmod(at, self.values.shape[1])
        return -1 if at < 0 else int(self.rows[row]) * self.values.shape[1] + column


class RowBucket:
    """Where a table's gradients are collected.

    Args:
        layout: Of the table alone, in the dtype that gradients travel in.
        numel: Elements of this rank's range.
        exchange: Moves rows between the ranks.
        device: Where gradients are computed.
        block: Elements over which squares are summed; None: all of this rank's.
        leaves: How many of a step's micro-steps are virtual shards of this rank's, whose gradients travel apart; one
            more repeats the last, and is dropped. None: there are none, and micro-steps are summed here.
    """

    needs_slots = leaves_slots_busy = reduces_micro_steps = False
    fires = fires_over_copies = False
    calls = nbytes = 0

    def __init__(
        self,
        layout: FlatLayout,
        *,
        numel: int,
        exchange: RowExchange,
        device: Device,
        block: int | None = None,
        leaves: int | None = None,
    ) -> None:
        self.layout = layout
        (self._extent,) = layout.extents
        self._numel = numel
        self._exchange = exchange
        self._device = device
        self._block = block
        self._leaves = leaves
        self._dtype = numpy_dtype(layout.dtype)
        self._summed_in = np.dtype(np.float64 if self._dtype == np.float64 else np.float32)
        self.reset()

    def reset(self) -> None:
        """Forget this step's gradients."""
        self._pending: list[tuple[Array, Array]] = []
        self._ended = 0  # how many of them are of micro-steps that have ended
        self._micro_steps = 0
        self._sum: RowGradient | None = None
        self.filling = False
        self.seen: set[str] = set()
        """The table's name, if this rank has a gradient of it."""
        self._nonfinite: list[SupportsInt] = []  # where the first element is that is not finite, or the promise of it

    @property
    def nonfinite(self) -> str | None:
        """The table's name, if a gradient of this rank's own holds NaN or infinity."""
        return self._extent.name if any(int(promise) >= 0 for promise in self._nonfinite) else None

    def recut(self, *, numel: int, exchange: RowExchange) -> None:
        """Go on with another range of this rank; there are no gradients now."""
        self._numel, self._exchange = numel, exchange

    def add_rows(self, rows: Array, values: Array) -> None:
        """Add gradients of some rows to this micro-step; of one that comes twice, they are summed.

        Args:
            rows: Counted in the whole table.
            values: A row for each; copied.
        """
        self.filling = True
        self.seen = {self._extent.name}
        wide = cast_rows(self._device.flat(values).reshape(values.shape), self._summed_in, device=self._device)
        kept = coalesced(rows.astype(np.int64), wide)
        self._nonfinite.append(bucket_kernels_for(self._device).look_for_nonfinite(kept[1].reshape(-1)))
        self._pending.append(kept)

    def views(self) -> dict[str, Array]:
        """Return nothing: rows are handed over by `Unit.reduce`."""
        return {}

    def add(self, name: str, gradient: Array, *, donate: bool = False) -> None:
        """Refuse the gradient of the whole table."""
        raise CallError(
            f"Expected the gradient of {name!r} as rows, for it is registered so; got that of the whole table. Name "
            "its rows: unit.reduce(rows={name: (indices, values)})."
        )

    def drop_micro_step(self) -> None:
        """Do nothing: rows of a batch that does not count are not added."""

    def end_micro_step(self) -> None:
        """End a micro-step: its rows wait for the last one."""
        self.filling = False
        self._micro_steps += 1
        if self._leaves is not None and self._micro_steps > self._leaves:
            del self._pending[self._ended :]
        elif len(self._pending) > self._ended + 1:
            self._pending[self._ended :] = [self._summed(self._pending[self._ended :])]
        self._ended = len(self._pending)

    def fire(self) -> None:
        """Do nothing: rows of all micro-steps travel once."""

    def end_step(self) -> None:
        """Do nothing: a rank that fails until the step leaves no call behind that others have made."""

    def wait(self) -> None:
        """Return at once: nothing is under way before `finish_reduce`."""

    def finish_reduce(self) -> RowGradient:
        """Return the sum, of this rank's rows. Every rank calls this."""
        if self._sum is None:
            rows, values = self._of_all_micro_steps()
            sent = cast_rows(values, self._dtype, device=self._device)  # an infinity is found when they are measured
            mine, sums = self._exchange.sum(rows, sent, summed_in=self._summed_in)
            self._sum = RowGradient(
                mine.astype(np.int64, copy=False), sums, self._numel, self._extent.name, self._device, self._block
            )
        return self._sum

    def _of_all_micro_steps(self) -> tuple[Array, Array]:
        """Return this rank's rows, ascending, and their gradients: each once, or once for every micro-step."""
        if len(self._pending) == 1:
            return self._pending[0]
        if self._leaves is None:
            return self._summed(self._pending)
        rows, values = self._joined(self._pending)
        order = np.argsort(rows, kind="stable")
        return rows[order], taken_rows(values, order, device=self._device)

    def _summed(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        return coalesced(*self._joined(parts))

    def _joined(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        width, kernels = self._extent.shape[1], bucket_kernels_for(self._device)
        rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in parts)])
        values = self._device.scratch(rows.size * width, self._summed_in)
        begin = 0
        for some, one in parts:
            kernels.cast_into(values[begin : begin + some.size * width], one.reshape(-1))
            begin += some.size * width
        return rows, values.reshape(-1, width)

    def close(self) -> None:
        """Give the memory back."""
        self.reset()

    def __repr__(self) -> str:
        return f"RowBucket({self._extent.name!r}, {self._extent.shape[0]} x {self._extent.shape[1]})"
