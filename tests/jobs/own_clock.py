"""Run an example on a clock of its own, which sleeping alone moves: what it says about speed depends on no machine.

    mpirun -n 3 python tests/jobs/own_clock.py examples/train_uneven.py --epochs 4

Sleeping takes no time then, and neither does waiting for other ranks: what ranks measure of each other is exactly what
they have slept. In the end rank 0 prints what each step has taken: the longest of all ranks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace

from mpi4py import MPI

from zerort.engine.step.facts.pace import Pace
from zerort.trace.ledger import Ledger


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0
        self.asked: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += round(1e9 * seconds)

    def perf_counter_ns(self) -> int:
        """Return the time."""
        return self.now

    def perf_counter(self) -> float:
        """Return the time, and keep it."""
        self.asked.append(self.now / 1e9)
        return self.asked[-1]


def main() -> None:
    """Run the example that the first word names, with the other words."""
    path, clock = sys.argv[1], Clock()
    sys.argv[:] = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    fake = SimpleNamespace(sleep=clock.sleep, perf_counter=clock.perf_counter, perf_counter_ns=clock.perf_counter_ns)
    example.time = fake
    for user in (Pace, Ledger):
        sys.modules[user.__module__].time = fake
    example.main()
    took = [end - begin for begin, end in zip(clock.asked[::2], clock.asked[1::2], strict=True)]
    told = MPI.COMM_WORLD.gather(took)
    if told is not None:
        print("steps:", *(f"{max(every):.4f}" for every in zip(*told, strict=True)))


if __name__ == "__main__":
    main()
