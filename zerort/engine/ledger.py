"""`Ledger`: what a runtime counts between two steps, bytes by collective and waits by stream. May import: trace."""

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

    def turn(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return (bytes by collective, seconds by stream) and start anew."""
        moved = dict(self.moved)
        stalled = {stream: waited / 1e9 for stream, waited in self.stalled.items()}
        self.moved.clear()
        self.stalled.clear()
        return moved, stalled
