"""``zerort bench checkpoint``: start the ranks, save and load a state, and compare with the disk itself.

    each round, in rotating order:
        raw write   save   replace        raw read   load
        blocks      fresh  over the last  blocks     checked by its checksums, and against what was saved

A ratio is taken within a round, where the disk is in one mood; medians over the rounds count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zerort.checkpoint import Value, load, save
from zerort.checkpoint.extents import plan_shard
from zerort.checkpoint.failure import free_nbytes, room_error
from zerort.checkpoint.sweep import wait_for_sweeps
from zerort.cli.arguments import UsageError
from zerort.cli.bench.disk.rawdisk import RawDisk, forget
from zerort.cli.machine import available_nbytes, describe_machine, machine_lines
from zerort.cli.ranks import run_ranks
from zerort.cli.screen import Screen, new_table
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.errors import CallError
from zerort.layout import FlatLayout, Partition
from zerort.native import crc32c
from zerort.storage.files.blocks import worker_count
from zerort.trace.files import write_json

__all__ = ["run_checkpoint"]

_KINDS = ("parameter", "exp_avg", "exp_avg_sq")
_WRITES, _READS = ("raw write", "save", "replace"), ("raw read", "load")
_LIMITS = {"save": "raw write", "replace": "raw write", "load": "raw read"}
"""What each figure of ours is compared with."""


def run_checkpoint(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    if launched_size() is None:
        # Made and removed here: whatever happens to the ranks, nothing of a gigabyte is left behind.
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="zerort-bench-") as inside:
            more = ["--inside", os.path.abspath(inside), *Screen.words()]
            code = run_ranks(options.ranks or 2, ["-m", "zerort", *words, *more]).code
        return code if code in (0, 2) else 1
    world = World()
    if options.ranks not in (None, world.size):
        raise UsageError(f"--ranks: Expected the {world.size} ranks that the launcher started, got {options.ranks}.")
    with open_group() as group, _directory(options, world) as inside:
        return _Bench(options, group, world, inside).run()


@contextmanager
def _directory(options: argparse.Namespace, world: World) -> Iterator[str]:
    """Yield one directory for all ranks, and remove it afterwards unless the starting process does."""
    if options.inside is not None:
        yield options.inside
        return
    mine = tempfile.mkdtemp(dir=options.dir, prefix="zerort-bench-") if world.rank == 0 else ""
    inside = os.path.abspath(world.first(mine))
    try:
        yield inside
    finally:
        if world.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)


class _Bench:
    """One run of the benchmark, on one rank."""

    def __init__(self, options: argparse.Namespace, group: Group, world: World, inside: str) -> None:
        self._options = options
        self._group = group
        self._world = world
        self._inside = inside
        self._screen = Screen(options.screen, shown=world.rank == 0)
        self._check_room(options.nbytes)
        self._layout = FlatLayout.build(_shapes(options.nbytes // len(_KINDS) // 4))
        self._nbytes = len(_KINDS) * self._layout.nbytes
        self._threads = worker_count(world.size)
        self._wrong = 0
        self._direct = True

    def run(self) -> int:
        screen, options = self._screen, self._options
        machine = {**describe_machine(), "ranks": self._world.size, "directory": os.path.abspath(options.dir)}
        for line in self._head(machine):
            screen.print(line)
        values = self._values()
        sums = [crc32c(value.array) for value in values]
        rounds: list[dict[str, float]] = []
        # The first round warms up: memory is touched, the disk awake.
        with screen.bar(options.rounds + 1) as bar:
            for number in range(options.rounds + 1):
                bar.step(f"round {number}" if number else "warming up", advance=int(number > 0))
                rounds.append(self._round(number, values, sums))
        wrong = self._world.total(self._wrong)
        self._report(machine, rounds[1:], wrong)
        return 1 if wrong else 0

    def _check_room(self, nbytes: int) -> None:
        # Each rank would find something else, while the others write: rank 0's findings count.
        free, available = self._world.first((free_nbytes(self._inside), available_nbytes()))
        if free is not None and free < 3 * nbytes:
            raise room_error(self._inside, needed=3 * nbytes, why="the benchmark keeps three copies at once")
        if 1.1 * nbytes > available:
            raise CallError(
                f"--nbytes: Expected at most the {format_bytes(available)} of memory that are available, got "
                f"{format_bytes(nbytes)}. Use a smaller state."
            )

    def _values(self) -> list[Value]:
        partition = Partition.build(self._layout.numel, self._world.size)
        generator = np.random.default_rng(self._world.rank)
        some = generator.standard_normal(1 << 18, np.float32)
        values = []
        for kind in _KINDS:
            mine = np.resize(some, partition.counts[self._world.rank])
            values.append(Value(kind=kind, layout=self._layout, partition=partition, mine=mine))
        return values

    def _round(self, number: int, values: list[Value], sums: list[int]) -> dict[str, float]:
        path = os.path.join(self._inside, f"checkpoint-{number}")
        nbytes = plan_shard(values, self._world.rank, phases=[0] * len(values)).nbytes
        raw = RawDisk(os.path.join(self._inside, f"raw-{number}.{self._world.rank}"), nbytes, threads=self._threads)

        def store() -> None:
            self._direct &= save(path, self._group, values, meta={"step": number}).direct

        works: dict[str, Callable[[], object]] = {
            "raw write": raw.write,
            "save": store,
            "replace": store,
            "raw read": raw.read,
            "load": lambda: load(path, self._group, values),
        }
        seconds = {}
        # `replace` needs what `save` wrote: only the raw disk changes places.
        writes = _WRITES if number % 2 else (*_WRITES[1:], _WRITES[0])
        for name in (*writes, *(_READS if number % 2 else _READS[::-1])):
            if name == "load":
                for value in values:
                    value.array[:] = 0
            if name in _READS and not self._direct:
                forget(path)
                forget(raw.path)
            seconds[name] = self._time(works[name])
            if name == "load":
                self._wrong += sum(crc32c(value.array) != sums[at] for at, value in enumerate(values))
        self._group.barrier().wait()
        raw.remove()
        if self._world.rank == 0:
            shutil.rmtree(path)
        self._group.barrier().wait()
        return seconds

    def _time(self, work: Callable[[], object]) -> float:
        self._group.barrier().wait()
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        wait_for_sweeps()  # nobody else's time
        return self._world.maxima([seconds])[0]

    def _head(self, machine: dict[str, Any]) -> list[str]:
        ranks = self._world.size
        return [
            *machine_lines(machine),
            f"# {ranks} rank{'s' * (ranks > 1)} with {self._threads} threads each; a state of "
            f"{format_bytes(self._nbytes)}: {', '.join(_KINDS)} of {len(self._layout.extents)} fp32 tensors",
            f"# disk: {machine['directory']}",
        ]

    def _report(self, machine: dict[str, Any], rounds: list[dict[str, float]], wrong: int) -> None:
        gbs = {name: [self._nbytes / one[name] / 1e9 for one in rounds] for name in (*_WRITES, *_READS)}
        ratios = {name: statistics.median(one[limit] / one[name] for one in rounds) for name, limit in _LIMITS.items()}
        table = new_table("checkpoint")
        for name in ("", "GB/s", "min", "max", "of the disk"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for name, speeds in gbs.items():
            cells = [f"{one:.2f}" for one in (statistics.median(speeds), min(speeds), max(speeds))]
            table.add_row(name, *cells, f"{ratios[name]:.0%}" if name in ratios else "")
        self._screen.print("")
        self._screen.print(table)
        how = "O_DIRECT" if self._direct else "buffered and synced; dropped from the page cache before each read"
        for line in (
            f"# medians of {len(rounds)} rounds on the slowest rank; {how}. raw: plain blocks of 4 MiB and an fsync.",
            "# save makes a new checkpoint; replace puts it over one, which a thread deletes later. load checks all.",
            "# of the disk: our speed over the raw one of the same round, median.",
            f"# wrong values: {wrong}" + (": THE DATA IS WRONG" if wrong else ""),
        ):
            self._screen.print(line)
        if self._options.json is not None and self._world.rank == 0:
            document = {
                "bench": "checkpoint",
                "machine": machine,
                "nbytes": self._nbytes,
                "threads": self._threads,
                "direct": self._direct,
                "gbs": {name: statistics.median(speeds) for name, speeds in gbs.items()},
                "ratios": ratios,
                "rounds": rounds,
                "wrong": wrong,
            }
            write_json(self._options.json, document)


def _shapes(numel: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model of about ``numel`` parameters: large weights, small biases, a remainder."""
    shapes: dict[str, tuple[int, ...]] = {}
    while numel >= 1024 * 4096 + 4096:
        shapes[f"block{len(shapes) // 2}.weight"] = (1024, 4096)
        shapes[f"block{len(shapes) // 2}.bias"] = (4096,)
        numel -= 1024 * 4096 + 4096
    shapes["head.weight"] = (numel // 64, 64)
    return shapes
