"""Rounds of a call between hosts: what each of them sends and receives, several under way at a time.

    Rounds           begun and concluded one by one, by Python: a sum has something to do between them
    gather_rounds    those of a gather, which moves bytes and nothing else
    PlannedGather    the same as a plan that native code follows, for as long as the arrays lie where they lay

[Note: rounds] in shift.py says why there are several, and who sends what to whom.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from zerort.comm.geometry import Geometry
from zerort.comm.guard.call import Call
from zerort.comm.transports.messages.exchange import Messages, PlannedRounds
from zerort.comm.transports.shift import DEPTH, Round, Topology, Unit, plan_rounds
from zerort.typing import Array

__all__ = ["GatherRound", "HostSide", "Landed", "PlannedGather", "Rounds", "gather_rounds", "taken_back_if_left"]


class Landed(NamedTuple):
    """A piece of a gathered array that one rank of the host has."""

    carrier: int
    at: int
    """Where it begins in the round's slot of a landing; elements."""
    place: int
    """Where it begins in everyone's out; elements."""
    numel: int


class HostSide(Protocol):
    """What a host's ranks do among themselves before something leaves, and after something has come."""

    @property
    def together(self) -> int:
        """How many rounds `deliver` takes at a time: before it, all of these have to be there."""

    @property
    def memory(self) -> Sequence[Array]:
        """Where pieces land, besides the call's own arrays."""

    def partials(self, unit: Unit, table: Geometry, ranks: Iterable[int], take: Callable[[int], Array]) -> list[Array]:
        """Return the host's sums of a unit's piece for each of ``ranks``; in memory from ``take`` where it needs any.

        Every rank of the host calls this in the same order.
        """

    def spot(self, number: int, landed: Landed) -> Array:
        """Return where this rank puts a piece that comes in round ``number``."""

    def deliver(self, number: int, landed: list[Landed]) -> None:
        """Bring what has come in a round to this rank's out. Every rank of the host calls this in the same order."""

    def end(self) -> None:
        """Wait until the other ranks of the host need nothing of this rank's memory any more."""


class Rounds:
    """The rounds of one call that are under way: begun in order, and concluded in order when their messages are there.

    Args:
        finish: Waits for messages.
        call: The call.
    """

    def __init__(self, finish: Callable[[Messages, Call], None], call: Call) -> None:
        self.call = call
        self._finish = finish
        self._under_way: collections.deque[tuple[Messages | None, Callable[[], None]]] = collections.deque()

    def add(self, messages: Messages | None, conclude: Callable[[], None]) -> None:
        """Leave a round's messages, if it has any, on the wire; conclude the oldest round if there are many."""
        self._under_way.append((messages, conclude))
        if len(self._under_way) >= DEPTH:
            self.finish_first()

    def finish_first(self) -> None:
        """Wait for the oldest round, and conclude it."""
        messages, conclude = self._under_way.popleft()
        if messages is not None:
            self._finish(messages, self.call)
        conclude()

    def finish_all(self) -> None:
        """Wait for all rounds, and conclude them."""
        while self._under_way:
            self.finish_first()


class GatherRound(NamedTuple):
    """What one rank does in a round of a gather."""

    sends: list[tuple[int, Array]]
    receives: list[tuple[int, Array]]
    copies: list[tuple[Array, Array]]
    """(to, from): of its own array."""
    landed: list[Landed]
    """What its host has afterwards."""
    sources: list[int]
    """Where the pieces that it sends begin in its shard; elements."""


def gather_rounds(
    table: Geometry, source: Array, out: Array, side: HostSide, *, rank: int, topology: Topology, piece: int
) -> Iterator[GatherRound]:
    """Yield the rounds that bring every rank's ``source`` to its place in every rank's ``out``.

    Args:
        table: Where each rank's shard goes.
        source: This rank's.
        out: Where all of them go.
        side: What its host does with what comes.
        rank: This rank.
        topology: Who is where.
        piece: Elements of a message.
    """
    host, mine = topology.host_of[rank], table.takes[rank][1]

    def landed(round_: Round) -> Iterator[tuple[Unit, int, Landed]]:
        used = 0
        for unit in round_:
            for at, r in enumerate(topology.members[topology.behind(rank, unit.step)]):
                count = max(0, min(unit.numel, table.takes[r][1] - unit.done))
                place = table.places[r] + unit.done
                yield unit, r, Landed(topology.partner(host, r), used + at * unit.numel, place, count)
            used += topology.most * unit.numel

    for number, round_ in enumerate(plan_rounds(table.longest, steps=[*topology.abroad, 0], piece=piece)):
        found = GatherRound([], [], [], [], [unit.done for unit in round_])
        for unit in round_:
            if unit.step:
                part = source[unit.done :][: max(0, min(unit.numel, mine - unit.done))]
                found.sends.append((topology.partner(topology.ahead(rank, unit.step), rank), part))
        for unit, r, one in landed(round_):
            found.landed.append(one)
            if one.carrier != rank or not one.numel:
                continue
            spot = side.spot(number, one)
            if unit.step:
                found.receives.append((r, spot))
            elif spot.ctypes.data != source[unit.done :].ctypes.data:
                found.copies.append((spot, source[unit.done :][: one.numel]))
        yield found


class PlannedGather:
    """The rounds of a gather whose arrays lie where they lay when it was planned.

    Args:
        where: Addresses of its arrays, and how its host shares them: what the plan is for.
        rounds: Its messages, which native code sends and receives.
        landed: What its host has after each round.
        follow: Sends and receives until so many rounds are done.
    """

    def __init__(
        self,
        where: tuple[int, ...],
        rounds: PlannedRounds,
        landed: Sequence[list[Landed]],
        *,
        follow: Callable[[PlannedRounds, int, Call], None],
    ) -> None:
        self.where = where
        self._rounds, self._landed, self._follow = rounds, landed, follow

    def __len__(self) -> int:
        """Return how many rounds there are."""
        return len(self._landed)

    def run(self, call: Call, side: HostSide) -> None:
        """Gather once."""
        self._rounds.begin(call.sequence, call.source, call.out, side.memory)
        for first in range(0, len(self), side.together):
            until = min(first + side.together, len(self))
            self._follow(self._rounds, until, call)
            for number in range(first, until):
                side.deliver(number, self._landed[number])
        self._rounds.end()


@contextlib.contextmanager
def taken_back_if_left(call: Call) -> Iterator[None]:
    """Send no more of what leaves ahead of a call that is not made: nobody receives it, and its memory is the caller's.

    What the call's rounds have taken over is left alone: if they fail the group is broken, and moves nothing any more.
    """
    try:
        yield
    except BaseException:
        if call.ahead is not None:
            call.ahead.take_back()
        raise
