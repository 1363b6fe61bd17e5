"""``zerort bench nvme``: a store's reads and writes against the disk itself, in turn on one file.

    each round, in rotating order:
        fio write   plain write   store write        fio read   plain read   store read

Plain blocks have the store's size, threads and O_DIRECT mode, and write the same bytes; both end with an fsync.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from zerort.cli.bench.disk.fio import fio_gbs
from zerort.cli.bench.disk.rawdisk import forget
from zerort.cli.bench.harness import Benchmark, Result, rounds_table, wrong_line
from zerort.cli.bench.timing import rotated
from zerort.config import format_bytes
from zerort.device import HostDevice, Ticket
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files.blocks import BLOCK_NBYTES, BlockFile, run_workers
from zerort.storage.files.failures import free_nbytes, no_room
from zerort.typing import Array

__all__ = ["run_nvme"]

_CHUNK_NBYTES = 8 * BLOCK_NBYTES
_RING = 4
"""Chunks of the store that are under way at once; each is cut into blocks for the threads."""


def run_nvme(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code."""
    needed = 2 * options.nbytes
    free = free_nbytes(str(options.dir))
    if free is not None and free < needed:
        raise no_room(os.path.abspath(options.dir), what="the benchmark", needed=needed, why="the disk is too full")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="zerort-bench-") as inside:
        settings = NvmeOptions(threads=options.threads, checksum=not options.unchecked)
        with HostDevice() as device, NvmeStore(inside, options=settings) as store:
            return _StoreBenchmark(options, store, device).run()


class _StoreBenchmark(Benchmark):
    """Reads and writes of a store, of plain threads and of fio."""

    name = "nvme"

    def __init__(self, options: argparse.Namespace, store: NvmeStore, device: HostDevice) -> None:
        super().__init__(options)
        self._store = store
        self._threads = options.threads
        step = BLOCK_NBYTES * self._threads  # fio's jobs get equal parts of whole blocks
        self._nbytes = max(options.nbytes // step, 1) * step
        store.create("value", self._nbytes)
        self._path = os.path.join(store.path, "value.chunk")
        self._ring = device.empty(min(_RING * _CHUNK_NBYTES, self._nbytes), "uint8", alignment=4096)
        some = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
        self._data = device.empty(self._ring.size, "uint8", alignment=4096)
        self._data[:] = np.resize(some, self._data.size)
        self._data[:: 1 << 20] = np.arange(len(self._data[:: 1 << 20]))  # so that chunks differ
        self._fio = shutil.which("fio")

    def describe(self) -> dict[str, Any]:
        return {"directory": os.path.abspath(self.options.dir)}

    def head(self, machine: dict[str, Any]) -> list[str]:
        return [
            f"# {machine['directory']}: a file of {format_bytes(self._nbytes)} in blocks of "
            f"{format_bytes(BLOCK_NBYTES)}, {self._threads} threads; {'' if self._fio else 'fio is not installed'}",
            "",
        ]

    def measure(self) -> Result:
        rounds = self.rounds(self._round)
        wrong = self._wrong()
        ratios = {
            f"store {verb}": statistics.median(
                one[f"store {verb}"] / max(one[f"plain {verb}"], one.get(f"fio {verb}", 0.0)) for one in rounds
            )
            for verb in ("write", "read")
        }
        gbs = {name: [one[name] for one in rounds] for name in rounds[0]}
        shares = {name: f"{ratio:.0%}" for name, ratio in ratios.items()}
        how = "O_DIRECT" if self._store.direct else "buffered and synced; dropped from the page cache before each read"
        checks = "unchecked" if self.options.unchecked else "a crc32c of every 256 KiB kept and compared"
        return Result(
            tables=[rounds_table("nvme", "GB/s", gbs, digits=2, more={"of the best": shares})],
            legend=[
                f"# medians of {len(rounds)} rounds; {how}. store: {checks}. Writes end with an fsync.",
                "# of the best: the store's speed over the better of plain threads and fio in the same round, median.",
                wrong_line("bytes", wrong),
            ],
            figures={
                "nbytes": self._nbytes,
                "threads": self._threads,
                "checksum": not self.options.unchecked,
                "direct": self._store.direct,
                "gbs": {name: statistics.median(every) for name, every in gbs.items()},
                "ratios": ratios,
                "rounds": rounds,
                "wrong": wrong,
            },
            failed=bool(wrong),
        )

    def _round(self, number: int) -> dict[str, float]:
        """Return GB/s by name."""
        ours: dict[str, dict[str, Callable[[], object]]] = {
            "write": {"plain write": self._plain_write, "store write": self._store_write},
            "read": {"plain read": self._plain_read, "store read": self._store_read},
        }
        found = {}
        for verb, works in ours.items():
            if self._fio:  # first: what it writes is not what the store knows
                found[f"fio {verb}"] = fio_gbs(self._fio, self._path, verb, self._nbytes, threads=self._threads)
            for name in rotated(list(works), number - 1):  # so that round 1 names them in the table's order
                if verb == "read" and not self._store.direct:
                    forget(self._path)
                found[name] = self._nbytes / self.time(name, works[name]) / 1e9
        return found

    def _piece(self, offset: int, nbytes: int, memory: Array) -> Array:
        at = offset % memory.size
        return memory[at : at + nbytes]

    def _plain_write(self) -> None:
        def work(task: int, buffer: Array) -> None:
            file.write(self._piece(task * BLOCK_NBYTES, BLOCK_NBYTES, self._data), task * BLOCK_NBYTES)

        with BlockFile(self._path, writable=True, direct=self._store.direct) as file:
            run_workers(self._nbytes // BLOCK_NBYTES, work, threads=self._threads, buffer_nbytes=0)
            file.sync()

    def _plain_read(self) -> None:
        def work(task: int, buffer: Array) -> None:
            # Into the memory that the store fills: blocks that are read over and over stay in the cache.
            file.read(self._piece(task * BLOCK_NBYTES, BLOCK_NBYTES, self._ring), task * BLOCK_NBYTES)

        with BlockFile(self._path, direct=self._store.direct) as file:
            run_workers(self._nbytes // BLOCK_NBYTES, work, threads=self._threads, buffer_nbytes=0)

    def _store_write(self) -> None:
        self._stream(lambda piece, offset: self._store.write("value", piece, offset=offset), self._data)
        self._store.flush()

    def _store_read(self) -> None:
        self._stream(lambda piece, offset: self._store.read("value", piece, offset=offset), self._ring)

    def _stream(self, move: Callable[[Array, int], Ticket[Array]], memory: Array) -> None:
        under_way: collections.deque[Ticket[Array]] = collections.deque()
        for offset in range(0, self._nbytes, _CHUNK_NBYTES):
            if len(under_way) == _RING:
                under_way.popleft().wait()
            nbytes = min(_CHUNK_NBYTES, self._nbytes - offset, memory.size - offset % memory.size)
            under_way.append(move(self._piece(offset, nbytes, memory), offset))
        for ticket in under_way:
            ticket.wait()

    def _wrong(self) -> int:
        """Return the bytes that are not what was written."""
        wrong = 0
        for offset in range(0, self._nbytes, _CHUNK_NBYTES):
            nbytes = min(_CHUNK_NBYTES, self._nbytes - offset, self._ring.size - offset % self._ring.size)
            found = self._store.read("value", self._piece(offset, nbytes, self._ring), offset=offset).wait()
            wrong += int((found != self._piece(offset, nbytes, self._data)).sum())
        return wrong
