"""`RowSection`: a table whose rows are gathered, reduced and updated alone, as the section that others know.

gather      rows that this rank asks for, or the whole table, up to date    every rank calls both
bucket      a `RowBucket` instead of a `GradientBucket`
table       this rank's rows; the step calls its `update_` instead of the update of chunks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from zerort.buffer import PLAIN, RangeGather
from zerort.comm.agreed import agreed, raise_together
from zerort.config import Tier
from zerort.engine.model.section import Section
from zerort.engine.residence.sharded import ShardedParameters
from zerort.engine.rows.bucket import RowBucket, RowGradient
from zerort.engine.rows.exchange import RowExchange
from zerort.engine.rows.memory import RowsInMemory
from zerort.engine.rows.stored import StoredRows
from zerort.engine.rows.table import RowTable
from zerort.errors import StorageError
from zerort.layout import Placement
from zerort.layout.dtypes import TRAINABLE
from zerort.native.dtypes import numpy_dtype
from zerort.optim import ElementwiseOptimizer
from zerort.optim.late import late_updates
from zerort.typing import Array

__all__ = ["RowSection"]


class RowSection(Section):
    """One table, sharded over the ranks under every stage. The arguments are those of `Section`."""

    parameter_placement = Placement.SHARDED
    table: RowTable

    def make_parts(self, before: Section | None = None) -> None:
        """Make its shard and state, and when each row was last up to date."""
        super().make_parts(before)
        self.parameters.is_gathered_apart = True
        self.parameters.is_copied_out = self._context.mesh.replicate is not None
        assert self._optimizers is not None
        assert self.state is not None
        (extent,) = self.layout.extents
        (optimizer,) = self._optimizers.values()
        assert isinstance(optimizer, ElementwiseOptimizer)
        rows, width = extent.shape
        updated_in = TRAINABLE[self.layout.dtype].updated_in
        old = None if before is None else before.table
        keeps_all = self._context.options.makes_digests and not self.is_lazy
        late = None
        if not (self.is_lazy or keeps_all):
            late = late_updates(optimizer, updated_in) if old is None else old.late
        self.table = RowTable(
            (rows, width),
            self.partition,
            self._group.rank,
            where=self._make_rows(width, optimizer),
            late=late,
            updates_all=keeps_all,
            now=0 if old is None else old.now,
        )
        self._exchange = RowExchange(
            self._group,
            self.table.bounds,
            width=width,
            name=extent.name,
            traffic=self._context.ledger.moved,
            copies=self._context.mesh.replicate,
            others=self._context.mesh.beyond,
        )

    def _make_rows(self, width: int, optimizer: ElementwiseOptimizer) -> RowsInMemory | StoredRows:
        """Return where this rank's rows are, by where their arrays rest."""
        assert self.state is not None
        parameter, state = self.parameters.shard, self.state.columns
        if any(column.is_stored for column in (parameter, *state.values())):
            return StoredRows(
                parameter,
                state,
                width=width,
                optimizer=optimizer,
                window=self._context.update_stream.window,
                chunk_numel=self._context.backings.chunk_numel,
            )
        numel = parameter.size // width * width  # without what evens ranges out
        arrays = {kind: column.memory[:numel] for kind, column in state.items()}
        context = self._context
        return RowsInMemory(
            parameter.memory[:numel],
            arrays,
            width=width,
            optimizer=optimizer,
            device=self._device,
            in_place=context.budget is None and context.mesh.replicate is None,
        )

    def swap_parts(self, other: Section) -> None:
        """Exchange what `recut` has made for what was there, rows and what moves them included."""
        assert isinstance(other, RowSection)
        super().swap_parts(other)
        self.table, other.table = other.table, self.table
        self._exchange, other._exchange = other._exchange, self._exchange
        assert isinstance(self.bucket, RowBucket)
        self.bucket.recut(numel=self.partition.counts[self._group.rank], exchange=self._exchange)

    @property
    def is_stored(self) -> bool:
        """Whether parameters or state rest on a disk; the same on every rank."""
        return Tier.NVME in (self.tiers.parameter, self.tiers.state)  # also on a rank without rows

    def _gather(self) -> RangeGather:
        """Return how the whole table is gathered: as it is, as its rows are, whatever `wire=` says (decision 0187)."""
        return PLAIN

    @property
    def _reduce_codec(self) -> None:
        """How its gradients travel as codes: they do not."""

    def _make_offloaded_gradient(self) -> None:
        """Make nothing: gradients of rows are in memory, whatever the tier of others."""

    def _make_bucket(self) -> None:
        """Make the place where gradients are collected: rows, no slots."""
        self.gradient_dtypes = (numpy_dtype(self.layout.dtype), numpy_dtype(self._summed_in))
        leaves = self._context.leaves
        self.bucket = RowBucket(
            replace(self.layout, dtype=self._summed_in),
            numel=self.partition.counts[self._group.rank],
            exchange=self._exchange,
            device=self._device,
            block=self._context.norm_block,
            leaves=None if leaves is None else len(leaves.of(self._context.rank)),
        )

    def add_rows(self, rows: Array, values: Array) -> None:
        """Add gradients of some rows to this micro-step."""
        assert isinstance(self.bucket, RowBucket)
        self.bucket.add_rows(rows, values)

    def gather_rows(self, rows: Array, *, error: Exception | None = None) -> Array:
        """Return some rows, up to date, in the order given: in new memory, NumPy's read-only. Every rank calls this.

        Args:
            rows: Which.
            error: What is wrong with this rank's: raised on every rank.
        """
        found = self._exchange.fetch(rows, self.table.values, error=error, can_fail=self.is_stored)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    def gather_whole(self) -> Array:
        """Return the whole table, up to date, until `release`: read-only. Every rank calls this.

        Where ranks share no memory, or it is on disks, it takes that of the whole table, which no slot is kept for; so
        it does with copies of the model, of which one alone may ask for it: what is there stays as it is.
        """
        (extent,) = self.layout.extents
        if self.parameters.is_copied_out:
            assert isinstance(self.parameters, ShardedParameters)
            whole = self._exchange.fetch_all(self.table.values, can_fail=self.is_stored)
            whole.flags.writeable = False
            self.parameters.hold(whole)
            return self.parameters.view(extent.name)
        with self._failing_together():
            self.table.catch_up()
        if self.parameters.needs_room:
            try:
                self.parameters.start(self._device.scratch(self.layout.numel, self.parameters.dtype))
                if self.parameters.can_fail:
                    raise_together(self._group, self.parameters.local_error(), name=self.name[:60])
                self._device.order_after(self.parameters.finish())  # gpu-wait: a_whole_table_comes_before_it_is_used
            except BaseException:  # else the next gather would get this one's Ticket
                self.parameters.release()
                raise
        else:
            # not-gpu: GPUs share no memory
            self._group.barrier(name=self.name[:60]).wait()  # all have written their rows
        return self.parameters.view(extent.name)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Where rows are on a disk: what one rank cannot change, all raise, and no rank goes on from."""
        if not self.is_stored:
            yield
            return
        with (
            self._context.guard.changing("rows that were brought up to date"),
            agreed(self._group, f"rows of {self.name}"[:60], catching=StorageError),
        ):
            yield

    def release(self) -> None:
        """Let the whole table go, if it was gathered."""
        self.parameters.release()

    def finish_reduce(self) -> RowGradient:
        """Return the summed gradient of this rank's rows. Every rank calls this."""
        assert isinstance(self.bucket, RowBucket)
        return self.bucket.finish_reduce()

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write new values, behind all updates so far. No communication."""
        self.table.catch_up()
        super().assign(values)
