"""What an `OptimizerState` is made of: `StateEntry`, one kind of state; `Streaming`, what of it is not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import FlatLayout, Partition
from zerort.optim import StateSpec
from zerort.storage.session import StorageSession

__all__ = ["StateEntry", "Streaming", "layout_of_some"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a section's chunks are cut, and what of its state is not in memory."""

    storage: StorageSession
    chunk_numel: int
    """Elements of a chunk, at most."""
    state: bool
    """Whether state rests elsewhere; if not, only the cuts count."""
    resident_nbytes: int = 0
    """Of state that does, the first bytes that stay in memory."""

    def resident_chunks(self, cuts: Sequence[int], width: Fraction) -> int:
        """Return how many chunks' state is in memory, with so many bytes per element."""
        chunks = len(cuts) - 1
        if not self.state:
            return chunks
        return max(at for at in range(chunks + 1) if width * cuts[at] <= self.resident_nbytes)


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One kind of state: a column, and where the tensors' parts of it lie."""

    spec: StateSpec
    layout: FlatLayout
    """Of the tensors that have this kind of state; in the spec's dtype."""
    partition: Partition
    """Which rank stores which range in a checkpoint; and, for sharded state, holds it."""
    column: ChunkedArray
    """This rank's range, or the whole if every rank holds all of it."""
    whole: bool
    """Whether every rank holds all of it; then it is in memory."""

    def has(self, name: str) -> bool:
        """Say whether a tensor has this kind of state."""
        return any(extent.name == name for extent in self.layout.extents)

    def first_of(self, rank: int) -> int:
        """Return the layout's element at which the column of ``rank`` begins."""
        return 0 if self.whole else self.partition.of(rank).first


def layout_of_some(
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
        overlaps = layout.overlaps(mine.first, mine.stop)
        counts.append(sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names))
    return some, Partition.of_counts(counts)
