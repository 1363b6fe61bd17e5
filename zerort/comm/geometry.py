"""What each collective moves, as one table: which elements a rank takes from every other, and where it puts them.

    all_gather      take all of s's shard            put it at s's place       copy
    broadcast       all_gather in which only root has a shard
    reduce_scatter  take my range of s's array       sum over s                reduce
    reduce          reduce_scatter in which only root has a range
    all_to_all      take what s holds for me         put it at s's place       copy

A transport that can serve a `Geometry` serves all five. An all_reduce is a reduce_scatter and an all_gather over the
same even split. Only integers live here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from zerort.layout import Partition

__all__ = [
    "Counts",
    "Geometry",
    "even_part",
    "of_all_gather",
    "of_all_to_all",
    "of_reduce_scatter",
    "split_evenly",
    "starts",
]

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """One rank's part in a collective; everything in elements."""

    takes: tuple[tuple[int, int], ...]
    """From each rank s: (first, count) in s's source."""
    places: tuple[int, ...]
    """Where what comes from s begins in my out; 0 for all when they are reduced together."""
    gives: tuple[tuple[int, int], ...]
    """To each rank d: (first, count) in my source."""
    reduces: bool
    """What is taken is reduced in rank order instead of put side by side."""
    alike: bool
    """Every rank ends up with the same elements in its out."""
    longest: int
    """The largest count that any rank takes from any other."""


def starts(counts: Sequence[int]) -> Counts:
    """Return where each of ``counts`` begins when they lie side by side.

    >>> starts((3, 0, 2))
    (0, 3, 3)
    """
    found, total = [], 0
    for count in counts:
        found.append(total)
        total += count
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def of_all_gather(counts: Counts, rank: int) -> Geometry:
    """Return the table of an all_gather: every rank's shard of ``counts[r]`` elements, side by side, to everyone.

    >>> of_all_gather((3, 1), rank=0).takes, of_all_gather((3, 1), rank=0).places
    (((0, 3), (0, 1)), (0, 3))
    """
    return Geometry(
        takes=tuple((0, count) for count in counts),
        places=starts(counts),
        gives=((0, counts[rank]),) * len(counts),
        reduces=False,
        alike=True,
        longest=max(counts),
    )


@functools.lru_cache(maxsize=4096)
def of_reduce_scatter(counts: Counts, rank: int) -> Geometry:
    """Return the table of a reduce_scatter: the reduction of all arrays, ``counts[r]`` elements of it to each rank."""
    ranges = tuple(zip(starts(counts), counts, strict=True))
    return Geometry(
        takes=(ranges[rank],) * len(counts),
        places=(0,) * len(counts),
        gives=ranges,
        reduces=True,
        alike=False,
        longest=max(counts),
    )


@functools.lru_cache(maxsize=1024)
def of_all_to_all(matrix: tuple[Counts, ...], rank: int) -> Geometry:
    """Return the table of an all_to_all: ``matrix[s][d]`` elements from every s to every d, at d in rank order."""
    received = tuple(row[rank] for row in matrix)
    return Geometry(
        takes=tuple((starts(row)[rank], row[rank]) for row in matrix),
        places=starts(received),
        gives=tuple(zip(starts(matrix[rank]), matrix[rank], strict=True)),
        reduces=False,
        alike=False,
        longest=max(max(row) for row in matrix),
    )


@functools.lru_cache(maxsize=4096)
def split_evenly(numel: int, size: int) -> Counts:
    """Cut ``numel`` elements into ``size`` counts that differ by as little as possible."""
    return Partition.build(numel, size).counts


@functools.lru_cache(maxsize=4096)
def even_part(numel: int, size: int, rank: int) -> tuple[int, int]:
    """Return (first, count) of rank's part of ``numel`` elements split evenly.

    >>> even_part(10, 4, 1)
    (3, 3)
    """
    counts = split_evenly(numel, size)
    return starts(counts)[rank], counts[rank]
