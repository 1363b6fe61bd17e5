"""``zerort bench offload``: AdamW over state on a disk, against the disk alone and the computing alone.

    each round, in rotating order:
        read + write     the pipeline, computing nothing        what bounds a step that waits for the disk
        compute          AdamW over the slots' memory           what bounds a step that waits for the processor
        streamed         the pipeline with AdamW                this over the larger of the two is the figure
        serial           the same with depth 1                  what it would be without overlap

A ratio is taken within a round; medians over the rounds count. Two chunks are also updated in memory, and compared to
the bit at the end.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zerort import trace
from zerort.cli.arguments import UsageError
from zerort.cli.machine import describe_machine, machine_lines
from zerort.cli.ranks import run_ranks
from zerort.cli.screen import Screen, new_table
from zerort.cli.world import World
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.native import adamw_
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files.failures import free_nbytes, no_room
from zerort.streaming import Part, Pipeline, cut_evenly
from zerort.trace.files import write_json
from zerort.typing import Array

__all__ = ["run_offload"]

_KINDS = ("master", "exp_avg", "exp_avg_sq")
_SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
_NAMES = ("read + write", "compute", "streamed", "serial")


def run_offload(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here if several are asked for. Return the exit code."""
    if launched_size() is None and (options.ranks or 1) > 1:
        code = run_ranks(options.ranks, ["-m", "zerort", *words, *Screen.words()]).code
        return code if code in (0, 2) else 1
    world = World()
    if options.ranks not in (None, world.size):
        raise UsageError(f"--ranks: Expected the {world.size} ranks that the launcher started, got {options.ranks}.")
    needed = 4 * len(_KINDS) * options.numel
    free = world.first(free_nbytes(str(options.dir)))
    if free is not None and free < needed:
        raise no_room(os.path.abspath(options.dir), what="the benchmark", needed=needed, why="the disk is too full")
    settings = NvmeOptions(threads=options.threads, checksum=not options.unchecked)
    with NvmeStore(options.dir, rank=world.rank, options=settings) as store:
        return _Bench(options, store, world).run()


