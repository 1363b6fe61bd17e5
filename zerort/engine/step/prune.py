"""`prune`: after an update, the smallest elements of tensors with a `Sparsity` become zero, and stay so.

    how many      from the schedule and the number of the update
    which         the k-th smallest magnitude of the master weights: histograms of 11 bits of their patterns at a time,
                  summed over the ranks; of equal ones those with the lowest index. Or two of every four neighbours
    from then on  their gradients count as zero, so that they and their state stay zero

Sums are of whole numbers: the same mask on any number of ranks (decision 0151).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.step.state import OptimizerState
from zerort.layout import Placement
from zerort.optim.forms.sparsity import MASK, bits_in, put_bits
from zerort.typing import Array

__all__ = ["prune"]

_DIGIT: Final = 11
"""Bits of a pattern that one histogram tells apart."""
_PIECE: Final = 1 << 20
"""Elements that are looked at together."""


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


class _Piece(NamedTuple):
    """Some elements of a tensor on this rank."""

    place: slice
    """Where they lie in the owned range."""
    keys: Array
    """Their magnitudes as whole numbers of the same order; of those that are pruned larger than any."""
    pruned: Array
    """Which of them are."""


class _Tensors:
    """This rank's part of a section's tensors. All of it is in memory."""

    def __init__(self, section: Section, state: OptimizerState, *, rank: int) -> None:
        self._section, self._state, self._rank = section, state, rank
        self.masters: Array = section.owned.memory if state.master is None else state.master.memory

    def pieces(self, name: str) -> Iterator[_Piece]:
        state = self._state
        unsigned = np.dtype(f"u{self.masters.itemsize}")
        mask = state.entries[MASK].column.memory
        for overlap in state.layout.overlaps(*state.owned):
            if overlap.extent.name == name:
                for first in range(overlap.in_range.start, overlap.in_range.stop, _PIECE):
                    place = slice(first, min(first + _PIECE, overlap.in_range.stop))
                    keys = self.masters[place].view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
                    pruned = bits_in(mask, place)
                    np.putmask(keys, pruned, np.iinfo(unsigned).max)
                    yield _Piece(place, keys, pruned)

    def prune(self, name: str, chosen: _Chosen) -> None:
        """Prune elements below a threshold, and some that equal it."""
        left = chosen.equal
        for piece in self.pieces(name):
            equal = np.flatnonzero(piece.keys == chosen.threshold)[:left]
            left -= equal.size
            more = piece.keys < chosen.threshold
            more[equal] = True
            self._zero(name, piece, more)

    def prune_two_of_four(self, name: str) -> None:
        """Prune the two smallest of every four neighbours; the first ones of equal ones."""
        for piece in self.pieces(name):
            order = np.argsort(piece.keys.reshape(-1, 4), axis=1, kind="stable")
            more = np.zeros((piece.keys.size // 4, 4), bool)
            np.put_along_axis(more, order[:, :2], values=True, axis=1)
            self._zero(name, piece, more.reshape(-1))

    def _zero(self, name: str, piece: _Piece, more: Array) -> None:
        """Set elements and their state to zero, and remember them."""
        section, state = self._section, self._state
        for array in (section.owned.memory, *([] if state.master is None else [state.master.memory])):
            array[piece.place][more] = 0
        for kind, entry in state.entries.items():
            if kind != MASK and entry.has(name):
                begin = state.owned.first - state.layout.of(name).offset  # of the owned range, counted in the tensor
                begin += entry.layout.of(name).offset - entry.first_of(self._rank)
                entry.column.memory[begin + piece.place.start : begin + piece.place.stop][more] = 0
        put_bits(state.entries[MASK].column.memory, piece.place, piece.pruned | more)


def _smallest(context: Context, tensors: _Tensors, wanted: Mapping[str, int]) -> dict[str, _Chosen]:
    """Return which elements of some tensors are the smallest. Every rank calls this."""
    if not wanted:
        return {}
    is_sharded = context.plan.state.placement is Placement.SHARDED
    shard = context.mesh.shard
    names, left = list(wanted), np.array(list(wanted.values()))
    prefix = [0] * len(names)
    shift = bits = 8 * tensors.masters.itemsize
    while shift:
        width = min(_DIGIT, shift)
        shift -= width
        counts = np.zeros((len(names), 1 << width), np.int64)
        for at, name in enumerate(names):
            for piece in tensors.pieces(name):
                found = piece.keys >> piece.keys.dtype.type(shift)
                if shift + width < bits:  # below others that are known
                    found = found[found >> found.dtype.type(width) == prefix[at]] & found.dtype.type((1 << width) - 1)
                counts[at] += np.bincount(found.astype(np.intp), minlength=1 << width)
        if is_sharded:
            # not-gpu: sparsity is refused on GPUs
            counts = shard.all_reduce(counts.reshape(-1), name="prune").wait().reshape(counts.shape)
        sums = counts.cumsum(axis=1)
        for at in range(len(names)):
            digit = int(np.searchsorted(sums[at], left[at]))
            left[at] -= sums[at, digit] - counts[at, digit]
            prefix[at] = prefix[at] << width | digit
    equal = np.array([_count_equal(tensors, name, prefix[at]) for at, name in enumerate(names)], np.int64)
    before = np.zeros(len(names), np.int64)
    if is_sharded:
        # not-gpu: sparsity is refused on GPUs
        every = shard.all_gather(equal, name="prune").wait().reshape(shard.size, -1)
        before = every[: shard.rank].sum(axis=0)  # ranges lie in the order of the ranks
    mine = np.clip(left - before, 0, equal)
    return {name: _Chosen(prefix[at], int(mine[at])) for at, name in enumerate(names)}


def _count_equal(tensors: _Tensors, name: str, key: int) -> int:
    return sum(int(np.count_nonzero(piece.keys == key)) for piece in tensors.pieces(name))
