"""``zerort bench offload``: AdamW over state on a disk, against the disk alone and the computing alone.

    each round, in rotating order:
        read + write     the pipeline, computing nothing        what bounds a step that waits for the disk
        compute          AdamW over the slots' memory           what bounds a step that waits for the processor
        streamed         the pipeline with AdamW                this over the larger of the two is the figure
        serial           the same with depth 1                  what it would be without overlap

Two chunks are also updated in memory, and compared to the bit at the end.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from zerort import trace
from zerort.cli.bench.harness import Benchmark, Result, rounds_table, run_in_ranks, wrong_line
from zerort.cli.bench.timing import rotated
from zerort.cli.world import World
from zerort.config import format_bytes
from zerort.native import adamw_
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files.failures import free_nbytes, no_room
from zerort.streaming import Pipeline, StoreTransfer, cut_evenly, slot_nbytes_of
from zerort.typing import Array

__all__ = ["run_offload"]

_KINDS = ("master", "exp_avg", "exp_avg_sq")
_SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
_NAMES = ("read + write", "compute", "streamed", "serial")


def run_offload(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here if several are asked for. Return the exit code."""
    return run_in_ranks(options, words, lambda world: _run(options, world), ranks=1)


def _run(options: argparse.Namespace, world: World) -> int:
    needed = 4 * len(_KINDS) * options.numel
    free = world.first(free_nbytes(str(options.dir)))
    if free is not None and free < needed:
        raise no_room(os.path.abspath(options.dir), what="the benchmark", needed=needed, why="the disk is too full")
    settings = NvmeOptions(threads=options.threads, checksum=not options.unchecked)
    with NvmeStore(options.dir, rank=world.rank, options=settings) as store:
        return _OffloadBenchmark(options, store, world).run()


class _OffloadBenchmark(Benchmark):
    """AdamW over state on a disk, and the two parts that bound it."""

    name = "offload"

    def __init__(self, options: argparse.Namespace, store: NvmeStore, world: World) -> None:
        super().__init__(options, world=world)
        self._store = store
        self._numel = max(options.numel // world.size, 1)
        self._step = 0
        for kind in _KINDS:
            store.create(kind, 4 * self._numel)
        ranges = cut_evenly(self._numel, most=max(options.chunk // 4, 1))
        self._chunk = max(end - begin for begin, end in ranges)
        self._chunks = [
            [StoreTransfer(store=store, name=kind, numel=end - begin, offset=4 * begin) for kind in _KINDS]
            for begin, end in ranges
        ]
        generator = np.random.default_rng(world.rank)
        self._gradient = np.resize(generator.standard_normal(1 << 18, np.float32), self._chunk)
        # What the first and the last chunk have to be, updated in memory.
        self._expected = {
            number: [np.zeros(self._chunks[number][0].numel, np.float32) for _ in _KINDS]
            for number in (0, len(self._chunks) - 1)
        }
        slot = slot_nbytes_of(self._chunks)
        self._pipeline = Pipeline(slot_nbytes=slot, depth=options.depth, name="offload")
        self._serial = Pipeline(slot_nbytes=slot, depth=1, name="serial")
        self._memory = [np.zeros(self._chunk, np.float32) for _ in range(3 * len(_KINDS))]

    def describe(self) -> dict[str, Any]:
        return {"ranks": self.world.size, "directory": os.path.abspath(self.options.dir)}

    def head(self, machine: dict[str, Any]) -> list[str]:
        ranks, options = self.world.size, self.options
        return [
            f"# AdamW over {options.numel:,} parameters on {ranks} rank{'s' * (ranks > 1)}: "
            f"{format_bytes(4 * len(_KINDS) * options.numel)} of state read and written per step, in "
            f"{len(self._chunks)} chunks of up to {format_bytes(4 * len(_KINDS) * self._chunk)} per rank",
            f"# disk: {machine['directory']}, {options.threads} threads each way",
            "",
        ]

    def measure(self) -> Result:
        options = self.options
        with self._pipeline, self._serial:
            rounds = self.rounds(self._round)
            if options.trace is not None:
                self._trace()
            depth, memory = self._pipeline.depth, self._pipeline.nbytes
        wrong = self.world.total(self._wrong())
        ratios = {
            name: statistics.median(one[name] / max(one["read + write"], one["compute"]) for one in rounds)
            for name in ("streamed", "serial")
        }
        seconds = {name: [one[name] for one in rounds] for name in _NAMES}
        medians = {name: statistics.median(every) for name, every in seconds.items()}
        moved = 2 * 4 * len(_KINDS) * options.numel
        more = {
            "GB/s moved": {name: f"{moved / medians[name] / 1e9:.2f}" for name in _NAMES if name != "compute"},
            "over the bound": {name: f"{ratio:.2f}" for name, ratio in ratios.items()},
        }
        how = "O_DIRECT" if self._store.direct else "through the page cache"
        return Result(
            tables=[rounds_table("offload", "s", seconds, digits=3, more=more)],
            legend=[
                f"# medians of {len(rounds)} rounds on the slowest rank; {how}; depth {depth}, "
                f"{format_bytes(memory)} of slots per rank.",
                "# over the bound: over the larger of read + write alone and computing alone, in the same round, "
                "median.",
                wrong_line("elements", wrong),
            ],
            figures={
                "numel": options.numel,
                "chunk_nbytes": 4 * self._chunk,
                "depth": depth,
                "slots_nbytes": memory,
                "checksum": not options.unchecked,
                "direct": self._store.direct,
                "seconds": medians,
                "ratios": ratios,
                "rounds": rounds,
                "wrong": wrong,
            },
            failed=bool(wrong),
        )

    def _round(self, number: int) -> dict[str, float]:
        """Return seconds by name."""
        works: dict[str, Callable[[], object]] = {
            "read + write": lambda: self._pipeline.run(self._chunks, _nothing),
            "compute": self._compute_alone,
            "streamed": lambda: self._stream(self._pipeline),
            "serial": lambda: self._stream(self._serial),
        }
        return {name: self.time(name, works[name]) for name in rotated(_NAMES, number)}

    def _update(self, arrays: list[Array] | tuple[Array, ...], step: int) -> None:
        master, exp_avg, exp_avg_sq = arrays
        adamw_(master, self._gradient[: master.size], exp_avg, exp_avg_sq, step=step, **_SETTINGS)  # type: ignore[arg-type]

    def _stream(self, pipeline: Pipeline) -> None:
        self._step += 1
        pipeline.run(self._chunks, lambda number, *arrays: self._update(arrays, self._step))

    def _compute_alone(self) -> None:
        for number, chunk in enumerate(self._chunks):
            at = number % 3 * len(_KINDS)
            self._update([array[: chunk[0].numel] for array in self._memory[at : at + len(_KINDS)]], number + 1)

    def _wrong(self) -> int:
        wrong = 0
        for number, arrays in self._expected.items():
            for step in range(1, self._step + 1):
                self._update(arrays, step)
            for part, expected in zip(self._chunks[number], arrays, strict=True):
                found = self._store.read(part.name, np.empty(part.numel, np.float32), offset=part.offset).wait()
                wrong += int((found.view(np.uint32) != expected.view(np.uint32)).sum())
        return wrong

    def _trace(self) -> None:
        trace.reset()
        trace.enable()
        try:
            self._stream(self._pipeline)
        finally:
            trace.disable()
        if self.world.rank == 0:
            trace.write_chrome(self.options.trace, [trace.rank_events(0, socket.gethostname())])


def _nothing(number: int, *arrays: Array) -> None:
    """Compute nothing."""