class _Bench:
    """One run of the benchmark, on one rank."""

    def __init__(self, options: argparse.Namespace, store: NvmeStore, world: World) -> None:
        self._options = options
        self._store = store
        self._world = world
        self._screen = Screen(options.screen, shown=world.rank == 0)
        self._numel = max(options.numel // world.size, 1)
        self._step = 0
        for kind in _KINDS:
            store.create(kind, 4 * self._numel)
        ranges = cut_evenly(self._numel, most=max(options.chunk // 4, 1))
        self._chunk = max(end - begin for begin, end in ranges)
        self._chunks = [
            [Part(store=store, name=kind, numel=end - begin, offset=4 * begin) for kind in _KINDS]
            for begin, end in ranges
        ]
        generator = np.random.default_rng(world.rank)
        self._gradient = np.resize(generator.standard_normal(1 << 18, np.float32), self._chunk)
        # What the first and the last chunk have to be, updated in memory.
        self._expected = {
            number: [np.zeros(self._chunks[number][0].numel, np.float32) for _ in _KINDS]
            for number in (0, len(self._chunks) - 1)
        }
        slot = Pipeline.slot_nbytes_of(self._chunks)
        self._pipeline = Pipeline(slot_nbytes=slot, depth=options.depth, name="offload")
        self._serial = Pipeline(slot_nbytes=slot, depth=1, name="serial")
        self._memory = [np.zeros(self._chunk, np.float32) for _ in range(3 * len(_KINDS))]

    def run(self) -> int:
        options = self._options
        machine = {**describe_machine(), "ranks": self._world.size, "directory": os.path.abspath(options.dir)}
        for line in self._head(machine):
            self._screen.print(line)
        rounds = []
        with self._pipeline, self._serial, self._screen.bar(options.rounds + 1) as bar:
            # The first round warms up: memory is touched, files are written, a depth is chosen.
            for number in range(options.rounds + 1):
                bar.step(f"round {number}" if number else "warming up", advance=int(number > 0))
                rounds.append(self._round(number))
            if options.trace is not None:
                self._trace()
            depth, memory = self._pipeline.depth or 1, self._pipeline.nbytes
        wrong = self._world.total(self._wrong())
        self._report(machine, rounds[1:], wrong, depth, memory)
        return 1 if wrong else 0

    def _round(self, number: int) -> dict[str, float]:
        works: dict[str, Callable[[], object]] = {
            "read + write": lambda: self._pipeline.run(self._chunks, _nothing),
            "compute": self._compute_alone,
            "streamed": lambda: self._stream(self._pipeline),
            "serial": lambda: self._stream(self._serial),
        }
        turn = number % len(_NAMES)
        return {name: self._time(works[name]) for name in _NAMES[turn:] + _NAMES[:turn]}

    def _time(self, work: Callable[[], object]) -> float:
        self._world.all(0)
        began = time.perf_counter()
        work()
        return self._world.maxima([time.perf_counter() - began])[0]

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
        if self._world.rank == 0:
            trace.write_chrome(self._options.trace, [trace.rank_events(0, socket.gethostname())])

    def _head(self, machine: dict[str, Any]) -> list[str]:
        ranks, options = self._world.size, self._options
        return [
            *machine_lines(machine),
            f"# AdamW over {options.numel:,} parameters on {ranks} rank{'s' * (ranks > 1)}: "
            f"{format_bytes(4 * len(_KINDS) * options.numel)} of state read and written per step, in "
            f"{len(self._chunks)} chunks of up to {format_bytes(4 * len(_KINDS) * self._chunk)} per rank",
            f"# disk: {machine['directory']}, {self._options.threads} threads each way",
        ]

    def _report(
        self, machine: dict[str, Any], rounds: list[dict[str, float]], wrong: int, depth: int, memory: int
    ) -> None:
        ratios = {
            name: statistics.median(one[name] / max(one["read + write"], one["compute"]) for one in rounds)
            for name in ("streamed", "serial")
        }
        moved = 2 * 4 * len(_KINDS) * self._options.numel
        table = new_table("offload")
        for name in ("", "s", "min", "max", "GB/s moved", "over the bound"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        medians = {name: statistics.median(one[name] for one in rounds) for name in _NAMES}
        for name, seconds in medians.items():
            every = [one[name] for one in rounds]
            speed = "" if name == "compute" else f"{moved / seconds / 1e9:.2f}"
            cells = [f"{seconds:.3f}", f"{min(every):.3f}", f"{max(every):.3f}", speed]
            table.add_row(name, *cells, f"{ratios[name]:.2f}" if name in ratios else "")
        self._screen.print("")
        self._screen.print(table)
        how = "O_DIRECT" if self._store.direct else "through the page cache"
        for line in (
            f"# medians of {len(rounds)} rounds on the slowest rank; {how}; depth {depth}, "
            f"{format_bytes(memory)} of slots per rank.",
            "# over the bound: over the larger of read + write alone and computing alone, in the same round, median.",
            f"# wrong elements: {wrong}" + (": THE DATA IS WRONG" if wrong else ""),
        ):
            self._screen.print(line)
        if self._options.json is not None and self._world.rank == 0:
            document = {
                "bench": "offload",
                "machine": machine,
                "numel": self._options.numel,
                "chunk_nbytes": 4 * self._chunk,
                "depth": depth,
                "slots_nbytes": memory,
                "checksum": not self._options.unchecked,
                "direct": self._store.direct,
                "seconds": medians,
                "ratios": ratios,
                "rounds": rounds,
                "wrong": wrong,
            }
            write_json(self._options.json, document)


def _nothing(number: int, *arrays: Array) -> None:
    """Compute nothing."""
