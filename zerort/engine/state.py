"""`OptimizerState`: what an optimizer keeps for the tensors of one flat layout, and the pass that updates them.

    one element per parameter element    exp_avg …          1-D, for the range that this rank updates
    one array per tensor                 row, col …         small, the same on every rank
    float32 master weights               of bf16 and fp16 parameters, for the range that this rank updates

Neighbouring tensors with the same settings are updated by one kernel call, padding included (zeros stay zeros). May
import: optim, layout, native.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from zerort import native
from zerort.device import HostDevice
from zerort.layout import FlatLayout, Overlap, Partition, Range
from zerort.optim import ElementwiseOptimizer, Optimizer, StateSpec, TensorOptimizer, TensorPart
from zerort.typing import Array

__all__ = ["Kept", "OptimizerState"]

SumOverRanks = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of state: an array, and where the tensors' parts of it lie."""

    spec: StateSpec
    layout: FlatLayout
    """Of the tensors that have this kind of state; in the spec's dtype."""
    partition: Partition
    """Which rank stores which range in a checkpoint; and, for sharded state, holds it."""
    array: Array
    """1-D: this rank's range, or the whole if every rank holds all of it."""
    whole: bool
    """Whether every rank holds all of it."""

    def has(self, name: str) -> bool:
        """Say whether a tensor has this kind of state."""
        return any(extent.name == name for extent in self.layout.extents)

    def of_rank(self, rank: int) -> Array:
        """Return ``rank``'s range of the array, where this rank holds it."""
        return self.array[self.partition.of(rank).slice] if self.whole else self.array


