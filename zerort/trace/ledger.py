"""`Ledger`: what a runtime counts between two steps, bytes by collective and tier, waits; `HeldBytes`: a peak.

All is counted on the thread that steps, but for what `HeldBytes` and `Ledger.joined` say.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from zerort.trace.tracer import add_span

__all__ = ["HeldBytes", "Ledger"]


class HeldBytes:
    """The most bytes that were held at once, by any threads.

    >>> memory = HeldBytes()
    >>> with memory.held(100), memory.held(20):
    ...     pass
    >>> with memory.held(90):
    ...     memory.peak
    120
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.peak = 0

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Count bytes as held while inside."""
        with self._lock:
            self._now += nbytes
            self.peak = max(self.peak, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= nbytes


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
        self.joined = 0
        """Bytes of all_gathers that this rank made only for others; never started anew. Whichever thread makes the
        group's calls counts them, one at a time, and no other: sums of `moved` would get lost between two threads."""
        self.apart = HeldBytes()
        """Memory of units that are gathered without slots; never started anew."""
        self._joined_before = 0

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
        joined, before = self.joined, self._joined_before
        if joined > before:
            self.moved["all_gather"] += joined - before
            self._joined_before = joined
        moved, tiered = dict(self.moved), dict(self.tiered)
        stalled = {stream: waited / 1e9 for stream, waited in self.stalled.items()}
        for counter in (self.moved, self.uncoded, self.tiered, self.stalled):
            counter.clear()
        return moved, tiered, stalled
