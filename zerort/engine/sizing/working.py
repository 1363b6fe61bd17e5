"""`WorkingMemory`: what computing and moving values take besides what rests, on one rank.

    buckets     where gradients are collected and reduced           `buckets` slots of the largest section
    gathered    units whose parameters are not where all ranks see them     `prefetch` + 1 slots of the largest unit
    streaming   what passes through on its way from a disk and back         `depth` slots of a chunk

All of it shrinks, if it changes at all, when more rests on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from zerort.config import Tier
from zerort.engine.offload_options import LEAST_CHUNK, OffloadOptions
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import cut_chunks
from zerort.engine.sizing.requirements import PARTS, SectionSize

__all__ = ["WorkingMemory", "WorkingSize", "offload_within"]

_CACHE_LINE: Final = 64  # bytes: sections of one slot start on one
_PAGE: Final = 4096  # bytes: arrays of one chunk start on one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSize:
    """Bytes of working memory of one rank."""

    buckets: int = 0
    """Gradient buckets in flight."""
    gathered: int = 0
    """Slots of gathered units."""
    streaming: int = 0
    """Slots of what streams between a disk and memory."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.buckets + self.gathered + self.streaming


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingMemory:
    """How much working memory a model needs, by what rests where."""

    sizes: Sequence[SectionSize]
    """What the sections take on the rank that takes most."""
    prefetch: int = 1
    """Units that are gathered ahead."""
    buckets: int = 2
    """Gradient buckets that may be in flight at once."""
    ties: int = 0
    """Units that another one is tied to, at most: they are gathered with it."""
    one_memory: bool = True
    """Whether all ranks see each other's shards: then what rests in memory is gathered where it is."""
    reach: frozenset[Tier] = frozenset({Tier.DEVICE, Tier.HOST})
    """Tiers that computing reaches without a copy: on a machine without a GPU, all memory."""
    open_ended: bool = False
    """Whether more units of these sizes may come: then room is kept for working on them when they are on a disk."""
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    """How large chunks are at most, and how many stream at once."""
    memory: int | None = None
    """Bytes that a budget has of memory, which may make chunks smaller; None: there is no budget."""

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk, at most."""
        offload = self.offload if self.memory is None else offload_within(self.memory, self.offload)
        return offload.chunk_nbytes // 4

    @property
    def depth(self) -> int:
        """Chunks that are in memory at once, at most."""
        return self.offload.depth

    def of(self, tiers: Sequence[SectionResidence]) -> WorkingSize:
        """Return what is needed if the sections' parts rest in these tiers."""
        if self.open_ended:
            tiers = [_on_disk(size) for size in self.sizes]
        units: dict[str, list[tuple[SectionSize, SectionResidence]]] = {}
        for size, one in zip(self.sizes, tiers, strict=True):
            units.setdefault(size.unit, []).append((size, one))
        return WorkingSize(
            buckets=self._buckets([[size for size, _ in sections] for sections in units.values()])
            + self.buckets * max(map(self._room, self.sizes, tiers), default=0),
            gathered=(self.prefetch + 1 + self.ties) * max(map(self._gathered, units.values()), default=0),
            streaming=self.depth * max(map(self._slot, self.sizes, tiers), default=0),
        )

    def _buckets(self, units: Sequence[Sequence[SectionSize]]) -> int:
        largest = count = 0
        for sizes in units:
            needing = [size for size in sizes if size.bucket]
            if needing:
                in_flight = self.buckets if any(size.is_held for size in needing) else 1
                largest = max(largest, *(size.bucket for size in needing))
                count = max(count, in_flight + len(needing) - 1)
        return largest * count

    def _room(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what a summed gradient takes until it is put away."""
        return 0 if tiers.gradient in self.reach else size.gradient

    def _gathered(self, unit: Sequence[tuple[SectionSize, SectionResidence]]) -> int:
        """Return what the gathered form of a unit takes in a slot."""
        return sum(
            _round_up(size.whole, _CACHE_LINE)
            for size, one in unit
            if one.parameter not in self.reach or not self.one_memory
        )

    def _slot(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what a chunk of a section takes on its way."""
        longest = max(last - first for first, last in pairwise(cut_chunks(size.numel, most=self.chunk_numel)))
        return sum(
            _round_up(longest * width, _PAGE)
            for part, widths in size.columns.items()
            if getattr(tiers, part) not in self.reach
            for width in widths
        )


def offload_within(memory: int, options: OffloadOptions) -> OffloadOptions:
    """Return options with chunks so small that all on their way together take about an eighth of ``memory`` at most.

    >>> [offload_within(memory, OffloadOptions()).chunk_nbytes for memory in (96 * 1024**2, 1024**4)]
    [1048576, 8388608]
    """
    values = 4  # of float32 in a chunk, about: moments, master weights, parameter, gradient; of float64 twice the bytes
    share = max(memory // 8 // options.depth // values, LEAST_CHUNK)
    return replace(options, chunk_nbytes=min(options.chunk_nbytes, share))


def _on_disk(size: SectionSize) -> SectionResidence:
    """Return where the parts of a section rest if all that can is on a disk."""
    return SectionResidence(**{part: Tier.NVME if part in size.movable else Tier.DEVICE for part in PARTS})  # type: ignore[arg-type]


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
