"""What was measured, as values: one `Row` per operation, size and dtype, one `Side` per way of running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerort.cli.bench.timing import Timing

__all__ = ["Row", "Side", "make_side"]


@dataclass(frozen=True, slots=True)
class Side:
    """One way of running it."""

    time_us: float
    """Microseconds: median over the repetitions, each on the slowest rank."""
    min_us: float
    max_us: float
    algbw: float
    """GB/s."""
    busbw: float
    """GB/s."""
    wrong: int
    """Elements, over all ranks."""
    iterations: int
    """In each repetition."""
    error: float | None = None
    """For sums of 16-bit floats: the largest distance from the exact sum, in units of the last place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size."""

    op: str
    dtype: str
    redop: str
    nbytes: int
    """Of the full buffer."""
    count: int
    """Elements, as nccl-tests count them: of a rank's share where there are shares."""
    out_of_place: Side | None
    in_place: Side | None = None
    mpi: Side | None = None
    mpi_in_place: Side | None = None
    moved_nbytes: int = 0
    """What the faster of our two had to read and write, over all ranks; 0 if nothing had to move, or it is unknown."""
    limit_gbs: float = 0.0
    """This machine's memory limit, taken between the repetitions."""

    @property
    def best(self) -> Side:
        """The faster of our two."""
        best = faster(self.out_of_place, self.in_place)
        assert best is not None
        return best

    @property
    def mpi_best(self) -> Side | None:
        """The faster of MPI's two."""
        return faster(self.mpi, self.mpi_in_place)

    @property
    def error(self) -> float | None:
        """The larger error of our two; None for what is not a sum of 16-bit floats."""
        return largest_error(self.out_of_place, self.in_place)

    @property
    def mpi_error(self) -> float | None:
        """The larger error of MPI's two."""
        return largest_error(self.mpi, self.mpi_in_place)

    @property
    def ratio(self) -> float | None:
        """MPI's better time over our better time."""
        return None if self.mpi_best is None else self.mpi_best.time_us / self.best.time_us

    @property
    def fraction(self) -> float | None:
        """The part of the memory limit at which it moved what it had to; None if nothing had to move."""
        return self.moved_nbytes / self.best.time_us / 1e3 / self.limit_gbs if self.moved_nbytes else None

    @property
    def wrong(self) -> int:
        """Elements that were wrong in any of ours."""
        return sum(side.wrong for side in (self.out_of_place, self.in_place) if side is not None)

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "fraction": self.fraction, "wrong": self.wrong}


def faster(one: Side | None, other: Side | None) -> Side | None:
    """Return the faster of two, either of which may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one if one.time_us <= other.time_us else other


def largest_error(*sides: Side | None) -> float | None:
    """Return the largest error of those sides that have one."""
    return max((side.error for side in sides if side is not None and side.error is not None), default=None)


def make_side(
    name: str,
    timings: Mapping[str, Timing],
    wrong: Mapping[str, int],
    *,
    nbytes: int,
    bus: float,
    errors: Mapping[str, float] | None = None,
) -> Side | None:
    """Return the side called ``name``; None if it was not run."""
    timing = timings.get(name)
    if timing is None:
        return None
    algbw = nbytes / timing.median / 1e9
    return Side(
        time_us=timing.median * 1e6,
        min_us=min(timing.seconds) * 1e6,
        max_us=max(timing.seconds) * 1e6,
        algbw=algbw,
        busbw=algbw * bus,
        wrong=wrong.get(name, 0),
        iterations=timing.iterations,
        error=(errors or {}).get(name),
    )
