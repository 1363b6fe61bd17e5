"""`update_sections`: kernels over this rank's range of every section, wherever its chunks rest.

    chunks in memory      computed at once, where they lie or on their way between a host and a GPU (`UpdateStaging`)
    chunks on a disk      one run of the pipeline over all sections: read, compute, write back

Both are the same call over the same elements, so where a value rests does not show in its bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zerort.comm.agreed import agreed
from zerort.device import Ticket
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.gradients import SummedGradient
from zerort.engine.rows.bucket import RowGradient
from zerort.engine.rows.table import RowTable
from zerort.engine.step.prune import prune
from zerort.engine.step.state import OptimizerState, Rates
from zerort.layout import Placement
from zerort.optim.kernels import kernels_for
from zerort.typing import Array

if TYPE_CHECKING:
    from zerort.streaming import ArrayTransfer, StoreTransfer

__all__ = ["update_sections"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What is the same for all chunks of an update."""

    present: set[str]
    rates: Rates
    grad_scale: float


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of one section, with everything that its update touches."""

    section: Section
    at: int
    columns: dict[str, ChunkedArray]
    """``parameter``, ``gradient``, and the state's."""

    @property
    def offloaded(self) -> list[str]:
        """Which columns have this chunk elsewhere than in memory."""
        return [kind for kind, column in self.columns.items() if column.is_chunk_offloaded(self.at)]

    def store_transfers(self) -> list[StoreTransfer]:
        """Return what the pipeline brings, in the order of `offloaded`."""
        return [
            self.columns[kind].chunk_transfer(
                self.at, read=not (kind == "parameter" and self._is_rounded), write=kind != "gradient"
            )
            for kind in self.offloaded
        ]

    @property
    def _is_rounded(self) -> bool:
        """Whether parameters are what their master weights round to: then they need not be read."""
        assert self.section.state is not None
        return not self.section.state.reads_parameters

    def arrays(self, brought: Sequence[Array] = ()) -> list[Array]:
        """Return every column's part where it is, given what the pipeline has brought."""
        found = dict(zip(self.offloaded, brought, strict=True))
        return [
            found[kind] if kind in found else column.resident_chunk(self.at) for kind, column in self.columns.items()
        ]

    def array_transfers(self, brought: Sequence[Array] = ()) -> list[ArrayTransfer]:
        """Return the same for a stage, which has to know what is read and what is written."""
        from zerort.streaming.transfers import ArrayTransfer

        return [
            ArrayTransfer(array, read=not (kind == "parameter" and self._is_rounded), write=kind != "gradient")
            for kind, array in zip(self.columns, self.arrays(brought), strict=True)
        ]

    def _came_empty(self, parameter: Array) -> bool:
        """Say whether a chunk of parameters was made room for, and not read."""
        return not self.columns["parameter"].is_resident_chunk(self.at, parameter)

    def update(self, settings: _Settings, columns: Sequence[Array]) -> None:
        """Update the chunk, given every column's part of it, all of them on the host or on the GPU."""
        arrays = dict(zip(self.columns, columns, strict=True))
        if self._is_rounded and self._came_empty(arrays["parameter"]):  # also of tensors that are not updated now
            kernels_for(arrays["master"]).round_master(arrays["parameter"], arrays["master"])
        state = self.section.state
        assert state is not None
        state.update_chunk_(
            self.at,
            arrays.pop("parameter"),
            arrays.pop("gradient"),
            arrays,
            present=settings.present,
            rates=settings.rates,
            grad_scale=settings.grad_scale,
        )


