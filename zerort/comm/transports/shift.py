"""Who sends what to whom between hosts, and when: everyone to the next host, then to the one after it, and so on.

    step 1:   0 → 1   1 → 2   2 → 3   3 → 0      in each, every link carries one stream each way
    step 2:   0 → 2   1 → 3   2 → 0   3 → 1
    step 3:   0 → 3   1 → 0   2 → 1   3 → 2
    step 0:   what a host has for itself         of copies, last: the wire is busy meanwhile; sums need no round for it

[Note: partners]
Every rank sends its own shard and receives its own sums; at the other end stands its *partner* there: the rank with
the same number on its host, modulo that host's ranks. So each byte crosses the wire once for each pair of hosts, all
ranks of a host share the work, and a host of few ranks holds up no others.

[Note: rounds]
Long shards go in pieces of one size for all ranks of a group: all steps of a piece, then those of the next; short
pieces of several steps share a round. Several rounds are under way at a time, to different hosts, so that the wire is
busy while a rank sums and copies, and while one host is slow to take what is for it (decisions 0113, 0200). Only
integers live here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["DEPTH", "LANDING_SLOTS", "Round", "Topology", "Unit", "plan_rounds"]

DEPTH = 4
"""Rounds under way at a time."""

LANDING_SLOTS = DEPTH + 1
"""Of a landing, which take turns: when one comes round again, all ranks of the host have met since they copied from it.

Who sends a piece on out of a slot is who fills it next: nobody else knows when it has left."""


class Unit(NamedTuple):
    """What all hosts do at once: send a piece of their ranks' shards ``step`` hosts further."""

    step: int
    """0 is what a host has for itself."""
    done: int
    """Where the pieces begin in their shards; elements."""
    numel: int
    """Of the longest piece; elements."""


Round = list[Unit]


class Topology:
    """Which ranks are on which host.

    Args:
        hosts: For each rank, a number that tells its host.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        found: dict[int, list[int]] = {}
        self._local = []
        for rank, host in enumerate(hosts):
            members = found.setdefault(host, [])
            self._local.append(len(members))
            members.append(rank)
        self.members = tuple(tuple(ranks) for ranks in found.values())
        """The ranks of each host, in rank order; hosts in the order of their first ranks."""
        numbers = {host: number for number, host in enumerate(found)}
        self.host_of = tuple(numbers[host] for host in hosts)

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.members)

    @property
    def most(self) -> int:
        """How many ranks the largest host has."""
        return max(map(len, self.members))

    @property
    def abroad(self) -> range:
        """The steps to other hosts."""
        return range(1, self.count)

    def partner(self, host: int, rank: int) -> int:
        """Return who stands for ``rank`` on a host ([Note: partners])."""
        ranks = self.members[host]
        return ranks[self._local[rank] % len(ranks)]

    def served(self, rank: int, host: int) -> list[int]:
        """Return the ranks of another host for whom ``rank`` stands on its own."""
        own = self.host_of[rank]
        return [other for other in self.members[host] if self.partner(own, other) == rank]

    def ahead(self, rank: int, step: int) -> int:
        """Return the host that the host of ``rank`` sends to in a step."""
        return (self.host_of[rank] + step) % self.count

    def behind(self, rank: int, step: int) -> int:
        """Return the host that the host of ``rank`` receives from in a step."""
        return (self.host_of[rank] - step) % self.count


def plan_rounds(longest: int, *, steps: Sequence[int], piece: int) -> Iterator[Round]:
    """Yield the rounds that carry shards of up to ``longest`` elements; the same on all ranks.

    Args:
        longest: Elements of the longest shard.
        steps: Of each piece, in this order.
        piece: Elements of a message, and of the units that share a round.

    >>> [[tuple(unit) for unit in one] for one in plan_rounds(10, steps=[1, 2, 0], piece=8)]
    [[(1, 0, 8)], [(2, 0, 8)], [(0, 0, 8)], [(1, 8, 2), (2, 8, 2), (0, 8, 2)]]
    """
    found: Round = []
    filled = 0
    for done in range(0, longest, piece):
        numel = min(piece, longest - done)
        for step in steps:
            if found and filled + numel > piece:
                yield found
                found, filled = [], 0
            found.append(Unit(step, done, numel))
            filled += numel
    if found:
        yield found
