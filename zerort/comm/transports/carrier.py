"""`Carrier`: what crosses the wire between hosts, several rounds at a time; a `HostSide` does the rest within a host.

    scatter    the host's sum of a piece ──> its owner, which sums over hosts in their order
    reduce     a part on each rank, collected at root
    gather     one's own piece ──> a partner on each other host, from where the host's ranks have it
    all_reduce both: what was summed first is gathered while the last sums are on the wire
    chain      root's array, piece by piece, from host to host: root's link carries it once
    all_pairs  arrays of every rank for every other

While a rank sums or copies what has come, the next rounds are on the wire ([Note: rounds] in shift.py).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from zerort import native
from zerort.comm import geometry
from zerort.comm.geometry import Geometry, split_evenly
from zerort.comm.guard.call import Call
from zerort.comm.transports.messages.exchange import Messages, PlannedRounds
from zerort.comm.transports.messages.network import Network
from zerort.comm.transports.messages.wire import Parts
from zerort.comm.transports.rounds import GatherRound, HostSide, Landed, PlannedGather, Rounds, gather_rounds
from zerort.comm.transports.shift import DEPTH, LANDING_SLOTS, Round, Topology, Unit, plan_rounds
from zerort.typing import Array

__all__ = ["WIDEST_NBYTES", "Carrier", "piece_nbytes"]

_ROUND_NBYTES, _ROUND_SECONDS = 1024**2, 0.75e-3
"""Of a round's messages of long arrays, those of all ranks of a host; and of the wire, where that is slow.

The first and the last round of a call have nothing to hide what ranks copy behind (decision 0204)."""

_MESSAGE_NBYTES = 256 * 1024
"""Of one of them, at least, on a fast wire: to handle more of them would cost cores that compute."""

_LEAST_NBYTES = 64 * 1024
"""The same on a slow wire, or where there are very many hosts, of whose arrays a rank would hold too much."""

_IN_PLACE_NBYTES = 8 * 1024**2
"""Of a message where every host has one rank, which gathers straight to its out.

