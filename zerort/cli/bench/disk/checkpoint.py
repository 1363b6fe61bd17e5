"""``zerort bench checkpoint``: start the ranks, save and load a state, and compare with the disk itself.

each round, in rotating order:
raw write   save   replace        raw read   load
blocks      fresh  over the last  blocks     checked by its checksums, and against what was saved
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zerort.checkpoint import Value, load, save
from zerort.checkpoint.failure import free_nbytes, room_error
from zerort.checkpoint.files.sweep import wait_for_sweeps
from zerort.checkpoint.format.extents import plan_shard
from zerort.cli.bench.disk.rawdisk import RawDisk, forget
from zerort.cli.bench.harness import Benchmark, Result, rounds_table, run_in_ranks, wrong_line
from zerort.cli.bench.timing import rotated
from zerort.cli.machine import available_nbytes
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.errors import CallError
from zerort.layout import FlatLayout, Partition
from zerort.native import crc32c
from zerort.storage.files.blocks import worker_count

__all__ = ["run_checkpoint"]

_KINDS = ("parameter", "exp_avg", "exp_avg_sq")
_WRITES, _READS = ["raw write", "save", "replace"], ["raw read", "load"]
_LIMITS = {"save": "raw write", "replace": "raw write", "load": "raw read"}
"""What each figure of ours is compared with."""


def run_checkpoint(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    if launched_size() is not None:
        return run_in_ranks(options, words, lambda world: _run(options, world))
    # Made and removed here: whatever happens to the ranks, nothing of a gigabyte is left behind.
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="zerort-bench-") as inside:
        return run_in_ranks(options, [*words, "--inside", os.path.abspath(inside)], lambda world: _run(options, world))


def _run(options: argparse.Namespace, world: World) -> int:
    with open_group() as group, _directory(options, world) as inside:
        return _CheckpointBenchmark(options, group, world, inside).run()


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


class _CheckpointBenchmark(Benchmark):
    """Save, replace and load of a checkpoint, and plain blocks."""

    name = "checkpoint"

    def __init__(self, options: argparse.Namespace, group: Group, world: World, inside: str) -> None:
        super().__init__(options, world=world)
        self._group = group
        self._inside = inside
        self._check_room(options.nbytes)
        self._layout = FlatLayout.build(_shapes(options.nbytes // len(_KINDS) // 4))
        self._nbytes = len(_KINDS) * self._layout.nbytes
        self._threads = worker_count(world.size)
        self._wrong = 0
        self._direct = True

    def describe(self) -> dict[str, Any]:
        return {"ranks": self.world.size, "directory": os.path.abspath(self.options.dir)}

    def head(self, machine: dict[str, Any]) -> list[str]:
        ranks = self.world.size
        return [
            f"# {ranks} rank{'s' * (ranks > 1)} with {self._threads} threads each; a state of "
            f"{format_bytes(self._nbytes)}: {', '.join(_KINDS)} of {len(self._layout.extents)} fp32 tensors",
            f"# disk: {machine['directory']}",
            "",
        ]

    def measure(self) -> Result:
        values = self._values()
        sums = [crc32c(value.array) for value in values]
        rounds = self.rounds(lambda number: self._round(number, values, sums))
        wrong = self.world.total(self._wrong)
        gbs = {name: [self._nbytes / one[name] / 1e9 for one in rounds] for name in (*_WRITES, *_READS)}
        ratios = {name: statistics.median(one[limit] / one[name] for one in rounds) for name, limit in _LIMITS.items()}
        shares = {name: f"{ratio:.0%}" for name, ratio in ratios.items()}
        how = "O_DIRECT" if self._direct else "buffered and synced; dropped from the page cache before each read"
        return Result(
            tables=[rounds_table("checkpoint", "GB/s", gbs, digits=2, more={"of the disk": shares})],
            legend=[
                f"# medians of {len(rounds)} rounds on the slowest rank; {how}. raw: plain blocks of 4 MiB and an "
                "fsync.",
                "# save makes a new checkpoint; replace puts it over one, which a thread deletes later. load checks "
                "all.",
                "# of the disk: our speed over the raw one of the same round, median.",
                wrong_line("values", wrong),
            ],
            figures={
                "nbytes": self._nbytes,
                "threads": self._threads,
                "direct": self._direct,
                "gbs": {name: statistics.median(speeds) for name, speeds in gbs.items()},
                "ratios": ratios,
                "rounds": rounds,
                "wrong": wrong,
            },
            failed=bool(wrong),
        )

    def _check_room(self, nbytes: int) -> None:
        # Each rank would find something else, while the others write: rank 0's findings count.
        free, available = self.world.first((free_nbytes(self._inside), available_nbytes()))
        if free is not None and free < 3 * nbytes:
            raise room_error(self._inside, needed=3 * nbytes, why="the benchmark keeps three copies at once")
        if 1.1 * nbytes > available:
            raise CallError(
                f"--nbytes: Expected at most the {format_bytes(available)} of memory that are available, got "
                f"{format_bytes(nbytes)}. Use a smaller state."
            )

    def _values(self) -> list[Value]:
        partition = Partition.build(self._layout.numel, self.world.size)
        generator = np.random.default_rng(self.world.rank)
        some = generator.standard_normal(1 << 18, np.float32)
        values = []
        for kind in _KINDS:
            mine = np.resize(some, partition.counts[self.world.rank])
            values.append(Value(kind=kind, layout=self._layout, partition=partition, mine=mine))
        return values

    def _round(self, number: int, values: list[Value], sums: list[int]) -> dict[str, float]:
        path = os.path.join(self._inside, f"checkpoint-{number}")
        nbytes = plan_shard(values, self.world.rank, phases=[0] * len(values)).nbytes
        raw = RawDisk(os.path.join(self._inside, f"raw-{number}.{self.world.rank}"), nbytes, threads=self._threads)

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
        for name in (*rotated(_WRITES, number % 2), *rotated(_READS, number)):
            if name == "load":
                for value in values:
                    value.array[:] = 0
            if name in _READS and not self._direct:
                forget(path)
                forget(raw.path)
            seconds[name] = self.time(name, works[name])
            wait_for_sweeps()  # a deletion in the background is nobody else's time
            if name == "load":
                self._wrong += sum(crc32c(value.array) != sums[at] for at, value in enumerate(values))
        self._group.barrier().wait()
        raw.remove()
        if self.world.rank == 0:
            shutil.rmtree(path)
        self._group.barrier().wait()
        return seconds


def _shapes(numel: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model of about ``numel`` parameters: large weights, small biases, a remainder."""
    shapes: dict[str, tuple[int, ...]] = {}
    while numel >= 1024 * 4096 + 4096:
        shapes[f"block{len(shapes) // 2}.weight"] = (1024, 4096)
        shapes[f"block{len(shapes) // 2}.bias"] = (4096,)
        numel -= 1024 * 4096 + 4096
    shapes["head.weight"] = (numel // 64, 64)
    return shapes
