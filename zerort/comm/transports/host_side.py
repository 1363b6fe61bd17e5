"""What a host's ranks do around the exchange with other hosts (`HostSide`), by where their arrays lie.

    one rank on the host      its own arrays are all there is
    all outs are one memory   what one rank receives all have
    outs can be read          a rank receives into its own out, from where the others of its host copy
    they cannot               into the host's window, from where all copy

Sums are read out of the ranks' sources where that can be done, else they pass through the staging slabs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from zerort import native
from zerort.comm.geometry import Geometry
from zerort.comm.guard.call import Call
from zerort.comm.transports.node.transport import NodeTransport
from zerort.comm.transports.rounds import Landed
from zerort.comm.transports.shift import LANDING_SLOTS, Topology, Unit
from zerort.typing import Array

__all__ = ["AloneOnHost", "SharedHost"]

_TOGETHER = 4
"""Rounds whose pieces are copied from other ranks' outs at a time: to meet for each one takes longer."""


class AloneOnHost:
    """One rank on its host.

    Args:
        source: Its array.
        out: Where its result goes.
    """

    def __init__(self, source: Array, out: Array) -> None:
        self._source = source
        self._out = out
        self.together = _TOGETHER
        self.memory: tuple[Array, ...] = ()

    def partials(self, unit: Unit, table: Geometry, ranks: Iterable[int], take: Callable[[int], Array]) -> list[Array]:
        """Return parts of the source."""
        return [self._source[first:][:count] for first, count in pieces_of(unit, table, ranks)]

    def spot(self, number: int, landed: Landed) -> Array:
        """Return the place in out."""
        return self._out[landed.place :][: landed.numel]

    def deliver(self, number: int, landed: list[Landed]) -> None:
        """Do nothing: it is there."""

    def end(self) -> None:
        """Do nothing: nobody reads."""


class SharedHost:
    """Several ranks on a host, for one call.

    Args:
        call: The call, which the host's ranks have met for.
        source: This rank's array.
        out: Where its result goes.
        node: The host's ranks.
        topology: Which they are among all.
        rank: This rank among all.
        landing: The host's window; uint8.
        part: Waits for the host's ranks.
    """

    def __init__(
        self,
        call: Call,
        source: Array,
        out: Array,
        *,
        node: NodeTransport,
        topology: Topology,
        rank: int,
        landing: Array,
        part: Callable[[], None],
    ) -> None:
        self._call, self._source, self._out = call, source, out
        self._node, self._part, self._rank = node, part, rank
        self._here = topology.members[topology.host_of[rank]]
        self._topology = topology
        self._readable = node.sources_are_readable()
        self._shared = node.one_out()
        self._copies = node.outs_are_readable()
        self.together = _TOGETHER if self._shared or self._copies else 1
        self._received: list[list[Landed]] = []  # by round: what other ranks have in their outs, and this one not yet
        slot = landing.size // LANDING_SLOTS // out.itemsize * out.itemsize
        self.memory = [landing[k * slot :][:slot].view(out.dtype) for k in range(LANDING_SLOTS)]
        if not self._readable:
            node.memory.start_rounds()

    # -- sums ------------------------------------------------------------------------------------------------------

    def partials(self, unit: Unit, table: Geometry, ranks: Iterable[int], take: Callable[[int], Array]) -> list[Array]:
        """Sum this host's pieces for ``ranks``."""
        if not self._readable:
            return self._staged(unit, table, ranks, take)
        found = []
        for first, count in pieces_of(unit, table, ranks):
            found.append(take(count))
            self._node.reduce_sources(self._call, found[-1], first=first)
        return found

    def _staged(self, unit: Unit, table: Geometry, ranks: Iterable[int], take: Callable[[int], Array]) -> list[Array]:
        """Sum through the ranks' slabs, where one rank cannot read another's memory."""
        memory, call, everyone = self._node.memory, self._call, self._topology.members
        there = everyone[self._topology.ahead(self._rank, unit.step)]
        slab = memory.next_slab(self._source.dtype)
        for at, (first, count) in enumerate(pieces_of(unit, table, there)):
            slab[at * unit.numel :][:count] = self._source[first:][:count]
        self._part()
        slabs = [memory.slab_of(local, self._source.dtype) for local in range(len(self._here))]
        found = []
        for rank, (_, count) in zip(ranks, pieces_of(unit, table, ranks), strict=True):
            at = there.index(rank) * unit.numel
            found.append(take(count))
            if count:
                native.reduce_into(found[-1], [one[at:][:count] for one in slabs], call.reduction)
        return found

    # -- copies ----------------------------------------------------------------------------------------------------

    def spot(self, number: int, landed: Landed) -> Array:
        """Return the place in out, or in the landing."""
        if self._shared or self._copies:
            return self._out[landed.place :][: landed.numel]
        return self.memory[number % LANDING_SLOTS][landed.at :][: landed.numel]

    def deliver(self, number: int, landed: list[Landed]) -> None:
        """Copy what other ranks of the host received, when all have met; out of their outs some rounds at a time."""
        if self._shared:
            return
        if self._copies:
            self._received.append(landed)
            if len(self._received) == self.together:
                self._copy_received()
            return
        self._part()
        for one in landed:
            self._out[one.place :][: one.numel] = self.memory[number % LANDING_SLOTS][one.at :][: one.numel]

    def _copy_received(self) -> None:
        self._part()
        width = self._out.itemsize
        for one in itertools.chain.from_iterable(self._received):
            if one.carrier != self._rank and one.numel:
                self._node.copy_from_out(
                    self._here.index(one.carrier), one.place * width, self._out[one.place :], one.numel * width
                )
        self._received.clear()

    def end(self) -> None:
        """Copy the rest, and meet the host's ranks: some may still read this one's arrays."""
        if self._received:
            self._copy_received()
        self._part()


def pieces_of(unit: Unit, table: Geometry, ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, count) of a unit's piece for each of ``ranks`` in everybody's source."""
    found = []
    for rank in ranks:
        first, count = table.gives[rank]
        found.append((first + unit.done, max(0, min(unit.numel, count - unit.done))))
    return found
