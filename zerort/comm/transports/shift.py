"""Who sends what to whom between hosts, and when: everyone to the next host, then to the one after it, and so on.

    step 1:   0 → 1   1 → 2   2 → 3   3 → 0      every link carries one stream each way: no host hears several at once
    step 2:   0 → 2   1 → 3   2 → 0   3 → 1
    step 3:   0 → 3   1 → 0   2 → 1   3 → 2

[Note: partners]
Every rank sends its own shard and receives its own sums; at the other end stands its *partner* there: the rank with
the same number on its host, modulo that host's ranks. So each byte crosses the wire once for each pair of hosts, all
ranks of a host share the work, and a host of few ranks holds up no others.

[Note: rounds]
Long shards go in pieces of one size, whatever the number of ranks; short ones of several steps share a round. A few
rounds are under way at a time, so that the wire is busy while a rank sums and copies (decision 0113). Only integers
live here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["DEPTH", "Round", "Topology", "Unit", "plan_rounds"]

DEPTH = 3
"""Rounds under way at a time."""


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


def plan_rounds(longest: int, *, hosts: int, piece: int, by_piece: bool, first_step: int = 1) -> Iterator[Round]:
    """Yield the rounds that carry shards of up to ``longest`` elements; the same on all ranks.

    Args:
        longest: Elements of the longest shard.
        hosts: How many.
        piece: Elements of a message, and of the units that share a round.
        by_piece: All steps of a piece before the next piece, as a sum over hosts needs them; else piece after piece of
            a step, so that a link stays with one stream.
        first_step: 0 if what a host has for itself takes part.

    >>> [[tuple(unit) for unit in one] for one in plan_rounds(10, hosts=3, piece=8, by_piece=False)]
    [[(1, 0, 8)], [(1, 8, 2)], [(2, 0, 8)], [(2, 8, 2)]]
    >>> [[tuple(unit) for unit in one] for one in plan_rounds(2, hosts=3, piece=8, by_piece=False)]
    [[(1, 0, 2), (2, 0, 2)]]
    """
    dones, steps = range(0, longest, piece), range(first_step, hosts)
    order = ((s, d) for d in dones for s in steps) if by_piece else ((s, d) for s in steps for d in dones)
    found: Round = []
    filled = 0
    for step, done in order:
        unit = Unit(step, done, min(piece, longest - done))
        if found and filled + unit.numel > piece:
            yield found
            found, filled = [], 0
        found.append(unit)
        filled += unit.numel
    if found:
        yield found
