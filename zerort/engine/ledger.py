"""`Ledger`: what a runtime counts between two steps, bytes by collective and tier, waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from zerort import trace

__all__ = ["Ledger"]


class Ledger:
    """Counts since the last `turn`."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        """Bytes by collective."""
        self.tiered: Counter[str] = Counter()
        """Bytes by tier and direction, as ``"nvme read"``."""
        self.stalled: Counter[str] = Counter()
        """Nanoseconds by stream."""

    @contextmanager
    def stall(self, stream: str) -> Iterator[None]:
        """Count the time spent inside as waiting for ``stream``."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            waited = time.perf_counter_ns() - began
            self.stalled[stream] += waited
            trace.add_span(f"wait for {stream}", track="main", begin_ns=began, end_ns=began + waited)

    def turn(self) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
        """Return (bytes by collective, bytes by tier, seconds by stream) and start anew."""
        moved, tiered = dict(self.moved), dict(self.tiered)
        stalled = {stream: waited / 1e9 for stream, waited in self.stalled.items()}
        for counter in (self.moved, self.tiered, self.stalled):
            counter.clear()
        return moved, tiered, stalled
