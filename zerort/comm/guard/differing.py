"""`Differences`: what becomes of calls that differ between ranks, where their callers have said that they may.

    gives way     a call that its caller makes again in another way: it is given up, with `RanksDiffer`
    has a turn    an all_gather that every rank can take part in at any time, by its name: all do, the first turn first
    any other     waits: its rank takes part in the others' turns until all ranks have come to the same call

Where no rank's call has such a stance, ranks that differ are told of a mismatch, as ever. Nothing of this costs
anything while calls are the same (decision 0165).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from zerort.comm.guard.call import Call
from zerort.comm.guard.stance import Stance
from zerort.errors import CollectiveMismatchError
from zerort.typing import Array

__all__ = ["Differences", "Join", "RanksDiffer", "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank has told of its call, as far as others can take part in it."""

    name: str
    stance: Stance | None


class RanksDiffer(CollectiveMismatchError):
    """Ranks came with different calls, and a call of this rank's, or of another's, has a stance."""

    told: Sequence[Told] = ()
    """What each rank came with."""


class Join(NamedTuple):
    """This rank's part in an all_gather that others need."""

    source: Array
    out: Array
    counts: Sequence[int]


class Differences:
    """Whether ranks of one group differ, and how this rank takes part in what the others call for."""

    def __init__(self) -> None:
        self.stance: Stance | None = None
        """What the calls that are made now have."""
        self.suffix = ""
        """What is added to the names of these calls: ranks that have come another way are told of a mismatch."""
        self.joins: dict[str, Callable[[], AbstractContextManager[Join]]] = {}
        """How this rank takes part in gathers, by name, the same names on every rank; each ends when its call has."""
        self.is_known = False
        """Whether ranks have differed since `forget`: calls that give way do so at once. On all ranks alike."""
        self.surplus = 0
        """Meetings of the ranks besides those that this rank's calls were made for."""

    @contextlib.contextmanager
    def having(self, stance: Stance | None) -> Iterator[None]:
        """Give the calls that are made inside a stance."""
        before, self.stance = self.stance, stance
        try:
            yield
        finally:
            self.stance = before

    @contextlib.contextmanager
    def with_suffix(self, suffix: str) -> Iterator[None]:
        """Add ``suffix`` to the names of the calls that are made inside."""
        before, self.suffix = self.suffix, suffix
        try:
            yield
        finally:
            self.suffix = before

    def check(self, call: Call) -> None:
        """Give a call up before it meets anybody, if ranks are known to differ."""
        if self.is_known and call.stance is not None and call.stance.gives_way:
            self.surplus -= 1
            raise RanksDiffer(f"Expected {call.describe()} on every rank, got ranks that differ since the last step.")

    def settle(self, call: Call, difference: RanksDiffer) -> str | None:
        """Return the name of the gather that this rank takes part in next; None: it makes its call again.

        Raises:
            RanksDiffer: The call gives way.
        """
        self.is_known = True
        told = difference.told
        if call.stance is not None and call.stance.gives_way:
            raise difference
        if any(one.stance is not None and one.stance.gives_way for one in told):
            return None  # those ranks come again
        turns = [(one.stance.turn, one.name) for one in told if one.stance is not None and one.stance.turn is not None]
        name = min(turns)[1]
        return None if call.stance is not None and call.name == name else name

    def forget(self) -> None:
        """Have ranks make their calls as if they had never differed. All ranks do, where they are known to agree."""
        self.is_known = False
