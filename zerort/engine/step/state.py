"""`OptimizerState`: what an optimizer keeps for the tensors of one flat layout, and the pass that updates them.

    one element per parameter element    exp_avg …          a `ChunkedArray` for the range that this rank updates
    blocks of elements                   exp_avg.int8 …     the same, of bytes
    one array per tensor                 row, col …         small, in memory, the same on every rank
    master weights, in a `MasterForm`    of bf16 and fp16 parameters: a `ChunkedArray`, too

The range is cut into chunks, which are updated one by one wherever they rest; state that is all in memory is one chunk.
Neighbouring tensors with the same settings are updated by one kernel call, padding included (zeros stay zeros).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from zerort.device import HostDevice
from zerort.engine.residence.chunked_array import ChunkedArray, colocate, cut_chunks
from zerort.engine.step.state_columns import StateColumns
from zerort.engine.step.state_entry import StateEntry, Streaming, layout_of_some
from zerort.layout import FlatLayout, Overlap, Partition, Range, itemsize
from zerort.layout.blocks import layout_of_blocks
from zerort.layout.dtypes import TRAINABLE
from zerort.optim import (
    Blocks,
    ElementwiseOptimizer,
    MasterForm,
    Optimizer,
    StateFormat,
    StateSpec,
    TensorOptimizer,
    TensorPart,
)
from zerort.optim.forms.sparsity import MASK, bits_in, put_bits
from zerort.optim.kernels import kernels_for
from zerort.typing import Array, Device

__all__ = ["OptimizerState", "Rates"]

SumOverRanks = Callable[[Array], Array]

Rates = Mapping[int, float]
"""The learning rate of every optimizer, by its `id`."""


class OptimizerState:
    """The state of one flat layout's tensors on this rank.

    Args:
        layout: Where the parameters lie.
        partition: Which rank holds which range of them.
        rank: This rank.
        whole: Keep state for all elements on every rank, instead of for this rank's range.
        optimizers: Each tensor's optimizer, by name; the same object for the same settings.
        master: How master weights are kept; None: there are none.
        name: What values are called in a store.
        streaming: What is not in memory; None: nothing.
        device: Where it is computed with; None: on the host.
        zeros: Makes the memory that the rest is in; None: the device's.
        before: The same state on another partition: what belongs to both stays where it is, if it can (decision 0179).
            Its values are not moved yet.
    """

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        rank: int,
        whole: bool,
        optimizers: Mapping[str, Optimizer],
        master: MasterForm | None = None,
        name: str = "",
        streaming: Streaming | None = None,
        device: Device | None = None,
        zeros: Callable[[int, str], Array] | None = None,
        before: OptimizerState | None = None,
    ) -> None:
        self._device: Device = HostDevice() if device is None else device
        self.layout = layout
        self.partition = partition
        self.owned = Range(0, layout.numel) if whole else partition.of(rank)
        self.steps = {extent.name: 0 for extent in layout.extents}
        """Updates that each tensor has had."""
        self.sparsities = {name: one.sparsity for name, one in optimizers.items() if one.sparsity is not None}
        """How tensors are pruned, if they are."""
        self.pruned = dict.fromkeys(self.sparsities, 0)
        """How many elements of each are pruned; the same on every rank."""
        self._rank = rank
        self._whole = whole
        self._optimizers = optimizers
        self._updated_in = TRAINABLE[layout.dtype].updated_in
        self.master_form = master
        """How master weights are kept."""
        most = max(self.owned.numel, 1) if streaming is None else streaming.chunk_numel
        self.cuts = cut_chunks(self.owned.numel, most=most)
        """Where chunks begin, counted in the owned range, and the end of the last."""
        specs = list(self._specs())
        width = Fraction(0 if master is None else itemsize(master.dtype))
        width += sum(spec.width for spec, _ in specs if spec.shape is None)
        chunks = len(self.cuts) - 1
        columns = StateColumns(
            name=name,
            rank=rank,
            whole=whole,
            chunks=chunks,
            resident=chunks if streaming is None else streaming.resident_chunks(self.cuts, width),
            storage=None if streaming is None else streaming.storage,
            device=self._device,
            zeros=zeros,
            before={} if before is None else before.columns,
        )
        self.entries = {spec.name: self._keep(spec, names, columns) for spec, names in specs}
        self.master: ChunkedArray | None = None
        if master is not None:
            self.master = columns.make("master", self.cuts, master.dtype, self.partition)

    def _specs(self) -> Iterator[tuple[StateSpec, list[str]]]:
        """Yield every kind of state with the tensors that have it."""
        found: dict[str, tuple[StateSpec, list[str]]] = {}
        for extent in self.layout.extents:
            for spec in self._optimizers[extent.name].states_in(self._updated_in, extent.shape):
                found.setdefault(spec.name, (spec, []))[1].append(extent.name)
        yield from found.values()

    def _keep(self, spec: StateSpec, names: Sequence[str], columns: StateColumns) -> StateEntry:
        if spec.shape is not None:
            shapes = {name: self._shape_of(spec.name, name) for name in names}
            layout = FlatLayout.build(shapes, dtype=spec.dtype, alignment=1)
            partition = Partition.build(layout.numel, self.partition.size)
            memory = self._device.zeros(layout.numel, spec.dtype)
            column = ChunkedArray(spec.name, (0, layout.numel), memory, device=self._device)
            return StateEntry(spec, layout, partition, column, whole=True)
        if spec.format is not None:  # all tensors of a section have it, or none
            layout, partition = layout_of_blocks(self.layout, self.partition, spec.format)
            cuts = tuple(map(spec.format.nbytes_of, self.cuts))
            column = columns.make(spec.name, cuts, spec.dtype, partition)
            return StateEntry(spec, layout, partition, column, whole=self._whole)
        having = set(names)
        layout, partition = layout_of_some(self.layout, self.partition, having, dtype=spec.dtype)
        counts = [
            last - first if len(names) == len(self.steps) else self._count(first, last, having)
            for first, last in pairwise(self.cuts)
        ]
        cuts = tuple(accumulate(counts, initial=0))
        column = columns.make(spec.name, cuts, spec.dtype, partition)
        return StateEntry(spec, layout, partition, column, whole=self._whole)

    def _count(self, first: int, last: int, names: Collection[str]) -> int:
        """Return how many elements of some tensors lie in a stretch of the owned range."""
        overlaps = self.layout.overlaps(self.owned.first + first, self.owned.first + last)
        return sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names)

    def _shape_of(self, state: str, name: str) -> tuple[int, ...]:
        specs = self._optimizers[name].states(self.layout.of(name).shape)
        shape = next(spec.shape for spec in specs if spec.name == state)
        assert shape is not None
        return shape

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of its tensors, each once, in the same order on every rank."""
        return list({id(one): one for one in self._optimizers.values()}.values())

    def optimizer_of(self, name: str) -> Optimizer:
        """Return the optimizer of one of its tensors."""
        return self._optimizers[name]

    @property
    def columns(self) -> dict[str, ChunkedArray]:
        """What an update of elements reads and writes, by kind; ``master`` among them."""
        found = {kind: entry.column for kind, entry in self.entries.items() if entry.spec.shape is None}
        return found if self.master is None else {**found, "master": self.master}

    @property
    def formats(self) -> list[StateFormat]:
        """The formats of moments that are kept in blocks, each once."""
        specs = [entry.spec for kind, entry in self.entries.items() if kind != MASK]
        return list(dict.fromkeys(spec.format for spec in specs if spec.format is not None))

    @property
    def reads_parameters(self) -> bool:
        """Whether an update reads parameters; else they are what master weights round to."""
        return self.master_form is None or self.master_form.reads_parameter

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds in memory."""
        held = sum(entry.column.memory.nbytes for entry in self.entries.values())
        return held + (0 if self.master is None else self.master.memory.nbytes)

    # -- the update ------------------------------------------------------------------------------------------------

    def begin_update(self, present: set[str]) -> None:
        """Count the update of the tensors that have a gradient; the same on every rank."""
        for name in present & self.steps.keys():
            self.steps[name] += 1

    def update_tensors_(
        self,
        param: Array,
        grad: Array,
        *,
        present: set[str],
        rates: Rates,
        grad_scale: float,
        sum_over_ranks: SumOverRanks,
        exact: bool = False,
    ) -> None:
        """Update the tensors whose optimizers look at whole ones. Every rank calls this.

        Args:
            param: The owned range of the parameters, in the layout's dtype.
            grad: The owned range of the summed gradient.
            present: Tensors that have a gradient.
            rates: Learning rates.
            grad_scale: What gradients are multiplied by first.
            sum_over_ranks: Sums small float64 arrays over the ranks.
            exact: Whether no bit may depend on how tensors are cut over the ranks.
        """
        target, copy_out = (param, None) if self.master is None else (self.master.memory, param)
        for optimizer in self.optimizers:
            if isinstance(optimizer, TensorOptimizer):
                parts = [
                    self._part(name, rates[id(optimizer)], target, grad, copy_out, grad_scale)
                    for name in self.steps
                    if name in present and self._optimizers[name] is optimizer
                ]
                _drive(optimizer, [replace(part, exact=exact) for part in parts], sum_over_ranks)

    def chunks_with(self, present: set[str]) -> Iterator[int]:
        """Yield the chunks in which some tensor with a gradient is updated element by element."""
        for at, (first, last) in enumerate(pairwise(self.cuts)):
            for overlap in self.layout.overlaps(self.owned.first + first, self.owned.first + last):
                name = overlap.extent.name
                if name in present and isinstance(self._optimizers[name], ElementwiseOptimizer):
                    yield at
                    break

    def update_chunk_(
        self,
        at: int,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        present: set[str],
        rates: Rates,
        grad_scale: float,
    ) -> None:
        """Update one chunk in place, element by element.

        Args:
            at: Which.
            param: The chunk's parameters, in the layout's dtype.
            grad: The chunk's summed gradient.
            state: The chunk of every one of `columns`.
            present: Tensors that have a gradient.
            rates: Learning rates.
            grad_scale: What gradients are multiplied by first.
        """
        target, copy_out = (param, None) if self.master is None else (state["master"], param)
        for optimizer, step, run, places in self._runs(at, present):
            if isinstance(optimizer, ElementwiseOptimizer):
                values = {kind: self._values(kind, state[kind], place, at, run) for kind, place in places.items()}
                mask = values.pop(MASK, None)
                if mask is not None:  # what is pruned, and its state, stays zero without a gradient
                    grad[run][bits_in(mask.payload, slice(0, grad[run].size))] = 0
                optimizer.update_(
                    target[run],
                    grad[run],
                    values,
                    lr=rates[id(optimizer)],
                    step=step,
                    grad_scale=grad_scale,
                    copy_out=None if copy_out is None else copy_out[run],
                )

    def _values(self, kind: str, values: Array, place: slice, at: int, run: slice) -> Any:
        """Return a stretch of one kind of state as an optimizer gets it."""
        format = self.entries[kind].spec.format
        if format is None:
            return values[place]
        return Blocks(values[format.bytes_of(place)], self.owned.first + self.cuts[at] + run.start)

    def _runs(self, at: int, present: set[str]) -> Iterator[tuple[Optimizer, int, slice, dict[str, slice]]]:
        """Yield stretches of a chunk that one kernel call can update: (optimizer, step, where, where in its state)."""
        kinds = {kind: entry for kind, entry in self.entries.items() if entry.spec.shape is None}
        # State that only some tensors have lies without gaps for the others: then each tensor is a stretch of its own.
        alike = all(len(entry.layout.extents) == len(self.steps) for entry in kinds.values())

        def settings(overlap: Overlap) -> tuple[bool, int, int, str]:
            name = overlap.extent.name
            return name in present, id(self._optimizers[name]), self.steps[name], "" if alike else name

        overlaps = self.layout.overlaps(self.owned.first + self.cuts[at], self.owned.first + self.cuts[at + 1])
        for (here, _, step, _), group in groupby(overlaps, key=settings):
            if here:
                stretch = list(group)
                name = stretch[0].extent.name
                run = slice(stretch[0].in_range.start, stretch[-1].in_range.stop)
                if alike:
                    places = dict.fromkeys(kinds, run)
                else:
                    places = {k: self._place(entry, at, stretch[0]) for k, entry in kinds.items() if entry.has(name)}
                yield self._optimizers[name], step, run, places

    def _place(self, entry: StateEntry, at: int, overlap: Overlap) -> slice:
        """Return where a tensor's part of a chunk lies in the chunk of one kind of state."""
        begin = entry.first_of(self._rank) + entry.column.cuts[at]
        first = entry.layout.of(overlap.extent.name).offset + overlap.in_extent.start - begin
        return slice(first, first + overlap.in_extent.stop - overlap.in_extent.start)

    def forget_masks(self, names: Collection[str]) -> None:
        """Take it that nothing of some tensors is pruned: they have new values. An update prunes them anew."""
        for overlap in self.layout.overlaps(*self.owned) if self.sparsities else ():
            if overlap.extent.name in names:
                numel = overlap.in_range.stop - overlap.in_range.start
                put_bits(self.entries[MASK].column.memory, overlap.in_range, np.zeros(numel, bool))
        self.pruned.update(dict.fromkeys(self.pruned.keys() & set(names), 0))

    def _part(
        self,
        name: str,
        rate: float,
        target: Array,
        grad: Array,
        copy_out: Array | None,
        grad_scale: float,
    ) -> TensorPart:
        extent = self.layout.of(name)
        first, last = max(extent.offset, self.owned.first), min(extent.stop, self.owned.stop)
        if first >= last:
            here, first = slice(0, 0), extent.offset  # nothing of it is here
        else:
            here = slice(first - self.owned.first, last - self.owned.first)
        return TensorPart(
            name=name,
            shape=extent.shape,
            first=first - extent.offset,
            param=target[here],
            grad=grad[here],
            state={kind: self._state_of(entry, name) for kind, entry in self.entries.items() if entry.has(name)},
            lr=rate,
            step=self.steps[name],
            grad_scale=grad_scale,
            copy_out=None if copy_out is None else copy_out[here],
        )

    def _state_of(self, entry: StateEntry, name: str) -> Array:
        """Return one tensor's part of a kind of state: in its own shape, or 1-D beside the parameter's part."""
        extent, array = entry.layout.of(name), entry.column.memory
        if entry.spec.shape is not None:
            return array[extent.slice].reshape(extent.shape)
        start = entry.first_of(self._rank)
        first, last = max(extent.offset, start), min(extent.stop, start + array.size)
        return array[first - start : last - start] if first < last else array[:0]

    # -- master weights --------------------------------------------------------------------------------------------

    def take_master_from(self, param: ChunkedArray, *, names: Collection[str]) -> None:
        """Set the master weights of some tensors to the parameters' values: after they were written."""
        if self.master is None or self.master_form is None:
            return
        for at, (first, last) in enumerate(pairwise(self.cuts)):
            overlaps = self.layout.overlaps(self.owned.first + first, self.owned.first + last)
            named = [overlap.in_range for overlap in overlaps if overlap.extent.name in names]
            if named:
                master, source = self.master.read_chunk(at), param.read_chunk(at)
                near = colocate(source, master, device=self._device)
                for here in named:
                    self.master_form.take(master[here], near[here])
                if self.master.is_chunk_offloaded(at):
                    self.master.write(first, master).wait()  # not-gpu: between the host and a disk

    def round_master_into(self, param: ChunkedArray) -> None:
        """Set the parameters to the rounded master weights: after loading, if they are not loaded themselves."""
        if self.master is None or self.reads_parameters:
            return
        for at, first in enumerate(self.cuts[:-1]):
            rounded = param.read_chunk(at)
            kernels_for(rounded).round_master(
                rounded, colocate(self.master.read_chunk(at), rounded, device=self._device)
            )
            if param.is_chunk_offloaded(at):
                param.write(first, rounded).wait()  # not-gpu: between the host and a disk


def _drive(optimizer: TensorOptimizer, parts: Sequence[TensorPart], sum_over_ranks: SumOverRanks) -> None:
    """Run an update that asks for sums over the ranks until it is done."""
    update = optimizer.update_parts_(parts)
    try:
        asked = next(update)
        while True:
            asked = update.send(sum_over_ranks(asked))
    except StopIteration:
        return
