"""`Ledger`: what a runtime counts between two steps, bytes by collective and tier, waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from zerort.trace.tracer import add_span

__all__ = ["Ledger"]


class Ledger:
    """Counts since the last `turn`."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        """Bytes by collective."""
        self.uncoded: Counter[str] = Counter()
        """Bytes by collective, of what is coded: before it was."""
        self.tiered: Counter[str] = Counter()
        """Bytes by tier and direction, as ``"nvme read"``."""
        self.stalled: Counter[str] = Counter()
        """Nanoseconds by stream."""
        self.waited_ns = 0
        """Nanoseconds in which other ranks may have been waited for; never started anew."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as time in which other ranks may be waited for, without naming a stream."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self.waited_ns += time.perf_counter_ns() - began

    @contextmanager
    def stall(self, stream: str) -> Iterator[None]:
        """Count the time spent inside as waiting for ``stream``."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            waited = time.perf_counter_ns() - began
            self.stalled[stream] += waited
            self.waited_ns += waited * (stream != "nvme")
            add_span(f"wait for {stream}", track="main", begin_ns=began, end_ns=began + waited)

    def turn(self) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
        """Return (bytes by collective, bytes by tier, seconds by stream) and start anew. `uncoded` starts anew, too."""
        moved, tiered = dict(self.moved), dict(self.tiered)
        stalled = {stream: waited / 1e9 for stream, waited in self.stalled.items()}
        for counter in (self.moved, self.uncoded, self.tiered, self.stalled):
            counter.clear()
        return moved, tiered, stalled
