"""``zerort bench optimizer``: fused steps against the memory limit, their NumPy forms and torch, in one process.

All of one optimizer's forms and the limit are timed in turn, repetition by repetition.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.harness import Benchmark, Result
from zerort.cli.bench.limits import MemoryLimit
from zerort.cli.bench.optimizer.contenders import NBYTES_PER_ELEMENT, Arrays, numpy_steps, our_steps, torch_steps
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.machine import available_nbytes
from zerort.cli.screen import new_table
from zerort.config import format_bytes
from zerort.errors import CallError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["OptimizerRow", "run_optimizer"]

_NO_TORCH = "--compare torch: left out, torch is not installed here. Install it: pip install torch."


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer's step over ``numel`` parameters. Times are medians in ms."""

    step: str
    numel: int
    nbytes_per_element: int
    native_ms: float
    numpy_ms: float
    torch_ms: float | None
    limit_gbs: float

    @property
    def gbs(self) -> float:
        """GB/s that ours moved."""
        return self.numel * self.nbytes_per_element / self.native_ms / 1e6

    @property
    def fraction(self) -> float:
        """The part of the memory limit at which ours ran."""
        return self.gbs / self.limit_gbs

    @property
    def ratio(self) -> float | None:
        """Torch's time over ours."""
        return None if self.torch_ms is None else self.torch_ms / self.native_ms

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        return {**dataclasses.asdict(self), "gbs": self.gbs, "fraction": self.fraction, "ratio": self.ratio}


def run_optimizer(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code."""
    needed = options.numel * (28 if options.compare else 20)
    if needed > 0.9 * available_nbytes():
        raise CallError(
            f"--numel: Expected {format_bytes(needed)} of memory, got {format_bytes(available_nbytes())} available. "
            "Use fewer elements."
        )
    return _OptimizerBenchmark(options).run()


class _OptimizerBenchmark(Benchmark):
    """Fused steps, their NumPy forms, torch's, and the memory limit, on one thread."""

    name = "optimizer"

    def head(self, machine: dict[str, Any]) -> list[str]:
        return []

    def measure(self) -> Result:
        options = self.options
        arrays = Arrays.make(options.numel)
        peers: dict[str, Callable[[], object]] = {}
        if options.compare:
            try:
                peers = torch_steps(arrays)
            except ImportError:
                self.screen.print(f"# {_NO_TORCH}")
        limit = MemoryLimit()
        rows = []
        with self.screen.bar(len(NBYTES_PER_ELEMENT)) as bar:
            for step, nbytes in NBYTES_PER_ELEMENT.items():
                bar.step(step)
                works = {"native": our_steps(arrays)[step], "numpy": numpy_steps(arrays)[step], "limit": limit.run}
                if step in peers:
                    works["torch"] = peers[step]
                timings = time_interleaved(works, seconds=options.seconds)
                rows.append(
                    OptimizerRow(
                        step=step,
                        numel=options.numel,
                        nbytes_per_element=nbytes,
                        native_ms=timings["native"].median * 1e3,
                        numpy_ms=timings["numpy"].median * 1e3,
                        torch_ms=timings["torch"].median * 1e3 if "torch" in timings else None,
                        limit_gbs=limit.gbs(timings["limit"].median),
                    )
                )
                bar.step(step, advance=1)
        return Result(
            tables=[_table(rows)],
            legend=[
                "# one thread; medians of 7 interleaved repetitions. Bytes: what a step must read and write per "
                "element.",
                "# memory limit: in-place a += b, fp32, one thread, between the same repetitions. torch: fused, one "
                "thread.",
            ],
            figures={"rows": [row.as_json() for row in rows]},
            failed=False,
        )


def _table(rows: list[OptimizerRow]) -> Table:
    table = new_table(f"{rows[0].numel:,} parameters")
    table.add_column("step", no_wrap=True)
    heads = ("bytes per\nelement", "ours\nms", "\nGelem/s", "\nGB/s", "memory\nlimit GB/s", "of the\nlimit")
    for head in (*heads, "NumPy\nms", "NumPy /\nours", "torch\nms", "torch /\nours"):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        table.add_row(
            row.step,
            str(row.nbytes_per_element),
            f"{row.native_ms:.2f}",
            f"{row.numel / row.native_ms / 1e6:.2f}",
            f"{row.gbs:.1f}",
            f"{row.limit_gbs:.1f}",
            f"{row.fraction:.0%}",
            f"{row.numpy_ms:.2f}",
            f"{row.numpy_ms / row.native_ms:.2f}",
            "n/a" if row.torch_ms is None else f"{row.torch_ms:.2f}",
            "n/a" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return table
