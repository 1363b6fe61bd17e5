"""`prune`: after an update, the smallest elements of tensors with a `Sparsity` become zero, and stay so.

    how many      from the schedule and the number of the update
    which         the k-th smallest magnitude of the master weights: histograms of 11 bits of their patterns at a time,
                  summed over the ranks; of equal ones those with the lowest index. Or two of every four neighbours
    from then on  their gradients count as zero, so that they and their state stay zero

Sums are of whole numbers: the same mask on any number of ranks (decision 0151), of hosts or GPUs (decision 0190).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.step.state import OptimizerState
from zerort.layout import Placement
from zerort.optim.forms.masks import DIGIT
from zerort.optim.forms.sparsity import MASK, masks_for
from zerort.typing import Array

__all__ = ["prune"]


def prune(context: Context, sections: Sequence[Section], present: set[str]) -> None:
    """Prune what the schedules say, of tensors that were updated. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        sections: Those that were updated.
        present: Tensors that had a gradient; the same on every rank.
    """
    for section in sections:
        state = section.state
        assert state is not None
        if not state.sparsities:
            continue
        wanted = {
            name: sparsity.count_at(context.run.updates, section.layout.of(name).numel) - state.pruned[name]
            for name, sparsity in state.sparsities.items()
            if name in present
        }
        wanted = {name: count for name, count in wanted.items() if count > 0}
        in_any_place = {name: count for name, count in wanted.items() if state.sparsities[name].pattern is None}
        tensors = _Tensors(section, state, rank=context.mesh.shard.rank)
        for name, chosen in _smallest(context, tensors, in_any_place).items():
            tensors.prune(name, chosen)
        for name in wanted.keys() - in_any_place.keys():
            tensors.prune_two_of_four(name)
        for name, count in wanted.items():
            state.pruned[name] += count


class _Chosen(NamedTuple):
    """The elements that are pruned on this rank: those below a pattern, and the first so many that equal it."""

    threshold: int
    equal: int
    of: int
    """How many equal it on this rank."""


class _Tensors:
    """This rank's part of a section's tensors. All of it is where computing happens."""

    def __init__(self, section: Section, state: OptimizerState, *, rank: int) -> None:
        self._section, self._state, self._rank = section, state, rank
        self.masters: Array = section.owned.memory if state.master is None else state.master.memory
        self._masks = masks_for(self.masters)
        self._places = {one.extent.name: one.in_range for one in state.layout.overlaps(*state.owned)}

    def count(self, name: str, counts: Array, *, shift: int, width: int, prefix: int) -> None:
        """Count bits of magnitudes (`masks.add_histogram`)."""
        if name in self._places:
            values, mask = self._elements(name)
            self._masks.add_histogram(counts, values, mask, shift=shift, width=width, prefix=prefix)

    def prune(self, name: str, chosen: _Chosen) -> None:
        """Prune elements below a threshold, and some that equal it."""
        if name in self._places:
            values, mask = self._elements(name)
            self._masks.mark_smallest(mask, values, **chosen._asdict())
            self._zero(name, mask)

    def prune_two_of_four(self, name: str) -> None:
        """Prune the two smallest of every four neighbours; the first ones of equal ones."""
        if name in self._places:
            values, mask = self._elements(name)
            self._masks.mark_two_of_four(mask, values)
            self._zero(name, mask)

    def _elements(self, name: str) -> tuple[Array, Array]:
        """Return a tensor's master weights, and their mask."""
        place = self._places[name]
        mask = self._state.entries[MASK].column.memory
        return self.masters[place], mask[place.start // 8 : -(-place.stop // 8)]

    def _zero(self, name: str, mask: Array) -> None:
        """Set what is pruned, and its state, to zero."""
        section, state, place = self._section, self._state, self._places[name]
        for array in (section.owned.memory, *([] if state.master is None else [state.master.memory])):
            self._masks.zero_marked(array[place], mask)
        for kind, entry in state.entries.items():
            if kind != MASK and entry.has(name):
                begin = state.owned.first - state.layout.of(name).offset  # of the owned range, counted in the tensor
                begin += entry.layout.of(name).offset - entry.first_of(self._rank)
                self._masks.zero_marked(entry.column.memory[begin + place.start : begin + place.stop], mask)


def _smallest(context: Context, tensors: _Tensors, wanted: Mapping[str, int]) -> dict[str, _Chosen]:
    """Return which elements of some tensors are the smallest. Every rank calls this."""
    if not wanted:
        return {}
    is_sharded = context.plan.state.placement is Placement.SHARDED
    shard, device = context.mesh.shard, context.device
    names, left = list(wanted), np.array(list(wanted.values()))
    prefix, equal = [0] * len(names), np.zeros(len(names), np.int64)
    shift = 8 * tensors.masters.itemsize
    while shift:
        width = min(DIGIT, shift)
        shift -= width
        counted = device.zeros(len(names) << width, np.int64)
        for at, name in enumerate(names):
            row = counted[at << width : (at + 1) << width]
            tensors.count(name, row, shift=shift, width=width, prefix=prefix[at])
        counts = own = device.fetch(counted).reshape(len(names), -1)
        if is_sharded:
            # not-gpu: counts are numbers of the host
            counts = shard.all_reduce(own.reshape(-1), name="prune").wait().reshape(own.shape)
        sums = counts.cumsum(axis=1)
        for at in range(len(names)):
            digit = int(np.searchsorted(sums[at], left[at]))
            left[at] -= sums[at, digit] - counts[at, digit]
            prefix[at], equal[at] = prefix[at] << width | digit, own[at, digit]
    before = np.zeros(len(names), np.int64)
    if is_sharded:
        # not-gpu: counts are numbers of the host
        every = shard.all_gather(equal, name="prune").wait().reshape(shard.size, -1)
        before = every[: shard.rank].sum(axis=0)  # ranges lie in the order of the ranks
    mine = np.clip(left - before, 0, equal)
    return {name: _Chosen(prefix[at], int(mine[at]), int(equal[at])) for at, name in enumerate(names)}
