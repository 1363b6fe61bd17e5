"""What ``bench collectives`` runs, as one table: who holds what, what must move, how MPI is asked for the same.

S is the size of the full buffer in bytes, n the ranks; a share is S / n. As in nccl-tests, algbw = S / time, and busbw
is algbw times a factor that makes a ring's busbw its wire speed. `moved` counts what any implementation in shared
memory must read and write, over all ranks; in place, a rank's own part need not move:

    operation        source  out     busbw / algbw   moved          moved in place
    all_gather       share   full    (n-1)/n         2·n·S          2·(n-1)·S
    reduce_scatter   full    share   (n-1)/n         (n+1)·S        (n+1)·S
    all_reduce       full    full    2·(n-1)/n       2·n·S          2·n·S
    broadcast        full    full    1               2·n·S          2·(n-1)·S
    reduce           full    full    1               (n+1)·S        (n+1)·S
    all_to_all       full    full    (n-1)/n         2·n·S          not in place
    all_gather of a shared array: nothing moves, at (n-1)/n as well
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from zerort.typing import Array

__all__ = ["HALVES", "OPERATIONS", "Expected", "Operation"]

HALVES: Final = ("float16", "bfloat16")
"""The 16-bit floats: NumPy and MPI see their bits, and not every MPI library sums them."""

Expected = tuple[int, int, "int | None", int]
"""(first, count) in out; whose pattern stands there, None for the sum of all; from which of its positions on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table."""

    name: str
    source_is_share: bool
    out_is_share: bool
    reduces: bool
    bus: Callable[[int], float]
    """busbw / algbw, for n ranks."""
    moved: Callable[[int], float]
    """Bytes to move out of place over S, for n ranks."""
    moved_in_place: Callable[[int], float] | None
    """The same in place; None if that is not possible."""
    expects: Callable[[int, int, int], list[Expected]]
    """What out holds afterwards, from (rank, ranks, elements of a share)."""
    mpi: Callable[[Any, Any, Array, Array], object] | None
    """MPI's own, from (mpi, comm, source, out); None if MPI has no such call out of place."""
    mpi_in_place: Callable[[Any, Any, Array], object] | None
    """MPI's own, from (mpi, comm, full); None if ours is not in place."""

    @property
    def splits(self) -> bool:
        """Whether each rank has a share in it, by which nccl-tests count."""
        return self.source_is_share or self.out_is_share or self.name == "all_to_all"


def _ring(n: int) -> float:
    return (n - 1) / n


def _mpi_reduce_in_place(mpi: Any, comm: Any, full: Array) -> object:
    root = comm.Get_rank() == 0
    return comm.Reduce(mpi.IN_PLACE if root else full, full if root else None)


OPERATIONS: Final = {
    row.name: row
    for row in (
        Operation(
            "all_gather",
            source_is_share=True,
            out_is_share=False,
            reduces=False,
            bus=_ring,
            moved=lambda n: 2 * n,
            moved_in_place=lambda n: 2 * (n - 1),
            expects=lambda rank, n, share: [(r * share, share, r, 0) for r in range(n)],
            mpi=lambda mpi, comm, source, out: comm.Allgather(source, out),
            mpi_in_place=lambda mpi, comm, full: comm.Allgather(mpi.IN_PLACE, full),
        ),
        Operation(
            "reduce_scatter",
            source_is_share=False,
            out_is_share=True,
            reduces=True,
            bus=_ring,
            moved=lambda n: n + 1,
            moved_in_place=lambda n: n + 1,
            expects=lambda rank, n, share: [(0, share, None, rank * share)],
            mpi=lambda mpi, comm, source, out: comm.Reduce_scatter_block(source, out),
            mpi_in_place=lambda mpi, comm, full: comm.Reduce_scatter_block(mpi.IN_PLACE, full),
        ),
        Operation(
            "all_reduce",
            source_is_share=False,
            out_is_share=False,
            reduces=True,
            bus=lambda n: 2 * _ring(n),
            moved=lambda n: 2 * n,
            moved_in_place=lambda n: 2 * n,
            expects=lambda rank, n, share: [(0, n * share, None, 0)],
            mpi=lambda mpi, comm, source, out: comm.Allreduce(source, out),
            mpi_in_place=lambda mpi, comm, full: comm.Allreduce(mpi.IN_PLACE, full),
        ),
        Operation(
            "broadcast",
            source_is_share=False,
            out_is_share=False,
            reduces=False,
            bus=lambda n: 1.0,
            moved=lambda n: 2 * n,
            moved_in_place=lambda n: 2 * (n - 1),
            expects=lambda rank, n, share: [(0, n * share, 0, 0)],
            mpi=None,
            mpi_in_place=lambda mpi, comm, full: comm.Bcast(full),
        ),
        Operation(
            "reduce",
            source_is_share=False,
            out_is_share=False,
            reduces=True,
            bus=lambda n: 1.0,
            moved=lambda n: n + 1,
            moved_in_place=lambda n: n + 1,
            expects=lambda rank, n, share: [] if rank else [(0, n * share, None, 0)],
            mpi=lambda mpi, comm, source, out: comm.Reduce(source, out),
            mpi_in_place=_mpi_reduce_in_place,
        ),
        Operation(
            "all_to_all",
            source_is_share=False,
            out_is_share=False,
            reduces=False,
            bus=_ring,
            moved=lambda n: 2 * n,
            moved_in_place=None,
            expects=lambda rank, n, share: [(r * share, share, r, rank * share) for r in range(n)],
            mpi=lambda mpi, comm, source, out: comm.Alltoall(source, out),
            mpi_in_place=None,
        ),
    )
}
"""The collectives that move data, by name."""
