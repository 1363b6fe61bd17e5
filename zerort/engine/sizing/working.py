"""`WorkingMemory`: what computing and moving values take besides what rests, on one rank.

    buckets     where gradients are collected and reduced           `buckets` slots of the largest section
                where slices of a fixed tree arrive unsummed        the same once more
                codes of gradients, while they travel               as many of the section that takes most
                what these have lost, if it is kept                 two bytes per parameter
    gathered    units whose parameters are not where all ranks see them     `prefetch` + 1 slots of the largest unit
                codes of parameters, while they travel                      as many of the largest section
                what is decoded from codes that rest, and these, unless they are in reach: part of the unit
    host_copy   whole parameters that stay on each host between gathers     once for all of its ranks
    streaming   what passes through on its way from a disk and back         `depth` slots of a chunk
                pages of tables that are updated by rows, and these rows    one window of a chunk
                on GPUs also what passes between them and their hosts       3 slots of a chunk

All of it shrinks, if it changes at all, when more rests on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Final

from zerort.config import Tier
from zerort.config.offload import LEAST_CHUNK, OffloadOptions
from zerort.engine.model.slot_set import bucket_slots, gather_slots, summed_slots
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import cut_chunks
from zerort.engine.residence.folded import folding_room_nbytes
from zerort.engine.residence.gradients import room_nbytes
from zerort.engine.rows.stored import window_nbytes, window_numel
from zerort.engine.sizing.requirements import UnitTies
from zerort.engine.sizing.section_size import PARTS, SectionSize
from zerort.streaming.transfers import ArrayTransfer, StoreTransfer
from zerort.streaming.update_staging import STAGING_DEPTH

__all__ = ["WorkingMemory", "WorkingSize", "offload_within"]

_CACHE_LINE: Final = 64  # bytes: sections of one slot start on one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSize:
    """Bytes of working memory of one rank."""

    buckets: int = 0
    """Gradient buckets in flight."""
    gathered: int = 0
    """Slots of gathered units."""
    host_copy: int = 0
    """Whole parameters that stay between gathers."""
    streaming: int = 0
    """Slots of what streams between a disk and memory."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.buckets + self.gathered + self.host_copy + self.streaming


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingMemory:
    """How much working memory a model needs, by what rests where."""

    sizes: Sequence[SectionSize]
    """What the sections take on the rank that takes most."""
    prefetch: int = 1
    """Units that are gathered ahead."""
    buckets: int = 2
    """Gradient buckets that may be in flight at once."""
    ties: Mapping[str, UnitTies] = field(default_factory=dict)
    """What units use of others, by unit: those are gathered with them, and gradients of theirs have buckets, too."""
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
            buckets=self._buckets({unit: [size for size, _ in sections] for unit, sections in units.items()})
            + self._summed([(self._room(size, one), size.is_tied) for size, one in zip(self.sizes, tiers, strict=True)])
            + self.buckets * max((one.sent for one in self.sizes), default=0)
            + sum(one.residual for one in self.sizes),
            gathered=self._gathered({unit: self._whole(sections) for unit, sections in units.items()})
            + self._gathered({unit: max(size.codes for size, _ in sections) for unit, sections in units.items()}),
            host_copy=sum(size.copied for size in self.sizes if self._is_copied(size)),
            streaming=self.depth * max(map(self.streamed, self.sizes, tiers), default=0)
            + max(map(self.window, self.sizes, tiers), default=0)
            + STAGING_DEPTH * max(map(self.staged, self.sizes, tiers), default=0),
        )

    def apart(self, tiers: Sequence[SectionResidence]) -> int:
        """Return the most that gathers take of units that only some ranks use: one of this rank's, and one it joins.

        0 where they cannot be: on GPUs, or with parameters that are coded or copied (`model/apart.py`).
        """
        if Tier.HOST not in self.reach or any(size.codes or size.is_decoded or size.copied for size in self.sizes):
            return 0
        pairs = zip(self.sizes, tiers, strict=True)
        return 2 * max((size.whole for size, one in pairs if self._is_moved(one)), default=0)

    def _buckets(self, units: Mapping[str, Sequence[SectionSize]]) -> int:
        held = any(size.is_held for size in self.sizes)  # or gradients are whole, of all alike
        largest = count = 0
        for unit in {**units, **self.ties}:
            needing = [size.bucket for size in units.get(unit, ()) if size.bucket]
            tied = len(self.ties[unit].trained) if held and unit in self.ties else 0
            if needing or tied:
                largest = max(largest, *needing, 0)
                count = max(count, bucket_slots(len(needing), tied, in_flight=self.buckets if held else 1))
        return largest * count

    def _summed(self, rooms: Sequence[tuple[int, bool]]) -> int:
        """Return what summed gradients take until they are put away, given each section's room, and if it is tied."""
        count = max((summed_slots(buckets=self.buckets, is_tied=tied) for room, tied in rooms if room), default=0)
        return count * max((room for room, _ in rooms), default=0)

    def _room(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what a reduction takes until it is folded or put away."""
        if tiers.gradient in self.reach or not size.gradient:
            return size.arriving
        width = int(size.columns["gradient"][0])
        if size.arriving:
            numel, ranks = size.numel, size.arriving // (width * size.numel)
            return folding_room_nbytes(numel, width, ranks=ranks, most_read=self.chunk_numel, exchanged=size.exchanged)
        return room_nbytes(size.gradient // width, width, most_read=self.chunk_numel if size.reductions > 1 else 0)

    def _gathered(self, wholes: Mapping[str, int]) -> int:
        count = 0
        for unit in {**wholes, **self.ties}:
            owners = self.ties[unit].owners if unit in self.ties else frozenset[str]()
            together = sum(wholes.get(one, 0) > 0 for one in (unit, *owners))
            count = max(count, gather_slots(together, prefetch=self.prefetch))
        return count * max(wholes.values(), default=0)

    def _whole(self, unit: Sequence[tuple[SectionSize, SectionResidence]]) -> int:
        """Return what the gathered form of a unit takes in a slot."""
        total = 0
        for size, one in unit:
            is_moved = self._is_moved(one)
            if (is_moved or size.codes or size.is_decoded) and not self._is_copied(size):
                total += _round_up(size.whole + size.decoded_from * is_moved, _CACHE_LINE)
        return total

    def _is_moved(self, tiers: SectionResidence) -> bool:
        """Say whether parameters that rest there are not gathered where they are."""
        return tiers.parameter not in self.reach or not self.one_memory

    def _is_copied(self, size: SectionSize) -> bool:
        """Say whether all of a section stays on each host: where it would travel otherwise."""
        return size.copied > 0 and (not self.one_memory or size.codes > 0)

    def streamed(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what a chunk of a section takes in memory on its way from a disk and back; 0 if nothing of it does."""
        parts = [part for part in size.columns if getattr(tiers, part) is Tier.NVME]
        return 0 if size.row_width else self._chunk(size, parts, alignment=StoreTransfer.alignment)

    def window(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what pages of a table and copies of their rows take in memory; 0 if none of it is on a disk."""
        parts = [part for part in ("parameter", "state") if getattr(tiers, part) is Tier.NVME]
        stored = [int(width) for part in parts for width in size.columns.get(part, ())]
        if not (size.row_width and stored):
            return 0
        copied = [int(width) for part in ("parameter", "state") for width in size.columns[part]]
        numel = window_numel(size.numel, size.row_width, stored, chunk_numel=self.chunk_numel)
        return window_nbytes(stored, copied, numel=numel)

    def staged(self, size: SectionSize, tiers: SectionResidence) -> int:
        """Return what a chunk takes on its way between a GPU and its host; 0 if nothing of it does."""
        away = [part for part in size.columns if getattr(tiers, part) not in self.reach]
        if not away or Tier.HOST in self.reach:
            return 0
        moved = away if self.offload.update_on == "device" else [part for part in size.columns if part not in away]
        return self._chunk(size, moved, alignment=ArrayTransfer.alignment)

    def _chunk(self, size: SectionSize, parts: Sequence[str], *, alignment: int) -> int:
        """Return the bytes of a section's longest chunk of some parts: nothing of one that is not updated."""
        if not size.is_trained:
            return 0
        longest = max(last - first for first, last in pairwise(cut_chunks(size.numel, most=self.chunk_numel)))
        return sum(_round_up(longest * width, alignment) for part in parts for width in size.columns[part])


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


def _round_up(nbytes: int | Fraction, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
