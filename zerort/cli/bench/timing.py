"""Time several things in one run, repetition by repetition in turn, so that the machine's noise hits all of them.

    repetition 1:  a a a a   b b   c        each: everybody is here, enough iterations, the slowest rank's time
    repetition 2:  b b   c   a a a a        the order rotates: nobody always follows the one that empties the caches
    …              the median of the repetitions counts

Imports the standard library only.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["REPETITIONS", "Timing", "rotated", "time_interleaved"]

REPETITIONS = 7
"""How often each figure is taken."""

_MOST = 20_000
"""Iterations of one repetition, at most."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one iteration took."""

    seconds: tuple[float, ...]
    """Of one iteration, by repetition; each the mean over ``iterations``, on the slowest rank."""
    iterations: int
    """In each repetition."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def time_interleaved(
    works: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    repetitions: int = REPETITIONS,
    once: Sequence[str] = (),
    meet: Callable[[], object] = lambda: None,
    maxima: Callable[[Sequence[float]], list[float]] = list,
) -> dict[str, Timing]:
    """Time every work and return its timing by name. In a job, every rank calls this with the same works.

    Args:
        works: What to run, by name.
        seconds: About how long each work runs in all, warming up not counted.
        repetitions: How often each is timed.
        once: Names of works that run once per repetition however short they are.
        meet: Waits until every rank is here.
        maxima: Returns the largest of each value over the ranks.
    """
    iterations = {
        name: 1 if name in once else _enough(work, seconds / repetitions, meet, maxima) for name, work in works.items()
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    collecting = gc.isenabled()
    gc.disable()  # a collection of garbage costs more than a small collective
    try:
        for repetition in range(repetitions):
            for name in rotated(names, repetition):
                found[name].append(_time(works[name], iterations[name], meet))
    finally:
        if collecting:
            gc.enable()
    flat = maxima([one for name in names for one in found[name]])
    return {
        name: Timing(tuple(flat[at * repetitions : (at + 1) * repetitions]), iterations[name])
        for at, name in enumerate(names)
    }


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of round ``number``: each round begins with the next one.

    >>> rotated(("a", "b", "c"), 4)
    ['b', 'c', 'a']
    """
    first = number % len(names) if names else 0
    return [*names[first:], *names[:first]]


def _enough(
    work: Callable[[], object],
    seconds: float,
    meet: Callable[[], object],
    maxima: Callable[[Sequence[float]], list[float]],
) -> int:
    """Warm up, and return how many iterations take about ``seconds``."""
    work()
    iterations = 1
    while True:
        [one] = maxima([_time(work, iterations, meet)])
        # A short look may have met a hiccup: only one that took a fair part of the time is believed.
        if one * iterations >= seconds / 4 or iterations >= _MOST:
            return max(1, min(_MOST, round(seconds / one)))
        iterations *= 4


def _time(work: Callable[[], object], iterations: int, meet: Callable[[], object]) -> float:
    meet()
    began = time.perf_counter()
    for _ in range(iterations):
        work()
    return (time.perf_counter() - began) / iterations
