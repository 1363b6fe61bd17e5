"""`World`: all ranks of the job, for what a benchmark agrees on beside the group that it measures.

A group must not be the judge of its own results: maxima of times and counts of wrong elements go through MPI itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["World"]

T = TypeVar("T")


class World:
    """The ranks that the launcher started. Every verb is collective.

    Args:
        mpi: MPI's module (`load_mpi`); None for a process alone.
    """

    def __init__(self, mpi: ModuleType | None) -> None:
        self.mpi = mpi
        self.comm: Any = None if mpi is None else mpi.COMM_WORLD
        self.rank: int = 0 if self.comm is None else self.comm.Get_rank()
        self.size: int = 1 if self.comm is None else self.comm.Get_size()

    def all(self, value: T) -> list[T]:
        """Return what each rank gave, in rank order."""
        return [value] if self.comm is None else list(self.comm.allgather(value))

    def first(self, value: T) -> T:
        """Return what rank 0 gave."""
        return value if self.comm is None else self.comm.bcast(value, root=0)

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.all(None)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return [max(column) for column in zip(*self.all(list(values)), strict=True)]

    def total(self, value: int) -> int:
        """Return the sum over the ranks."""
        return sum(self.all(value))
