"""`Senders`: who rounds a summand that travels as codes, and which rank codes which stretch of it.

    over="all"        each rank for itself, the whole                 senders (0,) (1,) (2,) (3,)
    over="hosts"      the ranks of a host for their sum, a stretch each         (0, 1)     (2, 3)
    virtual shards    the ranks that have one in this micro-step, the whole     (0,) (1,) (2,)

    host of ranks 0 and 1      ├──── coded by 0 ────┼──── coded by 1 ────┤      of all elements, whoever owns them
    owners                     ├ rank 0 ─┼─ rank 1 ─┼─ rank 2 ─┼─ rank 3 ┤

Stretches do not follow the owners' ranges, which may be cut anew: what is kept of a stretch stays (decision 0145).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zerort.codec import SummandFormat
from zerort.layout import Partition

__all__ = ["Routes", "Senders", "overlap"]


def overlap(one: slice, other: slice) -> slice:
    """Return what two stretches have in common; an empty one within the first if that is nothing.

    >>> overlap(slice(0, 8), slice(4, 12)), overlap(slice(0, 4), slice(8, 12))
    (slice(4, 8, None), slice(4, 4, None))
    """
    first = min(max(one.start, other.start), one.stop)
    return slice(first, max(first, min(one.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class Senders:
    """Which ranks send a sum of theirs together. The same on every rank.

    >>> Senders.of_hosts((7, 7, 9), alignment=4).stretches(20)
    (slice(0, 12, None), slice(12, 20, None), slice(0, 20, None))
    """

    members: tuple[tuple[int, ...], ...]
    """The ranks of each sender, in rank order; senders in the order of their first ranks."""
    size: int
    """Ranks; those that are no sender's send nothing."""
    alignment: int
    """Elements: stretches begin at multiples of it."""

    @classmethod
    def of_hosts(cls, hosts: Sequence[int], *, alignment: int) -> Senders:
        """Let each host send the sum of its ranks.

        Args:
            hosts: For each rank, a number that tells its host.
            alignment: Elements that stretches begin at multiples of.
        """
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())), len(hosts), alignment)

    @classmethod
    def of_ranks(cls, count: int, *, size: int, alignment: int) -> Senders:
        """Let each of the first ``count`` of ``size`` ranks send its own."""
        return cls(tuple((rank,) for rank in range(count)), size, alignment)

    @property
    def sum_first(self) -> bool:
        """Whether ranks sum theirs before they send it."""
        return any(len(ranks) > 1 for ranks in self.members)

    def number_of(self, rank: int) -> int | None:
        """Return which sender a rank codes for; None: for none."""
        return next((number for number, ranks in enumerate(self.members) if rank in ranks), None)

    def beside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the same sender, this one included."""
        number = self.number_of(rank)
        return () if number is None else self.members[number]

    def stretches(self, numel: int) -> tuple[slice, ...]:
        """Return the elements that each rank codes, of ``numel``."""
        return _stretches(self, numel)


@lru_cache(maxsize=256)
def _stretches(senders: Senders, numel: int) -> tuple[slice, ...]:
    found = [slice(0, 0)] * senders.size
    for ranks in senders.members:
        cut = Partition.build(numel, len(ranks), alignment=senders.alignment)
        for place, rank in enumerate(ranks):
            found[rank] = cut.of(place).slice
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which codes go from which rank to which, for one partition over the owners."""

    senders: Senders
    partition: Partition

    def stretch(self, rank: int) -> slice:
        """Return the elements that a rank codes."""
        return self.senders.stretches(self.partition.numel)[rank]

    def part(self, rank: int, owner: int) -> slice:
        """Return the elements that ``rank`` codes for ``owner``."""
        return overlap(self.stretch(rank), self.partition.of(owner).slice)

    def counts(self, format: SummandFormat) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of the codes from each rank to each owner."""
        return _counts(self, format)

    def nbytes(self, format: SummandFormat, rank: int) -> int:
        """Return the bytes of all codes that a rank sends and gets."""
        counts = self.counts(format)
        return sum(counts[rank]) + sum(row[rank] for row in counts)

    def slice_counts(self) -> tuple[tuple[int, ...], ...]:
        """Return the elements of the slices that ranks give to those of the same sender, from each to each."""
        return _slice_counts(self.senders, self.partition.numel)

    def slices(self, rank: int) -> int:
        """Return the elements of slices that a rank gets of its sender's ranks, to sum them; 0 if it sums none."""
        beside, stretch = self.senders.beside(rank), self.stretch(rank)
        return len(beside) * (stretch.stop - stretch.start) if len(beside) > 1 else 0


@lru_cache(maxsize=256)
def _counts(routes: Routes, format: SummandFormat) -> tuple[tuple[int, ...], ...]:
    ranks = range(routes.senders.size)
    parts = [[routes.part(rank, owner) for owner in ranks] for rank in ranks]
    return tuple(tuple(format.nbytes(part.stop - part.start) for part in row) for row in parts)


@lru_cache(maxsize=256)
def _slice_counts(senders: Senders, numel: int) -> tuple[tuple[int, ...], ...]:
    stretches = senders.stretches(numel)
    rows = []
    for rank in range(senders.size):
        beside = senders.beside(rank)
        taking = beside if len(beside) > 1 else ()
        rows.append(tuple((one.stop - one.start) * (to in taking) for to, one in enumerate(stretches)))
    return tuple(rows)