No longer ones: several are under way, and all of them have to arrive within the timeout of a wait."""


WIDEST_NBYTES = 32
"""Of an element: NumPy has none wider than a complex long double."""


def piece_nbytes(topology: Topology, network: Network, *, exchange_nbytes: int, slab_nbytes: int) -> int:
    """Return the bytes of a message of a long array, the same on all ranks; a multiple of 64 if there is room.

    Args:
        topology: How many hosts, of how many ranks.
        network: What lies between them. Rounds under way fill it from one end to the other and back, however far it is.
        exchange_nbytes: About what a rank may hold of the others' arrays.
        slab_nbytes: Where ranks of a host stage arrays: half of it has room for a piece of each; made more where it
            would hold no element of each.
    """
    share = max(exchange_nbytes // (2 * topology.count), min(_LEAST_NBYTES, exchange_nbytes))
    near = min(max(_ROUND_NBYTES // topology.most, _MESSAGE_NBYTES), network.carries(_ROUND_SECONDS) // topology.most)
    round_trip = 2 * network.latency if network.round_trip is None else network.round_trip
    far = network.carries(round_trip / DEPTH) // topology.most
    wanted = max(near, far) // _LEAST_NBYTES * _LEAST_NBYTES
    found = min(max(wanted, _LEAST_NBYTES), share, max(slab_nbytes // 2 // topology.most, WIDEST_NBYTES))
    return found // 64 * 64 or found


class Carrier:
    """One rank's messages to and from other hosts.

    Args:
        rank: This rank.
        topology: Who is where.
        nbytes: Of a message of a long array.
        start: Begins to send and receive.
        finish: Waits until that is done.
        plan: Returns rounds that `follow` can send and receive again and again; None if there is no native code for it.
        follow: Goes on with such rounds until so many of them are done.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        *,
        nbytes: int,
        start: Callable[..., Messages],
        finish: Callable[[Messages, Call], None],
        plan: Callable[..., PlannedRounds | None] = lambda rounds, **how: None,
        follow: Callable[[PlannedRounds, int, Call], None] = lambda rounds, until, call: None,
    ) -> None:
        self._rank = rank
        self._topology = topology
        self._nbytes = nbytes
        self._start = start
        self._finish = finish
        self._plan = plan
        self._follow = follow
        self._host = topology.host_of[rank]
        self._free: list[Array] = []  # touched once and used for ever
        self._lent: dict[int, Array] = {}  # by address

    def piece(self, itemsize: int) -> int:
        """Return the elements of a message of a long array."""
        return self._nbytes // itemsize

    # -- sums ------------------------------------------------------------------------------------------------------

    def scatter(self, table: Geometry, out: Array, call: Call, side: HostSide) -> None:
        """Sum ``table`` over all hosts into this rank's ``out``."""
        rounds = Rounds(self._finish, call)
        self._scatter(rounds, table, out, side)
        rounds.finish_all()
        side.end()

    def reduce(self, call: Call, side_of: Callable[[Array], HostSide]) -> None:
        """Sum one part on each rank, then collect the parts at root: no rank sums it all.

        Args:
            call: A reduce.
            side_of: Returns what this rank's host does for sums into an array.
        """
        assert call.source is not None
        assert call.out is not None
        counts = split_evenly(call.numel, len(self._topology.host_of))
        mine = np.empty(counts[self._rank], call.source.dtype)
        table = geometry.of_reduce_scatter(counts, self._rank)
        self.scatter(table, mine, call, side_of(mine))
        sends, receives = [(call.root, mine)], []
        if self._rank == call.root:
            out = call.out
            receives = [(r, out[first : first + count]) for r, (first, count) in enumerate(table.gives)]
            np.copyto(receives.pop(self._rank)[1], mine)
            sends = []
        self._finish(self._start(sends, receives, call), call)

    def all_reduce(
        self,
        scattered: Geometry,
        gathered: Geometry,
        mine: Array,
        out: Array,
        call: Call,
        *,
        sums: HostSide,
        copies: HostSide,
    ) -> None:
        """Sum ``scattered`` into ``mine``, and bring all ranks' to every ``out``; of long arrays without a pause."""
        rounds = Rounds(self._finish, call)
        summed = self._scatter(rounds, scattered, mine, sums)
        # From here on no rank of the host reads a source, which may be somebody's out. Of a rank that is alone on its
        # host messages and sums may: what comes to a range of out was summed from what they read of it, so they are
        # done, and its own range is summed before it is gathered.
        sums.end()

        def await_sum(done: int) -> None:
            while done not in summed:
                rounds.finish_first()

        piece = self.piece(out.itemsize)
        gathers = gather_rounds(gathered, mine, out, copies, rank=self._rank, topology=self._topology, piece=piece)
        self._gather(rounds, gathers, copies, await_source=await_sum)
        rounds.finish_all()
        copies.end()

    def _scatter(self, rounds: Rounds, table: Geometry, out: Array, side: HostSide) -> set[int]:
        """Begin all rounds of a sum; return where the pieces begin whose sums are there, to which later ones come."""
        rank, topology, hosts = self._rank, self._topology, self._topology.count
        mine = table.takes[rank][1]
        steps = topology.abroad or [0]  # a host's own sum needs no round, but where there is nobody else
        parts: dict[int, dict[int, Array]] = collections.defaultdict(dict)  # by where a piece begins, then by host
        summed: set[int] = set()

        def take(count: int) -> Array:
            return self._take(count * out.itemsize).view(out.dtype)

        def begin(round_: Round) -> None:
            sends: list[tuple[int, Array]] = []
            receives: list[tuple[int, Array]] = []
            for unit in round_ if topology.abroad else ():
                ahead, behind = topology.ahead(rank, unit.step), topology.behind(rank, unit.step)
                served = topology.served(rank, ahead)
                sends += list(zip(served, side.partials(unit, table, served, take), strict=True))
                count = max(0, min(unit.numel, mine - unit.done))
                if count:
                    part = parts[unit.done][behind] = take(count)
                    receives.append((topology.partner(behind, rank), part))
            messages = self._begin(sends, receives, rounds.call)
            for unit in round_:  # the wire is busy meanwhile
                if unit.step == steps[-1]:
                    own = Unit(0, unit.done, unit.numel)
                    (parts[unit.done][self._host],) = side.partials(own, table, [rank], take)
            rounds.add(messages, functools.partial(conclude, round_, sends))

        def conclude(round_: Round, sent: Parts) -> None:
            for unit in round_:
                if unit.step == steps[-1]:
                    found = parts.pop(unit.done)
                    if len(found) == hosts:
                        result = out[unit.done :][: found[self._host].size]
                        native.reduce_into(result, [found[host] for host in range(hosts)], rounds.call.reduction)
                    self._give(found.values())
                    summed.add(unit.done)
            self._give(array for _, array in sent)

        for round_ in plan_rounds(table.longest, steps=steps, piece=self.piece(out.itemsize)):
            begin(round_)
        return summed

    # -- copies ----------------------------------------------------------------------------------------------------

    def gather(
        self, table: Geometry, source: Array, out: Array, call: Call, side: HostSide, *, ahead: Any = None
    ) -> None:
        """Bring every rank's ``source`` to its place in every rank's ``out``.

        Args:
            table: Where each rank's shard goes.
            source: This rank's.
            out: Where all of them go.
            call: The gather.
            side: What this rank's host does with what comes.
            ahead: What sends the first rounds of the same call when it is made again, before all agree on it; or None.
        """
        piece = self.piece(out.itemsize) if self._topology.most > 1 else _IN_PLACE_NBYTES // out.itemsize
        where = (native.address_of(source), native.address_of(out), side.together)
        if call.plan is None or call.plan.where != where:
            gathers = [*gather_rounds(table, source, out, side, rank=self._rank, topology=self._topology, piece=piece)]
            rounds = [(one.sends, one.receives, one.copies) for one in gathers]
            planned = self._plan(rounds, depth=DEPTH, source=source, ahead=ahead)
            landed = [one.landed for one in gathers]
            call.plan = None if planned is None else PlannedGather(where, planned, landed, follow=self._follow)
        if call.plan is not None:
            call.plan.run(call, side)
        else:
            under_way = Rounds(self._finish, call)
            self._gather(under_way, gathers, side)
            under_way.finish_all()
        side.end()

    def _gather(
        self,
        rounds: Rounds,
        gathers: Iterable[GatherRound],
        side: HostSide,
        *,
        await_source: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Begin all rounds of a gather; ``await_source`` waits for the piece of the source that begins there."""

        def conclude(number: int, one: GatherRound) -> None:
            for spot, mine in one.copies:  # not before: others wait for what this rank sends
                np.copyto(spot, mine)
            side.deliver(number, one.landed)

        for number, one in enumerate(gathers):
            for done in one.sources:
                await_source(done)
            rounds.add(self._begin(one.sends, one.receives, rounds.call), functools.partial(conclude, number, one))

    def chain(self, source: Array, out: Array, call: Call, side: HostSide) -> None:
        """Bring root's ``source`` to every rank's ``out``, each host handing pieces on to the next."""
        rank, topology, hosts = self._rank, self._topology, self._topology.count
        origin = topology.host_of[call.root]
        position = (self._host - origin) % hosts
        piece = self.piece(out.itemsize)
        starts = range(0, out.size, piece)

        def carrier(at: int, number: int) -> int:
            """Return who has piece ``number`` on the host at a position of the chain."""
            ranks = topology.members[(origin + at) % hosts]
            return ranks[number % LANDING_SLOTS % len(ranks)] if at else call.root

        sends: collections.deque[tuple[int, Messages]] = collections.deque()
        receives: collections.deque[tuple[Array, Messages]] = collections.deque()
        for ahead in range(len(starts) + DEPTH - 1):
            if ahead < len(starts) and carrier(position, ahead) == rank:
                done = starts[ahead]
                count = min(piece, out.size - done)
                spot = side.spot(ahead, Landed(rank, 0, done, count))
                while sends and sends[0][0] < ahead - DEPTH:  # it may lie in the slot whose turn it is again
                    self._finish(sends.popleft()[1], call)
                if position == 0:
                    mine = source[done : done + count]
                    if spot.ctypes.data != mine.ctypes.data:
                        np.copyto(spot, mine)
                    receives.append((spot, self._start([], [], call)))
                else:
                    receives.append((spot, self._start([], [(carrier(position - 1, ahead), spot)], call)))
            number = ahead - DEPTH + 1
            if number >= 0:
                if carrier(position, number) == rank:
                    spot, messages = receives.popleft()
                    self._finish(messages, call)
                    if position + 1 < hosts:
                        sends.append((number, self._start([(carrier(position + 1, number), spot)], [], call)))
                count = min(piece, out.size - starts[number])
                side.deliver(number, [Landed(carrier(position, number), 0, starts[number], count)])
        for _, messages in sends:
            self._finish(messages, call)
        side.end()

    def all_pairs(self, table: Geometry, source: Array, out: Array, call: Call) -> None:
        """Bring to every rank what every other has for it; nothing can be shared within a host."""
        rank, topology = self._rank, self._topology

        def begin(round_: Round) -> Messages | None:
            sends, receives = [], []
            for unit in round_:
                for r in topology.members[topology.ahead(rank, unit.step)]:
                    first, count = table.gives[r]
                    if r != rank:
                        sends.append((r, source[first + unit.done :][: max(0, min(unit.numel, count - unit.done))]))
                for r in topology.members[topology.behind(rank, unit.step)]:
                    first, count = table.takes[r]
                    many = max(0, min(unit.numel, count - unit.done))
                    place = out[table.places[r] + unit.done :][:many]
                    if r != rank:
                        receives.append((r, place))
                    elif many and place.ctypes.data != source[first + unit.done :].ctypes.data:
                        np.copyto(place, source[first + unit.done :][:many])
            return self._begin(sends, receives, call)

        rounds = Rounds(self._finish, call)
        for round_ in plan_rounds(table.longest, steps=[*topology.abroad, 0], piece=self.piece(out.itemsize)):
            rounds.add(begin(round_), lambda: None)
        rounds.finish_all()

    def _begin(self, sends: Parts, receives: Parts, call: Call) -> Messages | None:
        """Begin to send and receive; None if there is nothing to."""
        return self._start(sends, receives, call) if sends or receives else None

    def _take(self, nbytes: int) -> Array:
        """Return memory for a piece, which `_give` takes back."""
        if not nbytes:
            return np.empty(0, np.uint8)
        whole = self._free.pop() if self._free else np.empty(self._nbytes, np.uint8)  # of one size, to serve any piece
        self._lent[whole.ctypes.data] = whole
        return whole[:nbytes]

    def _give(self, arrays: Iterable[Array]) -> None:
        """Keep memory from `_take` for the next piece; leave alone what is not."""
        for array in arrays:
            whole = self._lent.pop(array.ctypes.data, None)
            if whole is not None:
                self._free.append(whole)
