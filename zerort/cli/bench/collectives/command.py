"""``zerort bench collectives``: every collective against MPI's own and the memory limit.

for each operation, dtype and size:
check      ours and MPI's, out of place and in place: every element
time       all of them and the memory limit, interleaved repetition by repetition
check      once more, after thousands of calls
error      of sums of 16-bit floats, against the exact ones
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from zerort import trace
from zerort.cli.arguments import UsageError
from zerort.cli.bench.collectives import tables
from zerort.cli.bench.collectives.buffers import Buffers, NoRoom
from zerort.cli.bench.collectives.footprint import Footprint, measure_footprint
from zerort.cli.bench.collectives.gpus import GpuCollectives, check_gpu_options
from zerort.cli.bench.collectives.operations import Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.sweep import Sweep
from zerort.cli.bench.collectives.trials import Pattern, mpi_trials, our_trials, shared_trial
from zerort.cli.bench.harness import Result, run_in_ranks
from zerort.cli.bench.limits import MemoryLimit
from zerort.cli.bench.pictures import check_plot
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.machine import library_title
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.errors import BootstrapError, SharedMemoryError
from zerort.native.dtypes import numpy_dtype

__all__ = ["run_collectives"]


def run_collectives(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    check_plot(options.plot)
    if options.device == "cuda":
        check_gpu_options(options)
    return run_in_ranks(options, words, lambda world: _run(options, world))


def _run(options: argparse.Namespace, world: World) -> int:
    if options.compare and world.mpi is None:
        raise BootstrapError("--compare mpi: Expected an MPI library, got none. Install one: pip install mpich.")
    if options.trace is not None:
        trace.enable()
    on_gpus = options.device == "cuda"
    with open_group(kind="nccl" if on_gpus else options.kind) as group:
        if on_gpus:
            return GpuCollectives(options, group, world).run()
        if group.size != world.size:
            raise UsageError(f"--kind {options.kind}: Expected one rank, got {world.size}. Use --ranks 1.")
        return _HostCollectives(options, group, world).run()


class _HostCollectives(Sweep):
    """Collectives over arrays in host memory, ours and MPI's, against the memory limit."""

    no_room = NoRoom

    def __init__(self, options: argparse.Namespace, group: Group, world: World) -> None:
        super().__init__(options, group, world)
        self._limit = MemoryLimit(ranks=world.size)
        self._buffers = Buffers(group, world, arrays=options.arrays, compare=bool(options.compare))

    def conclude(self) -> tuple[list[str], dict[str, Any]]:
        self._buffers.free()
        if len(self.skipped) == len(self.options.sizes):
            raise SharedMemoryError(f"Expected a size that fits, got none. {next(iter(self.skipped.values()))}")
        footprint = self._footprint()
        legend = tables.collectives_legend(self.rows, footprint, compare=bool(self.options.compare))
        return legend, {"memory": None if footprint is None else footprint.as_json()}

    def save(self, machine: dict[str, Any], result: Result) -> None:
        super().save(machine, result)
        if self.options.plot is not None and self.world.rank == 0:
            from zerort.cli.bench.collectives.plots import draw_collectives

            draw_collectives(self.options.plot, self.rows, machine)

    def head(self, machine: dict[str, Any]) -> list[str]:
        return tables.collectives_head(machine)

    def describe(self) -> dict[str, Any]:
        works = {"limit": self._limit.run, "sum": self._limit.run_sum}
        timing = time_interleaved(works, seconds=0.2, meet=self.meet, maxima=self.world.maxima)
        mpi = self.world.mpi
        return {
            "mpi": None if mpi is None else library_title(mpi),
            "ranks": self.world.size,
            "group": repr(self._group),
            "kind": self._group.kind,
            "arrays": self.options.arrays,
            "limit_gbs": self._limit.gbs(timing["limit"].median),
            "sum_gbs": self._limit.sum_gbs(timing["sum"].median),
        }

    def point(self, operation: Operation, dtype: str, size: int) -> Iterator[Row]:
        group, n, width = self._group, self.world.size, numpy_dtype(dtype).itemsize
        share = max(1, size // (n * width))
        nbytes = share * n * width
        ours, theirs = self._buffers.of(nbytes)
        pattern = Pattern(dtype, n)
        full, other = (array.view(numpy_dtype(dtype)) for array in ours)
        trials = our_trials(group, operation, full, other, pattern, new=self.options.arrays == "new")
        if theirs is not None:
            full, other = (array.view(numpy_dtype(dtype)) for array in theirs)
            trials |= mpi_trials(self.world.mpi, group, operation, full, other, pattern)
        shards = None
        if operation.name == "all_gather":
            try:
                shards = group.zeros_shared([share] * n, dtype)
            except SharedMemoryError as error:
                raise NoRoom(str(error)) from None
            trials["shared"] = shared_trial(group, operation, shards, pattern)
        timings, wrong = self.check_and_time(trials, limit=self._limit.run)
        errors = {
            name: self.world.maxima([trial.error()])[0] for name, trial in trials.items() if trial.error is not None
        }
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

    def _footprint(self) -> Footprint | None:
        if self.world.size == 1 or "all_gather" not in self.options.ops:
            return None
        try:
            return measure_footprint(self._group, self.world)
        except SharedMemoryError as error:
            self.screen.print(f"# memory of a gather: not measured. {error}")
            return None
