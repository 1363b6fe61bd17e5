"""`Prefetcher`: gathers the units that come next; `GatherOrder` remembers in which order they came in the last step.

The first step is watched; from the second on, the order of the step before is the forecast. A gather that was not
predicted is looked for further on, so that a branch that was not taken costs one late gather, not the whole step's. It
depends on nothing but the program's own order, so all ranks prefetch the same.

    order of a step           a  b  c  c  b  a         `ahead` 1: two units are here at once
    gathered while in use     b  c  .  .  a  .         what comes next and is not here yet
    stay when released        .  b  c  .  .  .         among the two that come next: not gathered again

So around the turn from forward to backward, where there is little to hide a gather behind, nothing is gathered. Where
units take room for those that they are tied to, what is needed last is dropped for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from zerort.comm.guard.differing import RanksDiffer
from zerort.errors import ZerortError

__all__ = ["GatherOrder", "Prefetcher", "count_gathers"]


class GatherOrder:
    """The order of gathers in the last step, and where this step stands in it.

    >>> order = GatherOrder()
    >>> [order.note(name, count=2) for name in ("a", "b", "b", "a")]
    [[], [], [], []]
    >>> order.end_step()
    >>> [order.note(name, count=2) for name in ("a", "b", "b", "a")]
    [['b', 'a'], ['b', 'a'], ['a'], []]
    >>> order.end_step()
    >>> order.note("b", count=1), order.detour
    (['b'], ' at 0')
    """

    def __init__(self) -> None:
        self._before: list[str] = []
        self._now: list[str] = []
        self._at = 0  # where in _before the next gather is expected
        self.detour = ""
        """Where in the last step's order the gather that was noted last was not expected; empty: it was."""

    def note(self, name: str, *, count: int) -> list[str]:
        """Note that ``name`` is gathered now and return the next ``count`` that are expected, each once."""
        self._now.append(name)
        expected = not self._before or self._before[self._at : self._at + 1] == [name]
        self.detour = "" if expected else f" at {self._at}"
        try:
            self._at = self._before.index(name, self._at) + 1
        except ValueError:
            return []  # not predicted: stay where we were
        coming: list[str] = []
        for at in range(self._at, len(self._before)):
            if len(coming) == count:
                break
            if self._before[at] not in coming:
                coming.append(self._before[at])
        return coming

    def forget(self) -> None:
        """Start anew: ranks have not all gathered the same."""
        self._before, self._now, self._at, self.detour = [], [], 0, ""

    def restart(self) -> None:
        """Begin the step again: it was given up."""
        self._now, self._at, self.detour = [], 0, ""

    def end_step(self) -> None:
        """Make this step's order the forecast for the next."""
        if self._now:
            self._before, self._now = self._now, []
        self._at = 0


class Form(Protocol):
    """The gathered form of a unit, as far as it is gathered ahead."""

    @property
    def is_held(self) -> bool:
        """Whether somebody uses it."""

    def fetch(self) -> bool:
        """Start to gather it if there is room; say whether it is, or will be, here."""

    def drop(self) -> None:
        """Let it go when nobody uses it."""


class Gatherer(Protocol):
    """What has a gathered form: a unit."""

    @property
    def form(self) -> Form:
        """Its gathered form."""


class Prefetcher:
    """Gathers units ahead, as far as there is room, and lets go of those that nobody came for.

    Args:
        units: All units by name; more may come.
        ahead: How many to gather ahead.
        tells_order: Whether ranks tell each other where they leave the last step's order. For ranks of which only some
            share slots: one that came for what was gathered ahead has released its slot, another one has not.
    """

    def __init__(self, units: Mapping[str, Gatherer], *, ahead: int, tells_order: bool = False) -> None:
        self._units = units
        self._tells_order = tells_order
        self._order = GatherOrder()
        self._ahead = ahead
        self._current = ""
        self._coming: list[str] = []

    @property
    def detour(self) -> str:
        """What is added to the names of a gather's calls where it leaves the last step's order, if ranks compare it."""
        return self._order.detour if self._tells_order else ""

    def note(self, name: str) -> None:
        """Note that a unit is about to be gathered."""
        self._current = name
        self._coming = self._order.note(name, count=self._ahead + 1)

    def expects(self, name: str) -> bool:
        """Say whether a unit that is released is among those that come next, as many as there is room for."""
        return name in self._coming

    def fetch(self) -> None:
        """Start to gather the units that are expected next, as far as there is room."""
        others = [name for name in self._coming if name != self._current]
        with contextlib.suppress(RanksDiffer):  # who needs them gathers them again
            for name in others[: self._ahead]:
                if not self._units[name].form.fetch():
                    break

    def unheld(self) -> Iterator[Form]:
        """Yield the forms that nobody holds, those that are needed last first: what to drop for want of room."""
        needed = [self._current, *self._coming]
        names = sorted(self._units, key=lambda name: needed.index(name) if name in needed else len(needed))
        return (form for name in reversed(names) if not (form := self._units[name].form).is_held)

    def drop_unused(self) -> None:
        """Let go of units that were gathered ahead and that nobody holds; of held ones, when they are released."""
        with contextlib.ExitStack() as rest:  # all of them, whatever comes of one
            for unit in reversed(list(self._units.values())):
                rest.callback(unit.form.drop)

    def end_step(self) -> None:
        """Start a new step's order of gathers; what was gathered ahead is out of date."""
        self._coming = []
        self._order.end_step()
        self.drop_unused()

    def restart(self) -> None:
        """Begin a step that was given up again: ranks may have come to different places in it."""
        self._coming = []
        self._order.restart()
        with contextlib.suppress(ZerortError):  # who made the call has been told
            self.drop_unused()

    def forget(self) -> None:
        """Let go of what was gathered ahead, and watch the next step anew: ranks have gathered different units."""
        self._coming = []
        self._order.forget()
        self.drop_unused()


def count_gathers(units: int, *, passes: int, ahead: int) -> list[int]:
    """Return how often each unit is gathered in a step that goes through all of them, back and forth.

    Args:
        units: How many.
        passes: Forward, backward, and so on.
        ahead: How many are gathered ahead: as many and one stay where the walk turns.

    >>> count_gathers(4, passes=2, ahead=1), count_gathers(4, passes=4, ahead=0)
    ([2, 2, 1, 1], [3, 4, 4, 2])
    """
    at_end, at_start = passes // 2, (passes - 1) // 2  # turns
    return [passes - (at >= units - ahead - 1) * at_end - (at <= ahead) * at_start for at in range(units)]
