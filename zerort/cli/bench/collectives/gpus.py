"""``zerort bench collectives --device cuda``: the table of nccl-tests, of our collectives over arrays on GPUs.

The same operations, patterns and checks as on the host. A time is what a caller sees: the ranks' agreement, NCCL, and
the wait for the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from zerort.cli.arguments import UsageError
from zerort.cli.bench.collectives.operations import Expected, Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.sweep import Sweep
from zerort.cli.bench.collectives.trials import Pattern, our_trials
from zerort.cli.bench.harness import wrong_line
from zerort.errors import DeviceMemoryError
from zerort.native.dtypes import numpy_dtype

__all__ = ["GpuCollectives", "check_gpu_options"]


def check_gpu_options(options: argparse.Namespace) -> None:
    """Refuse what only hosts can do."""
    if options.kind not in (None, "nccl"):
        raise UsageError(f"--kind {options.kind}: Expected nccl with --device cuda, or none. Leave it out.")
    for name, given in (
        ("--compare", options.compare),
        ("--plot", options.plot),
        ("--arrays", options.arrays != "window"),
    ):
        if given:
            raise UsageError(f"{name}: Expected it with --device host, got --device cuda. Leave it out.")


class _GpuPattern(Pattern):
    """The pattern, for arrays that the host cannot touch: filled and compared by copies."""

    def fill(self, array: Any, rank: int) -> None:
        host = np.empty(array.size, array.dtype)
        super().fill(host, rank)
        array.set(host)

    def wrong(self, array: Any, expected: list[Expected]) -> int:
        return super().wrong(array.get(), expected)


class GpuCollectives(Sweep):
    """Collectives over arrays on GPUs. How many bytes must move depends on how these are connected: rows do not say."""

    no_room = DeviceMemoryError

    def describe(self) -> dict[str, Any]:
        """Return what the group is."""
        return {"ranks": self._group.size, "group": repr(self._group), "kind": self._group.kind}

    def head(self, machine: dict[str, Any]) -> list[str]:
        """Return the lines above the tables."""
        return [f"# {self._group!r}", f"# {self._group.size} ranks, a GPU each; arrays from group.zeros"]

    def conclude(self) -> tuple[list[str], dict[str, Any]]:
        """Return the legend, and that this was measured on GPUs."""
        return [
            "# time: median of 7 repetitions on the slowest rank, from the call to the end of its wait.",
            "# algbw = size / time; busbw = algbw times what makes a ring's busbw its wire speed (nccl-tests).",
            wrong_line("elements", sum(row.wrong for row in self.rows)),
        ], {"device": "cuda"}

    def point(self, operation: Operation, dtype: str, size: int) -> Iterator[Row]:
        """Check and time one operation at one size."""
        group, n, kind = self._group, self._group.size, numpy_dtype(dtype)
        share = max(1, size // (n * kind.itemsize))
        nbytes = share * n * kind.itemsize
        full, other = group.zeros(share * n, dtype), group.zeros(share * n, dtype)
        trials = our_trials(group, operation, full, other, _GpuPattern(dtype, n))
        timings, wrong = self.check_and_time(trials)
        sides = {name: make_side(name, timings, wrong, nbytes=nbytes, bus=operation.bus(n)) for name in trials}
        count = share if operation.splits else share * n
        redop = "sum" if operation.reduces else "none"
        yield Row(operation.name, dtype, redop, nbytes, count, sides["out"], sides.get("in"))
