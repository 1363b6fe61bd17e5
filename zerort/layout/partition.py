"""Cut ``[0, numel)`` into one contiguous range per rank.

    Partition.build(20, 3, alignment=4)            counts (8, 8, 4)
    Partition.build(20, 3, weights=(1, 0, 3))      counts (5, 0, 15)

    element   0        8        16   20
              ├ rank 0 ┼ rank 1 ┼ r2 ┤

Ranges follow the ranks' order and tile the whole exactly. Uneven and empty ranges are ordinary: weights follow the
ranks' capacity, and nothing is padded to make counts equal. Ranks build their partitions apart from each other and
must not disagree by one element, so there is no rounding here, only whole numbers.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

from zerort.errors import CallError
from zerort.layout.integers import as_int, prove_int, prove_range
from zerort.layout.ranges import Move, Piece, Range

__all__ = ["Partition"]


@dataclass(frozen=True, slots=True)
class Partition:
    """Which rank holds which range of ``[0, numel)``: a value that `build` computes and the constructor proves.

    >>> partition = Partition.build(10, 4)
    >>> partition.counts
    (3, 3, 2, 2)
    >>> partition.of(1), partition.owner(6)
    (Range(first=3, stop=6), 2)
    """

    numel: int
    """The elements of the whole."""

    counts: tuple[int, ...]
    """The elements of each rank's range, by rank."""

    alignment: int = 1
    """Elements. A range starts at a multiple of it, or is empty and starts at `numel`."""

    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each rank's range starts, by rank."""

    even: bool = field(init=False, repr=False, compare=False)
    """Whether all ranks hold equally many elements, so that a collective needs no counts."""

    @classmethod
    def build(
        cls, numel: int, size: int, *, weights: Sequence[float | Fraction] | None = None, alignment: int = 1
    ) -> Partition:
        """Cut as fairly as the alignment allows; the same arguments give the same cut on every rank.

        [Note: Fair cut] Rank r's ideal share is ``numel * weights[r] / sum(weights)``. It gets the whole alignment
        blocks in that share; the blocks left over go to the largest remainders, lower ranks first (Hamilton's rule).
        If the last block is short, it goes to the last rank with a weight, which then takes no part in the remainders:
        so every count is less than one block away from its ideal, and every range starts at a block.

        Args:
            numel: The elements of the whole; may be 0.
            size: The number of ranks.
            weights: One number per rank, not negative and not all zero; only their proportions matter. Equal if None.
                They have to be the same on every rank: gather measured capacities first.
            alignment: Elements; every range starts at a multiple of it.

        Raises:
            CallError: If an argument is out of its bounds.
        """
        numel = as_int(numel, what="numel")
        size = as_int(size, what="the number of ranks", minimum=1)
        alignment = as_int(alignment, what="the alignment", minimum=1)
        whole = [1] * size if weights is None else _whole_weights(weights, size=size)
        # The ideal share of rank r, in blocks, is shares[r][0] + shares[r][1] / scale.
        scale = sum(whole) * alignment
        shares = [divmod(numel * weight, scale) for weight in whole]
        blocks = [quotient for quotient, _ in shares]

        full, short = divmod(numel, alignment)
        heir = max(rank for rank in range(size) if whole[rank])
        rivals = [rank for rank in range(size) if not (short and rank == heir)]
        rivals.sort(key=lambda rank: -shares[rank][1])  # stable: lower ranks stay first
        for rank in rivals[: full - sum(blocks)]:
            blocks[rank] += 1

        counts = [count * alignment for count in blocks]
        counts[heir] += short
        return cls(numel=numel, counts=tuple(counts), alignment=alignment)

    @classmethod
    def of_counts(cls, counts: Iterable[int], *, alignment: int = 1) -> Partition:
        """Take the ranks' counts as they are, such as those a checkpoint was written with.

        >>> Partition.of_counts((4, 0, 2)).offsets
        (0, 4, 4)

        Raises:
            CallError: If there are none, one is negative, or a range does not start at a multiple of the alignment.
        """
        plain = tuple(as_int(count, what=f"the count of rank {rank}") for rank, count in enumerate(counts))
        return cls(numel=sum(plain), counts=plain, alignment=as_int(alignment, what="the alignment", minimum=1))

    def __post_init__(self) -> None:
        prove_int(self.numel, what="the partition's numel")
        prove_int(self.alignment, what="the partition's alignment", minimum=1)
        if not isinstance(self.counts, tuple) or not self.counts:
            raise CallError(f"Expected the counts to be a tuple with one int per rank, got {self.counts!r}.")
        for rank, count in enumerate(self.counts):
            prove_int(count, what=f"the count of rank {rank}")
        if sum(self.counts) != self.numel:
            raise CallError(
                f"Expected counts that sum to numel {self.numel}, got {sum(self.counts)}. "
                "Partition.of_counts computes numel by itself."
            )
        offsets = tuple(accumulate(self.counts[:-1], initial=0))
        for rank, offset in enumerate(offsets):
            if offset % self.alignment and offset != self.numel:
                raise CallError(
                    f"Expected rank {rank} to start at a multiple of {self.alignment} elements, got {offset}. "
                    "Partition.build aligns by itself."
                )
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "even", len(set(self.counts)) == 1)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.counts)

    def of(self, rank: int) -> Range:
        """Return the range of one rank.

        Raises:
            CallError: If there is no such rank.
        """
        if not 0 <= rank < len(self.counts):
            raise CallError(f"Expected a rank from 0 to {self.size - 1}, got {rank}.")
        first = self.offsets[rank]
        return Range(first, first + self.counts[rank])

    def owner(self, index: int) -> int:
        """Return the rank that holds one element.

        Raises:
            CallError: If there is no such element.
        """
        if not 0 <= index < self.numel:
            raise CallError(f"Expected an element of [0, {self.numel}), got {index}.")
        return self._owner(index)

    def _owner(self, index: int) -> int:
        # Empty ranges share their offset with the range behind them, so the last rank starting here is the owner.
        return bisect_right(self.offsets, index) - 1

    def overlaps(self, first: int, stop: int) -> tuple[Piece, ...]:
        """Return who holds ``[first, stop)``: pieces in the order of the ranks, without empty ones.

        >>> Partition.of_counts((4, 0, 2)).overlaps(3, 6)
        (Piece(rank=0, first=3, stop=4), Piece(rank=2, first=4, stop=6))

        Raises:
            CallError: If the range leaves ``[0, numel)``.
        """
        prove_range(first, stop, numel=self.numel)
        pieces = []
        while first < stop:
            rank = self._owner(first)
            end = min(stop, self.offsets[rank] + self.counts[rank])
            pieces.append(Piece(rank, first, end))
            first = end
        return tuple(pieces)

    def within(self, first: int, stop: int) -> Partition:
        """Return how ``[first, stop)``, counted from its first element, is cut by the same cuts.

        >>> Partition.of_counts((4, 4, 2)).within(3, 8).counts
        (1, 4, 0)

        Raises:
            CallError: If the range leaves ``[0, numel)``.
        """
        held = {piece.rank: piece.stop - piece.first for piece in self.overlaps(first, stop)}
        return Partition.of_counts(held.get(rank, 0) for rank in range(self.size))

    def reshard(self, to: Partition) -> tuple[Move, ...]:
        """Return what goes where when the same elements are cut anew, in the order of the elements.

        Every element is in exactly one move; moves whose source and target are the same rank are included, since a
        checkpoint read back by another number of ranks has to be read there too.

        >>> for move in Partition.build(6, 2).reshard(Partition.build(6, 3)):
        ...     print(move)
        Move(source=0, target=0, first=0, stop=2)
        Move(source=0, target=1, first=2, stop=3)
        Move(source=1, target=1, first=3, stop=4)
        Move(source=1, target=2, first=4, stop=6)

        Raises:
            CallError: If the partitions do not cut equally many elements.
        """
        if to.numel != self.numel:
            raise CallError(
                f"Expected a partition of {self.numel} elements, got one of {to.numel}. "
                "Both have to cut the same flat layout, padding included."
            )
        return tuple(
            Move(source.rank, target, source.first, source.stop)
            for target in range(to.size)
            for source in self.overlaps(*to.of(target))
        )


def _whole_weights(weights: Sequence[float | Fraction], *, size: int) -> list[int]:
    """Scale weights to whole numbers of exactly the same proportions."""
    if len(weights) != size:
        raise CallError(f"Expected one weight for each of {size} ranks, got {len(weights)}.")
    ratios = [_exact(weight, rank=rank) for rank, weight in enumerate(weights)]
    if not any(ratios):
        raise CallError(f"Expected a weight above zero for at least one of {size} ranks, got only zeros.")
    scale = math.lcm(*(ratio.denominator for ratio in ratios))
    return [ratio.numerator * (scale // ratio.denominator) for ratio in ratios]


def _exact(weight: Any, *, rank: int) -> Fraction:
    """Return the very number, without rounding: a float is a binary fraction."""
    try:
        try:
            ratio = Fraction(operator.index(weight))
        except TypeError:
            ratio = Fraction(*weight.as_integer_ratio())
    except (AttributeError, TypeError, ValueError, OverflowError):  # no number, NaN, infinity
        raise CallError(f"Expected the weight of rank {rank} to be a finite number, got {weight!r}.") from None
    if ratio < 0:
        raise CallError(f"Expected the weight of rank {rank} not to be negative, got {weight!r}.")
    return ratio