class OptimizerState:
    """The state of one flat layout's tensors on this rank.

    Args:
        layout: Where the parameters lie.
        partition: Which rank holds which range of them.
        rank: This rank.
        whole: Keep state for all elements on every rank, instead of for this rank's range.
        optimizers: Each tensor's optimizer, by name; the same object for the same settings.
    """

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        rank: int,
        whole: bool,
        optimizers: Mapping[str, Optimizer],
    ) -> None:
        self.layout = layout
        self.partition = partition
        self.owned = Range(0, layout.numel) if whole else partition.of(rank)
        self.steps = {extent.name: 0 for extent in layout.extents}
        """Updates that each tensor has had."""
        self._rank = rank
        self._whole = whole
        self._optimizers = optimizers
        self.kept = {spec.name: self._keep(spec, names) for spec, names in self._specs()}
        self.master: Array | None = None
        if layout.dtype != "float32":
            self.master = _zeros(self.owned.last - self.owned.first, "float32")

    def _specs(self) -> Iterator[tuple[StateSpec, list[str]]]:
        """Yield every kind of state with the tensors that have it."""
        found: dict[str, tuple[StateSpec, list[str]]] = {}
        for extent in self.layout.extents:
            for spec in self._optimizers[extent.name].states(extent.shape):
                found.setdefault(spec.name, (spec, []))[1].append(extent.name)
        yield from found.values()

    def _keep(self, spec: StateSpec, names: Sequence[str]) -> Kept:
        if spec.shape is not None:
            shapes = {name: self._shape_of(spec.name, name) for name in names}
            layout = FlatLayout.build(shapes, dtype=spec.dtype, alignment=1)
            partition = Partition.build(layout.numel, self.partition.size)
            return Kept(spec, layout, partition, _zeros(layout.numel, spec.dtype), whole=True)
        layout, partition = _layout_of_some(self.layout, self.partition, set(names), dtype=spec.dtype)
        numel = layout.numel if self._whole else partition.counts[self._rank]
        return Kept(spec, layout, partition, _zeros(numel, spec.dtype), whole=self._whole)

    def _shape_of(self, state: str, name: str) -> tuple[int, ...]:
        specs = self._optimizers[name].states(self.layout.of(name).shape)
        shape = next(spec.shape for spec in specs if spec.name == state)
        assert shape is not None
        return shape

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of its tensors, each once, in the same order on every rank."""
        return list({id(one): one for one in self._optimizers.values()}.values())

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        held = sum(kept.array.nbytes for kept in self.kept.values())
        return held + (0 if self.master is None else self.master.nbytes)

    # -- the update ------------------------------------------------------------------------------------------------

    def update_(
        self,
        param: Array,
        grad: Array,
        *,
        present: set[str],
        rates: Mapping[int, float],
        grad_scale: float,
        sum_over_ranks: SumOverRanks,
    ) -> None:
        """Update parameters and state in place.

        Args:
            param: The owned range of the parameters, in the layout's dtype.
            grad: The owned range of the summed gradient.
            present: Tensors that have a gradient; the same on every rank.
            rates: The learning rate of every optimizer, by its `id`.
            grad_scale: What gradients are multiplied by first.
            sum_over_ranks: Sums small float64 arrays over the ranks, for optimizers that look at whole tensors.
        """
        for name in present:
            self.steps[name] += 1
        target, copy_out = (param, None) if self.master is None else (self.master, param)
        for optimizer in self.optimizers:
            if isinstance(optimizer, TensorOptimizer):
                parts = [
                    self._part(name, rates[id(optimizer)], target, grad, copy_out, grad_scale)
                    for name in self.steps
                    if name in present and self._optimizers[name] is optimizer
                ]
                _drive(optimizer, parts, sum_over_ranks)
        for optimizer, step, run, state in self._runs(present):
            if isinstance(optimizer, ElementwiseOptimizer):
                optimizer.update_(
                    target[run],
                    grad[run],
                    state,
                    lr=rates[id(optimizer)],
                    step=step,
                    grad_scale=grad_scale,
                    copy_out=None if copy_out is None else copy_out[run],
                )

    def _runs(self, present: set[str]) -> Iterator[tuple[Optimizer, int, slice, dict[str, Array]]]:
        """Yield stretches of the owned range that one kernel call can update: (optimizer, step, where, state)."""
        # State that only some tensors have lies without gaps for the others: then each tensor is a stretch of its own.
        alike = all(len(kept.layout.extents) == len(self.layout.extents) for kept in self.kept.values())

        def settings(overlap: Overlap) -> tuple[bool, int, int, str]:
            name = overlap.extent.name
            return name in present, id(self._optimizers[name]), self.steps[name], "" if alike else name

        overlaps = self.layout.overlaps(self.owned.first, self.owned.last)
        for (here, _, step, _), group in groupby(overlaps, key=settings):
            if here:
                stretch = list(group)
                name = stretch[0].extent.name
                run = slice(stretch[0].in_range.start, stretch[-1].in_range.stop)
                state = {kind: kept.array[run] for kind, kept in self.kept.items()} if alike else self._states_of(name)
                yield self._optimizers[name], step, run, state

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
        first, last = max(extent.offset, self.owned.first), min(extent.last, self.owned.last)
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
            state=self._states_of(name),
            lr=rate,
            step=self.steps[name],
            grad_scale=grad_scale,
            copy_out=None if copy_out is None else copy_out[here],
        )

    def _states_of(self, name: str) -> dict[str, Array]:
        """Return one tensor's part of every kind of state that it has."""
        return {kind: self._state_of(kept, name) for kind, kept in self.kept.items() if kept.has(name)}

    def _state_of(self, kept: Kept, name: str) -> Array:
        """Return one tensor's part of a kind of state: in its own shape, or 1-D beside the parameter's part."""
        extent = kept.layout.of(name)
        if kept.spec.shape is not None:
            return kept.array[extent.slice].reshape(extent.shape)
        start = 0 if kept.whole else kept.partition.of(self._rank).first
        stop = start + kept.array.size
        first, last = max(extent.offset, start), min(extent.last, stop)
        return kept.array[first - start : last - start] if first < last else kept.array[:0]

    # -- master weights --------------------------------------------------------------------------------------------

    def take_master_from(self, param: Array, *, names: Collection[str]) -> None:
        """Set the master weights of some tensors to the parameters' values: after they were written."""
        if self.master is None:
            return
        for overlap in self.layout.overlaps(self.owned.first, self.owned.last):
            if overlap.extent.name in names:
                native.cast_into(self.master[overlap.in_range], param[overlap.in_range])

    def round_master_into(self, param: Array) -> None:
        """Set the parameters to the rounded master weights: after loading."""
        if self.master is not None:
            native.cast_into(param, self.master)


def _drive(optimizer: TensorOptimizer, parts: Sequence[TensorPart], sum_over_ranks: SumOverRanks) -> None:
    """Run an update that asks for sums over the ranks until it is done."""
    update = optimizer.update_parts_(parts)
    try:
        asked = next(update)
        while True:
            asked = update.send(sum_over_ranks(asked))
    except StopIteration:
        return


def _zeros(numel: int, dtype: str) -> Array:
    array: Array = HostDevice().empty(numel, dtype)
    array.fill(0)
    return array


def _layout_of_some(
    layout: FlatLayout, partition: Partition, names: set[str], *, dtype: str
) -> tuple[FlatLayout, Partition]:
    """Return where the elements of some tensors lie once the others are left out, and who holds them.

    A rank's range stays one range: tensors keep their order.
    """
    if len(names) == len(layout.extents):
        return replace(layout, dtype=dtype), partition
    some = FlatLayout.build(
        {extent.name: extent.shape for extent in layout.extents if extent.name in names}, dtype=dtype, alignment=1
    )
    counts = []
    for rank in range(partition.size):
        mine = partition.of(rank)
        overlaps = layout.overlaps(mine.first, mine.last)
        counts.append(sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names))
    return some, Partition.of_counts(counts)