def update_sections(
    context: Context,
    sections: Sequence[Section],
    gradients: Sequence[SummedGradient],
    *,
    present: set[str],
    rates: Rates,
    scale: float,
) -> None:
    """Update parameters and state of every section that has gradients. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        sections: Whose turn it is.
        gradients: Each one's summed gradient, of the owned range.
        present: Tensors that have a gradient; the same on every rank.
        rates: The learning rate of every optimizer, by its `id`.
        scale: What gradients are multiplied by first.
    """
    settings = _Settings(present=present, rates=rates, grad_scale=scale)
    streams = any(section.is_offloaded for section in sections)  # the same on every rank: `agreed` is a collective
    with context.guard.changing(f"update {context.run.updates}"):
        chunks: list[_Chunk] = []
        tables: list[tuple[RowTable, OptimizerState, RowGradient]] = []
        for section, gradient in zip(sections, gradients, strict=True):
            assert section.state is not None
            section.state.begin_update(present)
            if section.table is not None and isinstance(gradient, RowGradient):
                tables.append((section.table, section.state, gradient))
                continue
            if section.needs_whole_tensors:
                section.state.update_tensors_(
                    section.owned.memory,
                    gradient.column.memory,
                    present=present,
                    rates=rates,
                    grad_scale=scale,
                    sum_over_ranks=functools.partial(_sum_over_shards, context),
                    exact=context.leaves is not None,
                )
            chunks += _chunks_of(section, gradient.column, present)
        # What fails is a disk, a kernel, or a user's optimizer.
        with agreed(context.world, "update") if streams else contextlib.nullcontext():
            for table, state, rows in tables:
                _update_rows(table, state, rows, settings)
            _compute(context, chunks, settings)
        prune(context, sections, present)


def _update_rows(table: RowTable, state: OptimizerState, gradient: RowGradient, settings: _Settings) -> None:
    """Update the rows of a table that have a gradient. No communication."""
    ((name, step),) = state.steps.items()
    if name in settings.present:
        rate = settings.rates[id(state.optimizer_of(name))]
        table.update_(gradient.rows, gradient.values, lr=rate, step=step, grad_scale=settings.grad_scale)


def _sum_over_shards(context: Context, values: Array) -> Array:
    """Return the sum of every rank's ``values``, if ranks hold different parts of the state."""
    if context.plan.state.placement is Placement.REPLICATED:
        return values
    return context.mesh.shard.all_reduce(values, name="statistics").wait()  # not-gpu: between arrays of the host


def _compute(context: Context, chunks: Sequence[_Chunk], settings: _Settings) -> None:
    """Update chunks where they are, those that rest elsewhere on their way through memory. No communication."""
    streamed = [chunk for chunk in chunks if chunk.offloaded]
    here = [chunk for chunk in chunks if not chunk.offloaded]
    if context.device.in_host_memory:
        for chunk in here:
            chunk.update(settings, chunk.arrays())
    else:
        _stage(context, here, settings)

    def compute(number: int, *brought: Array) -> Ticket[Any] | None:
        chunk = streamed[number]
        if context.device.in_host_memory:
            chunk.update(settings, chunk.arrays(brought))
            return None
        # gpu-wait: what_comes_back_late_is_what_a_disk_gets [return context -> context]
        return context.staging.run(
            [chunk.array_transfers(brought)], lambda _, *columns: chunk.update(settings, columns)
        )

    if streamed:
        context.update_stream.run([chunk.store_transfers() for chunk in streamed], compute)


def _stage(context: Context, chunks: Sequence[_Chunk], settings: _Settings) -> None:
    """Update chunks of which some may rest on the host while computing happens on a GPU."""
    written = context.staging.run(
        [chunk.array_transfers() for chunk in chunks], lambda number, *columns: chunks[number].update(settings, columns)
    )
    for section, pairs in groupby(zip(chunks, written.result, strict=True), key=lambda pair: pair[0].section):
        section.parameters.updated([back for _, back in pairs])


def _chunks_of(section: Section, gradient: ChunkedArray, present: set[str]) -> Iterator[_Chunk]:
    state = section.state
    assert state is not None
    columns = {
        "parameter": section.owned,
        "gradient": gradient,
        **state.columns,
    }
    for at in state.chunks_with(present):
        yield _Chunk(section, at, columns)
