"""Who is slow: each rank's own time between two agreements, the slowest of them, and a rank that stays slow.

    own time = time since the last agreement − time in which this rank may have waited for others

The agreement carries two numbers more: the slowest rank with its time, packed so that "max" finds both, and the sum of
all times. From these every rank judges alike, and without a message, whether a rank stays slower than the others:

    lead       log(slowest time / mean time of the others), in every step
    named      the same rank led by a third in 11 of 15 steps, and the median lead is more than their changes

A single spike is one step of fifteen, and does not count (decision 0120). What this rank took for each of its last
steps, `Pace.times`, is for `Runtime.rebalance("auto")`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerort.engine.report import Slowest
from zerort.engine.step.facts.record import Record
from zerort.trace.ledger import Ledger

__all__ = ["HISTORY", "WINDOW", "OwnTime", "Pace", "judge", "may_be_slow"]

WINDOW: Final = 15
"""Steps that are looked at."""
HISTORY: Final = 64
"""Steps that say how much leads change from one to the next."""
_ENOUGH: Final = 11
_LEAD: Final = math.log(4 / 3)
_CHANGES: Final = 1.5
_WORTH_SECONDS: Final = 0.01
"""What a rank has to be slower by, in a step, to count: less is lost in the noise of an operating system."""
_RANK_BITS: Final = 20


def may_be_slow(who: NDArray[np.int64], lead: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Say of windows, (…, WINDOW), whether the last step's slowest rank led by a third in most steps of its window."""
    found: NDArray[np.bool_] = ((who == who[..., -1:]) & (lead >= _LEAD)).sum(-1) >= _ENOUGH
    return found


def judge(who: NDArray[np.int64], lead: NDArray[np.float64]) -> bool:
    """Say whether the last step's slowest rank stays slow, more than leads change by themselves.

    Args:
        who: The slowest rank of each of the last steps; at least `WINDOW`.
        lead: Its lead over the mean of the others.
    """
    signed = np.where(who == who[-1], lead, -lead)
    usual = np.median(np.abs(np.diff(signed)))
    return bool(may_be_slow(who[-WINDOW:], lead[-WINDOW:]) and np.median(signed[-WINDOW:]) >= _CHANGES * usual)


class OwnTime(NamedTuple):
    """What a rank did by itself between two agreements."""

    compute: float
    """Seconds, without the update."""
    update: float
    """Seconds of the update in between."""
    samples: int
    """Samples of orders that it took meanwhile."""


class Pace:
    """How fast this rank is, and which rank is slow. The same verdicts on every rank.

    Args:
        ledger: Counts this rank's waits.
        rank: This rank.
        size: How many there are.
    """

    def __init__(self, ledger: Ledger, *, rank: int, size: int) -> None:
        self._ledger, self._rank, self._size = ledger, rank, size
        self._began: tuple[int, int] | None = None  # when the last agreement ended, and what was waited until then
        self._who: deque[int] = deque(maxlen=HISTORY)
        self._lead: deque[float] = deque(maxlen=HISTORY)
        self._updating_ns = 0  # in the update since the last agreement
        self._last_update_ns = 0  # in the one before
        self.own_seconds = 0.0
        """This rank's own time before the last agreement."""
        self.times: deque[OwnTime] = deque(maxlen=HISTORY)
        """The same of the last steps, in parts, since `restart`, or since a rank became slow."""
        self.named: int | None = None
        """The rank that stays slow."""

    def add_time(self, record: Record) -> None:
        """Add this rank's own time since the last agreement to what all ranks exchange."""
        own = 0
        if self._began is not None:
            began, waited = self._began
            own = max(time.perf_counter_ns() - began - (self._ledger.waited_ns - waited), 1000)
        self.own_seconds = own / 1e9
        self._last_update_ns, self._updating_ns = self._updating_ns, 0
        record.add("slowest", own // 1000 << _RANK_BITS | self._rank, "max")
        record.add("own time", self.own_seconds, "sum")

    def begin(self) -> None:
        """Start the clock: an agreement has just ended."""
        self._began = time.perf_counter_ns(), self._ledger.waited_ns

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Count the time inside as this rank's update, less waits for other ranks."""
        began, waited = time.perf_counter_ns(), self._ledger.waited_ns
        try:
            yield
        finally:
            self._updating_ns += time.perf_counter_ns() - began - (self._ledger.waited_ns - waited)

    def end_step(self, samples: int) -> None:
        """Keep this rank's own time of a step, which ``samples`` of orders were taken for."""
        if self.own_seconds:
            update = max(self._last_update_ns, 0) / 1e9
            self.times.append(OwnTime(max(self.own_seconds - update, 0.0), update, samples))

    def restart(self) -> None:
        """Forget the times of past steps: what ranks have to do has changed."""
        self.times.clear()
        self._updating_ns = 0
        if self._began is not None:
            self.begin()

    def hear(self, heard: dict[str, Any]) -> Slowest | None:
        """Return the slowest rank of a step, and name one that stays slow; None before the second step."""
        packed, total = int(heard["slowest"][0]), float(heard["own time"][0])
        seconds, rank = (packed >> _RANK_BITS) / 1e6, packed & (1 << _RANK_BITS) - 1
        if not seconds:
            return None
        others = max(total - seconds, 1e-9) / (self._size - 1) if self._size > 1 else seconds
        self._take(rank, math.log(seconds / others) if seconds - others > _WORTH_SECONDS else 0.0)
        return Slowest(rank=rank, seconds=seconds, others_seconds=others)

    def _take(self, rank: int, lead: float) -> None:
        self._who.append(rank)
        self._lead.append(lead)
        if len(self._who) < WINDOW:
            return
        latest = list(zip(self._who, self._lead, strict=True))[-WINDOW:]
        led = Counter(who for who, lead in latest if lead >= _LEAD)
        if led[rank] >= _ENOUGH:
            if rank != self.named and judge(np.array(self._who), np.array(self._lead)):
                self._name(rank)
        elif self.named is not None and led[self.named] < WINDOW - _ENOUGH:  # it has recovered
            self._name(None)

    def _name(self, rank: int | None) -> None:
        """Name a rank, and keep the times of the window alone: speeds have changed since those before."""
        self.named = rank
        while len(self.times) > WINDOW:
            self.times.popleft()
