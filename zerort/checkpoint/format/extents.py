"""Plan the data file of one rank: which piece of which tensor lies at which byte. Integers only.

    value 0                    value 1
    ├ w 0..1M ┼ w 1M..1.2M ┼ b ┤·├ w … ┤        · = some bytes, so that extents are aligned (see the note)
    └ one extent: a piece of one tensor, at most 4 MiB

The plan follows from the layouts and partitions, so that rank 0 knows the plans of all ranks and needs only their
checksums for the manifest.

[Note: Phase] O_DIRECT moves whole pages between whole pages. A large extent is stored at the same distance from a page
boundary as it has in memory (its phase): read back to where it came from, all of it but its ends goes straight into
place, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from zerort.checkpoint.value import PAGE_NBYTES, Value
from zerort.layout import Extent, FlatLayout, Range, itemsize

__all__ = ["EXTENT_NBYTES", "LARGE_NBYTES", "PAGE_NBYTES", "Shard", "ShardExtent", "plan_shard", "round_up"]

EXTENT_NBYTES = 4 * 1024**2 - 4096
"""The most bytes of one extent: what is read to check any one byte of it. With the pages that its ends lie in it is no
more than 4 MiB, which a disk takes as one request."""

LARGE_NBYTES = 256 * 1024
"""Extents from this size on keep their phase; a gap of up to a page before them is nothing. At least two pages."""

_ALIGNMENT: Final = 64
_NOTHING: Final[Mapping[int, Sequence[Sequence[int]]]] = MappingProxyType({})


class ShardExtent(NamedTuple):
    """A piece of one tensor in the data file of one rank."""

    value: int
    """The index of its value."""
    name: str
    """The tensor."""
    first: int
    """The piece's first element, counted in the tensor."""
    numel: int
    """Elements."""
    at: int
    """The piece's first element, counted in the rank's range."""
    offset: int
    """The piece's first byte in the file."""
    nbytes: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank writes."""

    extents: tuple[ShardExtent, ...]
    """In the order of the file."""
    nbytes: int
    """The size of the file: a multiple of `PAGE_NBYTES`, and 0 for a rank that holds nothing and so has no file."""


def plan_shard(
    values: Sequence[Value],
    rank: int,
    *,
    phases: Sequence[int],
    linked: Mapping[int, Sequence[Sequence[int]]] = _NOTHING,
) -> Shard:
    """Lay out the data file of ``rank``; padding between tensors is left out.

    Args:
        values: What is saved; only their layouts and partitions are looked at.
        rank: Whose file.
        phases: Where the rank's range of each value begins in its page of memory, in bytes.
        linked: By value, what of its range the rank links instead: first element, one past the last; in order, apart.
    """
    extents: list[ShardExtent] = []
    offset = 0
    for index, value in enumerate(values):
        width = itemsize(value.layout.dtype)
        phase = phases[index] // width * width  # stored elements are aligned, whatever they were in memory
        own = value.partition.of(rank)
        for extent, in_extent, at_first in _written(value.layout, own, linked.get(index, ())):
            most = _most(in_extent.stop - in_extent.start, width)
            for first in range(in_extent.start, in_extent.stop, most):
                numel = min(most, in_extent.stop - first)
                at = at_first + first - in_extent.start
                if numel * width >= LARGE_NBYTES:
                    offset += (phase + at * width - offset) % PAGE_NBYTES
                else:
                    offset = round_up(offset, _ALIGNMENT)
                extents.append(ShardExtent(index, extent.name, first, numel, at, offset, numel * width))
                offset += numel * width
    return Shard(tuple(extents), round_up(offset, PAGE_NBYTES))


def _written(layout: FlatLayout, own: Range, linked: Sequence[Sequence[int]]) -> Iterator[tuple[Extent, slice, int]]:
    """Yield the pieces of tensors in a range that are not linked: the tensor, what of it, and where in the range."""
    begin = 0
    for end, behind in (*linked, (own.stop - own.first, 0)):
        for extent, in_extent, in_range in layout.overlaps(own.first + begin, own.first + end):
            yield extent, in_extent, begin + in_range.start
        begin = behind


def _most(numel: int, width: int) -> int:
    """Return the most elements of an extent: equal parts, of whole pages where there are several."""
    pieces = -(-numel * width // EXTENT_NBYTES)
    most = max(1, -(-numel // pieces))
    return most if pieces == 1 or most * width < PAGE_NBYTES else round_up(most * width, PAGE_NBYTES) // width


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``nbytes``.

    >>> round_up(4097, 4096), round_up(0, 4096)
    (8192, 0)
    """
    return -(-nbytes // multiple) * multiple
