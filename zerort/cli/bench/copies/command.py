"""``zerort bench copies``: how fast one GPU's memory is filled from the host and emptied to it, pinned and pageable.

    in        host to device          both ways   in and out at once, on two streams: GB/s of both together
    out       device to host          within      device to device

All ways of one size are timed in turn, repetition by repetition, and what arrives is compared. What copies are for, the
update of a state that rests on the host, is measured too (updates.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort.cli.bench.harness import Benchmark, Result
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.screen import new_table
from zerort.config import format_bytes
from zerort.errors import DeviceMemoryError

if TYPE_CHECKING:
    from rich.table import Table

    from zerort.device.cuda.device import CudaDevice

__all__ = ["CopyRow", "run_copies"]

_WAYS = ("in, pinned", "in, pageable", "out, pinned", "out, pageable", "both ways, pinned", "within")


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One way of copying, at one size."""

    way: str
    nbytes: int
    """That arrive in one copy; both ways: in both together."""
    time_us: float
    """Microseconds, median."""
    wrong: int
    """Bytes that did not arrive as they were sent."""

    @property
    def gbs(self) -> float:
        """GB/s."""
        return self.nbytes / self.time_us / 1e3


def run_copies(options: argparse.Namespace) -> int:
    """Run the benchmark on one GPU and return the exit code."""
    from zerort.device.cuda.device import CudaDevice

    with CudaDevice(options.gpu) as device:
        return _CopiesBenchmark(options, device).run()


class _CopiesBenchmark(Benchmark):
    """Copies between the host and a GPU, and streamed updates."""

    name = "copies"

    def __init__(self, options: argparse.Namespace, device: CudaDevice) -> None:
        super().__init__(options)
        self._device = device

    def head(self, machine: dict[str, Any]) -> list[str]:
        free, total = self._device.memory()
        return [f"# {self._device.name}: {format_bytes(free)} free of {format_bytes(total)}"]

    def measure(self) -> Result:
        from zerort.cli.bench.copies.updates import host_nbytes, run_updates
        from zerort.device.cuda.pinned import PinnedMemory

        options, device, screen = self.options, self._device, self.screen
        rows: list[CopyRow] = []
        most = max(options.sizes)
        room = np.frombuffer(mmap.mmap(-1, 2 * most + host_nbytes(options.parameters)), np.uint8)
        try:
            pinned = PinnedMemory(room)
        except DeviceMemoryError as error:
            pinned = PinnedMemory(room, pin=False)
            screen.print(f"# not pinned, so these are pageable too: {error}")
        with pinned:
            arrays = _Arrays(device, most, pinned.empty(most, "uint8"), pinned.empty(most, "uint8", alignment=1))
            for size in options.sizes:
                rows += arrays.measure(size, options.seconds)
            screen.print(_table(rows))
            updates = run_updates(device, pinned, options.parameters, seconds=options.seconds, screen=screen)
        return Result(
            tables=[],
            legend=[],
            figures={
                "rows": [{**dataclasses.asdict(row), "gbs": row.gbs} for row in rows],
                "updates": [dataclasses.asdict(row) for row in updates],
            },
            failed=any(row.wrong for row in rows) or any(row.wrong for row in updates),
        )


def _table(rows: list[CopyRow]) -> Table:
    table = new_table("copies")
    for name in ("size\nB", "way\n", "time\nµs", "GB/s\n", "#wrong\n"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.nbytes), row.way, f"{row.time_us:.1f}", f"{row.gbs:.2f}", str(row.wrong))
    return table


class _Arrays:
    """What is copied between: pinned and pageable on the host, two on the GPU."""

    def __init__(self, device: Any, nbytes: int, pinned_in: Any, pinned_out: Any) -> None:
        self._device = device
        self._pinned_in, self._pinned_out = pinned_in, pinned_out
        self._pageable = np.zeros(nbytes, np.uint8)
        self._there, self._other = device.empty(nbytes, "uint8"), device.empty(nbytes, "uint8")
        self._pattern = (np.arange(nbytes) % 251).astype(np.uint8)

    def measure(self, nbytes: int, seconds: float) -> list[CopyRow]:
        works = {way: self._work(way, nbytes) for way in _WAYS}
        wrong = {way: self._check(way, work, nbytes) for way, work in works.items()}
        timings = time_interleaved(works, seconds=seconds)
        return [
            CopyRow(way, nbytes * (2 if way.startswith("both") else 1), timings[way].median * 1e6, wrong[way])
            for way in _WAYS
        ]

    def _work(self, way: str, nbytes: int) -> Callable[[], object]:
        copy = self._device.copy
        there, other = self._there[:nbytes], self._other[:nbytes]
        source, into = self._pinned_in[:nbytes], self._pinned_out[:nbytes]
        pageable = self._pageable[:nbytes]

        def both_ways() -> None:
            tickets = copy(source, out=there), copy(other, out=into)
            for ticket in tickets:
                ticket.wait()

        return {
            "in, pinned": lambda: copy(source, out=there).wait(),
            "in, pageable": lambda: copy(pageable, out=there).wait(),
            "out, pinned": lambda: copy(there, out=into).wait(),
            "out, pageable": lambda: copy(there, out=pageable).wait(),
            "both ways, pinned": both_ways,
            "within": lambda: copy(there, out=other).wait(),
        }[way]

    def _check(self, way: str, work: Callable[[], object], nbytes: int) -> int:
        """Send the pattern this way and count the bytes that differ at its end."""
        pattern = self._pattern[:nbytes]
        for array in (self._pinned_in, self._pinned_out, self._pageable):
            array[:nbytes] = 0
        self._there.fill(0)
        self._other.fill(0)
        if way.startswith(("in", "both")):
            (self._pageable if "pageable" in way else self._pinned_in)[:nbytes] = pattern
        else:
            self._there[:nbytes].set(pattern)
        if way.startswith("both"):
            self._other[:nbytes].set(pattern)
        work()
        ends = {
            "in": [self._there],
            "out": [self._pageable if "pageable" in way else self._pinned_out],
            "both ways": [self._there, self._pinned_out],
            "within": [self._other],
        }[way.partition(",")[0]]
        found = [end[:nbytes] if isinstance(end, np.ndarray) else end[:nbytes].get() for end in ends]
        return sum(int(np.count_nonzero(one != pattern)) for one in found)
