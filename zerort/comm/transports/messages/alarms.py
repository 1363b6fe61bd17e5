"""`Alarms`: how ranks learn that others give up, fail or leave: each tells a few, who pass it on.

Rank r talks to the ranks r ± 1, 2, 4, … (modulo their number): 2 log2(n) of them, over whom any two ranks are at most
log2(n) / 2 messages apart, and still connected when many ranks are silent. A message carries all that its sender has
learned since the last one, alike words once with the ranks that said them.

    gave up, failed, died   passed on at once, later news after a pause that doubles: O(log n) messages per rank
    left                    passed on with the next other news: ranks that close in order send one round of messages

[Note: one verdict]
Ranks that give up together must name the same missing ranks, although not all could hear the same. The lowest rank that
gave up says who was not heard of, and its verdict travels like an alarm; of two verdicts the lowest rank's counts.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zerort import trace

__all__ = ["Alarm", "Alarms", "partners_of"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.25
"""Seconds between two messages to the same rank: twice as long each time."""

_VERDICT = "verdict"


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rank said when it gave up or left."""

    rank: int
    sequence: int
    """The first call in which the rank takes no part."""
    reason: str
    """``"gave up"``, ``"left"``, ``"failed"`` or, sounded for it by a rank of its host, ``"died"``."""
    last: str
    """What it was doing; of one that left, the words of its `Standing`."""

    @property
    def is_gone(self) -> bool:
        """Whether the rank takes part no longer and has nothing to complain of."""
        return self.reason in ("left", "died")


def partners_of(rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks that ``rank`` tells, in order.

    >>> partners_of(0, 9)
    (1, 2, 4, 5, 7, 8)
    """
    steps = [1 << k for k in range((size - 1).bit_length())]
    return tuple(sorted({(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}))


class Alarms:
    """One rank's ear and voice. Not thread-safe.

    Args:
        rank: This rank.
        size: Ranks that may sound alarms.
        send: Sends bytes to a rank, without waiting.
        receive: Returns bytes that have come; None if there are none.
        clock: Seconds.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        send: Callable[[int, bytes], None],
        receive: Callable[[], bytes | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partners = partners_of(rank, size)
        self.known: dict[int, Alarm] = {}
        """The first word of each other rank of which there is one: why comes before that it left."""
        self.verdict: tuple[int, frozenset[int]] | None = None
        """Who judged, and which ranks are missing."""
        self._rank = rank
        self._send, self._receive, self._clock = send, receive, clock
        self._news: dict[int, Alarm] = {}  # not passed on yet
        self._due = self._verdict_is_news = self._has_spoken = False
        self._next, self._pause = 0.0, _FIRST_PAUSE

    def sound(self, alarm: Alarm) -> None:
        """Note an alarm of this rank, or of one that it speaks for; `exchange` sends the first of each."""
        if alarm.rank == self._rank:
            if self._has_spoken:  # why it failed comes before that it left
                return
            self._has_spoken = True
            self._news[self._rank] = alarm
        else:
            self._note(alarm)
        self._due = True

    def judge(self, missing: Iterable[int]) -> None:
        """Say which ranks are missing; `exchange` sends it."""
        self._take_verdict(self._rank, frozenset(missing))

    def exchange(self, *, last: bool = False) -> None:
        """Hear what has come, and pass on what is news; at once if this is the ``last`` time."""
        self.hear()
        now = self._clock()
        if self._due and (last or now >= self._next):
            self._tell()
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LONGEST_PAUSE)

    def hear(self) -> None:
        """Hear what has come, and say nothing."""
        while (raw := self._receive()) is not None:
            for reason, number, last, ranges in json.loads(raw):
                ranks = [rank for first, end in ranges for rank in range(first, end)]
                if reason == _VERDICT:
                    self._take_verdict(number, frozenset(ranks))
                    continue
                for rank in ranks:
                    self._due |= self._note(Alarm(rank, number, reason, last)) and reason != "left"

    def _note(self, alarm: Alarm) -> bool:
        if alarm.rank in self.known or alarm.rank == self._rank:
            return False
        self.known[alarm.rank] = self._news[alarm.rank] = alarm
        return True

    def _take_verdict(self, judge: int, missing: frozenset[int]) -> None:
        if self.verdict is None or judge < self.verdict[0]:
            self.verdict, self._verdict_is_news, self._due = (judge, missing), True, True

    def _tell(self) -> None:
        alike: dict[tuple[str, int, str], list[int]] = {}
        for alarm in self._news.values():
            alike.setdefault((alarm.reason, alarm.sequence, alarm.last), []).append(alarm.rank)
        rows: list[Any] = [[*words, _ranges(ranks)] for words, ranks in alike.items()]
        if self._verdict_is_news and self.verdict is not None:
            rows.append([_VERDICT, self.verdict[0], "", _ranges(self.verdict[1])])
        raw = json.dumps(rows).encode()
        for partner in self.partners:
            self._send(partner, raw)
        trace.count("alarm messages", len(self.partners))
        self._news.clear()
        self._due = self._verdict_is_news = False


def _ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges (first, end).

    >>> _ranges([4, 0, 1, 2])
    [(0, 3), (4, 5)]
    """
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    found = []
    for _, run in runs:
        numbers = [rank for _, rank in run]
        found.append((numbers[0], numbers[-1] + 1))
    return found
