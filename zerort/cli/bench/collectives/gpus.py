"""``zerort bench collectives --device cuda``: the table of nccl-tests, of our collectives over arrays on GPUs.

The same operations, patterns and checks as on the host. A time is what a caller sees: the ranks' agreement, NCCL, and
the wait for the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zerort.cli.arguments import UsageError
from zerort.cli.bench.collectives.operations import OPERATIONS, Expected, Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.tables import collectives_table
from zerort.cli.bench.collectives.trials import Pattern, our_trials
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.machine import describe_machine, machine_lines
from zerort.cli.screen import Bar, Screen
from zerort.cli.world import World
from zerort.comm import Group
from zerort.config import format_bytes
from zerort.errors import DeviceMemoryError
from zerort.native.dtypes import numpy_dtype
from zerort.trace.files import write_json

__all__ = ["check_gpu_options", "run_on_gpus"]


def check_gpu_options(options: argparse.Namespace) -> None:
    """Refuse what only hosts can do."""
    if options.kind not in (None, "nccl"):
        raise UsageError(f"--kind {options.kind}: Expected nccl with --device cuda, or none. Leave it out.")
    for name, given in (("--compare", options.compare), ("--plot", options.plot), ("--arrays own", _own(options))):
        if given:
            raise UsageError(f"{name}: Expected it with --device host, got --device cuda. Leave it out.")


def _own(options: argparse.Namespace) -> bool:
    own: bool = options.arrays == "own"
    return own


class _GpuPattern(Pattern):
    """The pattern, for arrays that the host cannot touch: filled and compared by copies."""

    def fill(self, array: Any, rank: int) -> None:
        host = np.empty(array.size, array.dtype)
        super().fill(host, rank)
        array.set(host)

    def wrong(self, array: Any, expected: list[Expected]) -> int:
        return super().wrong(array.get(), expected)


def run_on_gpus(options: argparse.Namespace, group: Group, world: World, screen: Screen) -> int:
    """Measure, print and write; return the exit code. Every rank calls this."""
    machine = {**describe_machine(), "ranks": group.size, "group": repr(group), "kind": group.kind}
    for line in (*machine_lines(machine), f"# {group!r}", f"# {group.size} ranks, a GPU each; arrays from group.empty"):
        screen.print(line)
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    with screen.bar(len(options.ops) * len(options.dtypes) * len(options.sizes)) as bar:
        for op in options.ops:
            found = list(_rows_of(op, options, group, world, bar, skipped))
            rows += found
            screen.print(collectives_table(op, found, compare=False))
    for size, why in skipped.items():
        screen.print(f"# skipped {format_bytes(size)}: {why}")
    wrong = sum(row.wrong for row in rows)
    screen.print("# time: median of 7 repetitions on the slowest rank, from the call to the end of its wait.")
    screen.print("# algbw = size / time; busbw = algbw times what makes a ring's busbw its wire speed (nccl-tests).")
    screen.print(f"# wrong elements: {wrong}" + (": THE DATA IS WRONG" if wrong else ""))
    if options.trace is not None:
        group.save_trace(options.trace)
    if options.json is not None and world.rank == 0:
        document = {
            "bench": "collectives",
            "device": "cuda",
            "machine": machine,
            "rows": [row.as_json() for row in rows],
            "skipped": [{"nbytes": size, "why": why} for size, why in skipped.items()],
        }
        write_json(Path(options.json), document)
    return 1 if wrong or not rows else 0


def _rows_of(
    op: str, options: argparse.Namespace, group: Group, world: World, bar: Bar, skipped: dict[int, str]
) -> Iterator[Row]:
    if op == "barrier":
        timings = _time({"out": lambda: group.barrier().wait()}, options, group, world)
        yield _row(op, "none", "none", 0, 0, make_side("out", timings, {}, nbytes=0, bus=0.0), None)
        return
    for dtype in options.dtypes:
        for size in options.sizes:
            bar.step(f"{op} {format_bytes(size)} {dtype}")
            try:
                if size not in skipped:
                    yield _point(OPERATIONS[op], dtype, size, options, group, world)
            except DeviceMemoryError as error:  # on every rank
                skipped[size] = str(error)
            bar.step("", advance=1)


def _point(operation: Operation, dtype: str, size: int, options: argparse.Namespace, group: Group, world: World) -> Row:
    n, kind = group.size, numpy_dtype(dtype)
    share = max(1, size // (n * kind.itemsize))
    nbytes = share * n * kind.itemsize
    full, other = group.empty(share * n, dtype), group.empty(share * n, dtype)
    trials = our_trials(group, operation, full, other, _GpuPattern(dtype, n))
    wrong = {name: trial.check() for name, trial in trials.items()}
    timings = _time({name: trial.run for name, trial in trials.items()}, options, group, world)
    for name, trial in trials.items():
        wrong[name] += trial.check()
    totals = {name: world.total(count) for name, count in wrong.items()}
    sides = {name: make_side(name, timings, totals, nbytes=nbytes, bus=operation.bus(n)) for name in trials}
    count = share if operation.splits else share * n
    redop = "sum" if operation.reduces else "none"
    return _row(operation.name, dtype, redop, nbytes, count, sides["out"], sides.get("in"))


def _time(works: dict[str, Callable[[], object]], options: argparse.Namespace, group: Group, world: World) -> Any:
    def meet() -> None:
        group.barrier().wait()

    return time_interleaved(works, seconds=options.seconds, meet=meet, maxima=world.maxima)


def _row(op: str, dtype: str, redop: str, nbytes: int, count: int, out: Any, within: Any) -> Row:
    return Row(
        op=op,
        dtype=dtype,
        redop=redop,
        nbytes=nbytes,
        count=count,
        out_of_place=out,
        in_place=within,
        mpi=None,
        mpi_in_place=None,
        moved_nbytes=0,  # what must move depends on how the GPUs hang together
        limit_gbs=0.0,
    )
