"""Arguments of ``zerort bench collectives``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, names_of, output_file, parse_sizes
from zerort.cli.bench.options import add_json, add_ranks, add_seconds, add_trace
from zerort.comm.bootstrap.opening import KINDS
from zerort.native.dtypes import DTYPE_CODES

__all__ = ["add_bench_collectives"]

_OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "barrier")

_COLLECTIVES = """\
Measure the collectives and check every byte they deliver, as nccl-tests do. Started without mpirun, this starts the
ranks itself.

examples:
  zerort bench collectives
  zerort bench collectives --ranks 8 --sizes 64K,16M,256M --compare mpi
  zerort bench collectives --ops reduce_scatter --dtypes float32,bfloat16 --arrays own --plot rs.png
  mpirun -n 8 python -m zerort bench collectives --json result.json
  zerort bench collectives --device cuda --ranks 8 --sizes 1M..1G

sizes: bytes of the full buffer (what all_gather delivers, what reduce_scatter takes), rounded down to whole elements
for every rank, at least one; 64K,1M is a list, and 4K..256M are 4K 16K 64K 256K 1M 4M 16M 64M 256M."""


def add_bench_collectives(benches: Commands) -> None:
    """Add ``zerort bench collectives``."""
    one = add_command(
        benches, "collectives", _serve_collectives, help="all_gather, reduce_scatter and the others", text=_COLLECTIVES
    )
    add_ranks(one)
    one.add_argument(
        "--sizes",
        type=parse_sizes,
        default=parse_sizes("4K..256M"),
        metavar="S",
        help="sizes, see above (default: 4K..256M)",
    )
    one.add_argument(
        "--dtypes",
        type=names_of(DTYPE_CODES),
        default=("float32",),
        metavar="D,…",
        help="element types, or all (default: float32)",
    )
    one.add_argument(
        "--ops", type=names_of(_OPS), default=_OPS, metavar="OP,…", help=f"operations (default: {', '.join(_OPS)})"
    )
    one.add_argument("--compare", choices=["mpi"], help="time the MPI library's own collectives in the same run")
    one.add_argument(
        "--device", choices=["host", "cuda"], default="host", help="memory that holds the arrays (default: host)"
    )
    one.add_argument("--kind", choices=KINDS, help="kind of group (default: the best here)")
    one.add_argument(
        "--arrays",
        choices=["window", "own", "new"],
        default="window",
        help="zerort's arrays: in the node's shared memory (group.zeros; default), plain NumPy arrays, "
        "or plain sources without out=, whose results are new arrays",
    )
    add_seconds(one, 0.25)
    add_json(one)
    one.add_argument("--plot", type=output_file, metavar="F.png", help="also draw bus bandwidth over size")
    add_trace(one)


def _serve_collectives(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.collectives.command import run_collectives

    return run_collectives(options, words)
