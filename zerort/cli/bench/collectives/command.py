"""``zerort bench collectives``: start the ranks, run the table of operations, print, draw and write what was found.

for each operation, dtype and size:
check      ours and MPI's, out of place and in place: every element
time       all of them and the memory limit, interleaved repetition by repetition
check      once more, after thousands of calls
error      of sums of 16-bit floats, against the exact ones
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerort import trace
from zerort.cli.arguments import UsageError
from zerort.cli.bench.collectives import tables
from zerort.cli.bench.collectives.buffers import Buffers, NoRoom
from zerort.cli.bench.collectives.footprint import Footprint, measure_footprint
from zerort.cli.bench.collectives.gpus import check_gpu_options, run_on_gpus
from zerort.cli.bench.collectives.operations import OPERATIONS, Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.trials import Pattern, Trial, mpi_trials, our_trials, shared_trial
from zerort.cli.bench.limits import MemoryLimit
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.machine import describe_machine, library_title
from zerort.cli.ranks import run_ranks
from zerort.cli.screen import Bar, Screen
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.errors import BootstrapError, CallError, SharedMemoryError
from zerort.native.dtypes import numpy_dtype
from zerort.trace.files import write_json

__all__ = ["run_collectives"]


def run_collectives(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CallError("--plot: Expected matplotlib, got none. Install it: pip install matplotlib.")
    on_gpus = options.device == "cuda"
    if on_gpus:
        check_gpu_options(options)
    if launched_size() is None:
        code = run_ranks(options.ranks or 2, ["-m", "zerort", *words, *Screen.words()]).code
        return code if code in (0, 2) else 1
    world = World()
    if options.ranks not in (None, world.size):
        raise UsageError(f"--ranks: Expected the {world.size} ranks that the launcher started, got {options.ranks}.")
    if options.compare and world.mpi is None:
        raise BootstrapError("--compare mpi: Expected an MPI library, got none. Install one: pip install mpich.")
    if options.trace is not None:
        trace.enable()
    with open_group(kind="nccl" if on_gpus else options.kind) as group:
        if on_gpus:
            return run_on_gpus(options, group, world, Screen(options.screen, shown=world.rank == 0))
        if group.size != world.size:
            raise UsageError(f"--kind {options.kind}: Expected one rank, got {world.size}. Use --ranks 1.")
        screen = Screen(options.screen, shown=world.rank == 0)
        return _Bench(options, group, world, screen).run()


class _Bench:
    """One run of the benchmark, on one rank."""

    def __init__(self, options: argparse.Namespace, group: Group, world: World, screen: Screen) -> None:
        self._options = options
        self._group = group
        self._world = world
        self._screen = screen
        self._limit = MemoryLimit(ranks=world.size)
        self._buffers = Buffers(group, world, arrays=options.arrays, compare=bool(options.compare))
        self._skipped: dict[int, str] = {}

    def run(self) -> int:
        options, screen = self._options, self._screen
        machine = self._describe()
        for line in tables.collectives_head(machine):
            screen.print(line)
        rows: list[Row] = []
        points = len(options.ops) * len(options.dtypes) * len(options.sizes)
        with screen.bar(points) as bar:
            for op in options.ops:
                found = list(self._rows_of(op, bar))
                rows += found
                for name in dict.fromkeys(row.op for row in found):
                    part = [row for row in found if row.op == name]
                    screen.print(tables.collectives_table(name, part, compare=bool(options.compare)))
        self._buffers.free()
        for size, why in self._skipped.items():
            screen.print(f"# skipped {format_bytes(size)}: {why}")
        if len(self._skipped) == len(options.sizes):
            raise SharedMemoryError(f"Expected a size that fits, got none. {next(iter(self._skipped.values()))}")
        footprint = self._footprint()
        for line in tables.collectives_legend(rows, footprint, compare=bool(options.compare)):
            screen.print(line)
        self._save(machine, rows, footprint)
        return 1 if any(row.wrong for row in rows) else 0

    def _describe(self) -> dict[str, Any]:
        works = {"limit": self._limit.run, "sum": self._limit.run_sum}
        timing = time_interleaved(works, seconds=0.2, meet=self._meet, maxima=self._world.maxima)
        mpi = self._world.mpi
        return {
            **describe_machine(),
            "mpi": None if mpi is None else library_title(mpi),
            "ranks": self._world.size,
            "group": repr(self._group),
            "kind": self._group.kind,
            "arrays": self._options.arrays,
            "limit_gbs": self._limit.gbs(timing["limit"].median),
            "sum_gbs": self._limit.sum_gbs(timing["sum"].median),
        }

    def _meet(self) -> None:
        self._group.barrier().wait()

    def _rows_of(self, op: str, bar: Bar) -> Iterator[Row]:
        if op == "barrier":
            bar.step("barrier")
            yield self._barrier()
            bar.step("barrier", advance=len(self._options.dtypes) * len(self._options.sizes))
            return
        for dtype in self._options.dtypes:
            for size in self._options.sizes:
                bar.step(f"{op} {format_bytes(size)} {dtype}")
                try:
                    if size not in self._skipped:
                        yield from self._point(OPERATIONS[op], dtype, size)
                except NoRoom as error:
                    self._skipped[size] = str(error)
                bar.step("", advance=1)

    def _point(self, operation: Operation, dtype: str, size: int) -> Iterator[Row]:
        group, n, width = self._group, self._world.size, numpy_dtype(dtype).itemsize
        share = max(1, size // (n * width))
        nbytes = share * n * width
        ours, theirs = self._buffers.of(nbytes)
        pattern = Pattern(dtype, n)
        full, other = (array.view(numpy_dtype(dtype)) for array in ours)
        trials = our_trials(group, operation, full, other, pattern)
        if theirs is not None:
            full, other = (array.view(numpy_dtype(dtype)) for array in theirs)
            trials |= mpi_trials(self._world.mpi, group, operation, full, other, pattern)
        shards = None
        if operation.name == "all_gather":
            try:
                shards = group.empty_shared([share] * n, dtype)
            except SharedMemoryError as error:
                raise NoRoom(str(error)) from None
            trials["shared"] = shared_trial(group, operation, shards, pattern)
        timings, wrong, errors = self._measure(trials)
        if shards is not None:
            whole, shards = shards.full, None
            group.free(whole)
        sides = {
            name: make_side(name, timings, wrong, nbytes=nbytes, bus=operation.bus(n), errors=errors) for name in trials
        }

        def row(op: str, out: str, within: str, moved: float) -> Row:
            return Row(
                op=op,
                dtype=dtype,
                redop="sum" if operation.reduces else "none",
                nbytes=nbytes,
                count=share if operation.splits else share * n,
                out_of_place=sides.get(out),
                in_place=sides.get(within),
                mpi=sides.get("mpi"),
                mpi_in_place=sides.get("mpi in"),
                moved_nbytes=round(moved * nbytes),
                limit_gbs=self._limit.gbs(timings["limit"].median),
            )

        in_place = "in" in timings and timings["in"].median < timings["out"].median
        moved = operation.moved_in_place if in_place and operation.moved_in_place else operation.moved
        yield row(operation.name, "out", "in", moved(n))
        if "shared" in sides:
            yield row("all_gather shared", "", "shared", 0)

    def _measure(self, trials: dict[str, Trial]) -> tuple[dict[str, Any], dict[str, int], dict[str, float]]:
        wrong = {name: trial.check() for name, trial in trials.items()}
        works: dict[str, Callable[[], object]] = {name: trial.run for name, trial in trials.items()}
        works["limit"] = self._limit.run
        timings = time_interleaved(
            works, seconds=self._options.seconds, once=["limit"], meet=self._meet, maxima=self._world.maxima
        )
        for name, trial in trials.items():
            wrong[name] += trial.check()
        errors = {name: trial.error() for name, trial in trials.items() if trial.error is not None}
        return (
            timings,
            {name: self._world.total(count) for name, count in wrong.items()},
            {name: self._world.maxima([error])[0] for name, error in errors.items()},
        )

    def _barrier(self) -> Row:
        works: dict[str, Callable[[], object]] = {"out": self._meet}
        if self._options.compare:
            works["mpi"] = self._world.comm.Barrier
        timings = time_interleaved(works, seconds=self._options.seconds, meet=self._meet, maxima=self._world.maxima)
        sides = {name: make_side(name, timings, {}, nbytes=0, bus=0.0) for name in works}
        return Row(
            op="barrier",
            dtype="none",
            redop="none",
            nbytes=0,
            count=0,
            out_of_place=sides["out"],
            in_place=None,
            mpi=sides.get("mpi"),
            mpi_in_place=None,
            moved_nbytes=0,
            limit_gbs=0.0,
        )

    def _footprint(self) -> Footprint | None:
        if self._world.size == 1 or "all_gather" not in self._options.ops:
            return None
        try:
            return measure_footprint(self._group, self._world)
        except SharedMemoryError as error:
            self._screen.print(f"# memory of a gather: not measured. {error}")
            return None

    def _save(self, machine: dict[str, Any], rows: list[Row], footprint: Footprint | None) -> None:
        options = self._options
        if options.trace is not None:
            self._group.save_trace(options.trace)
        if self._world.rank:
            return
        if options.json is not None:
            document = {
                "bench": "collectives",
                "machine": machine,
                "rows": [row.as_json() for row in rows],
                "memory": None if footprint is None else footprint.as_json(),
                "skipped": [{"nbytes": size, "why": why} for size, why in self._skipped.items()],
            }
            write_json(Path(options.json), document)
        if options.plot is not None:
            from zerort.cli.bench.collectives.plots import draw_collectives

            draw_collectives(options.plot, rows, machine)
