"""Any communicator of MPI: across machines, or wherever memory cannot be shared.

Reductions are done here, not in MPI (decisions 0005, 0009): each rank receives its range from everybody and sums it in
rank order, so the result is deterministic, and fp16 and bf16, which MPI rounds at every hop or cannot sum, are summed
in fp32. What crosses the wire is the algorithm's bound: (n - 1) / n of the array for each half of an all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from zerort import native, trace
from zerort.comm import geometry
from zerort.comm.geometry import split_evenly
from zerort.comm.guard.call import SEQUENCE_NBYTES, Call, call_site, pack_sequence
from zerort.comm.guard.verdict import Trouble, failed_trouble, gone_trouble, late_error
from zerort.comm.neighbours import share_cores
from zerort.comm.transport import Transport
from zerort.comm.transports.carrier import Carrier, piece_nbytes
from zerort.comm.transports.greeting import DIFFERS, NEW_PLACE, Greeter, place_of, small_nbytes, with_place
from zerort.comm.transports.host_side import AloneOnHost
from zerort.comm.transports.messages.alarms import Alarm
from zerort.comm.transports.messages.exchange import Exchange, Interrupted, Messages, PlannedRounds
from zerort.comm.transports.messages.giving_up import agree_on_missing, sightings
from zerort.comm.transports.messages.network import Network, measure
from zerort.comm.transports.messages.sockets import choose_wire
from zerort.comm.transports.node.memory import slab_nbytes
from zerort.comm.transports.places import Places
from zerort.comm.transports.rounds import HostSide
from zerort.comm.transports.shift import Topology
from zerort.comm.transports.small_calls import SmallCalls, cut_sum, elements_of
from zerort.config import GroupOptions
from zerort.errors import RankFailedError
from zerort.typing import Array

__all__ = ["MpiTransport"]

_TEXT_NBYTES = 4096
"""Of a text in `tell`."""

_SMALL_NBYTES = 64 * 1024
"""Broadcasts and reductions up to this size go straight between root and everyone."""


class MpiTransport(Transport):
    """One rank's side of an MPI communicator.

    Args:
        comm: Duplicated, never used itself.
        hosts: For each rank, a number that tells its host.
    """

    kind = "mpi"
    reads_in_place = True  # or copied by MPI, wherever it lies

    def __init__(self, comm: MPI.Intracomm, *, hosts: list[int], name: str, options: GroupOptions) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), name=name, options=options)
        self.hosts = hosts
        self._abroad = sum(host != hosts[self.rank] for host in hosts)  # ranks on other hosts
        # Below MULTIPLE, a thread of ours could meet the user's own calls of MPI: then nothing is asynchronous.
        self.runs_on = "any thread" if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else "caller"
        self._exchange = Exchange(comm, hosts=hosts, message_nbytes=options.message_nbytes, timeout=options.timeout)
        self.topology = self._make_topology(hosts)
        self.places = Places(self.rank)
        """Where all ranks make their calls from."""
        self._last: tuple[int, list[bytes]] | None = None  # the call at which all last met: number, ends of headers
        self._met_at = time.monotonic()
        self._sequence = -1  # of the last call that was begun: none yet
        self._left = False
        self.listened_at = 0.0
        """When this rank last looked for alarms of others that gave up or failed, after a greeting."""
        leaders = [ranks[0] for ranks in self.topology.members]
        self._leads = self.rank in leaders
        self.network = choose_wire(self._exchange, lambda: self._measure(leaders), options=options)
        """What messages between hosts cost; on every rank the same, and so is what follows."""
        # MPI, which carries greetings between ranks of one host, wakes nobody who sleeps.
        only_sockets = self._exchange.wire.sockets is not None and len({hosts[r] for r in leaders}) == len(leaders)
        if only_sockets and share_cores(self._exchange.comm.allgather, counts=self._leads):
            self._exchange.sleep_at_once()
        slab = slab_nbytes(options.staging_nbytes, self.topology.most)
        self._piece_nbytes = piece_nbytes(
            self.topology, self.network, exchange_nbytes=options.exchange_nbytes, slab_nbytes=slab
        )
        self._carrier = Carrier(
            self.rank,
            self.topology,
            nbytes=self._piece_nbytes,
            start=self.start,
            finish=self.finish,
            plan=self._exchange.plan,
            follow=self._follow,
        )
        sizes = {"slab_nbytes": slab, "message_nbytes": options.message_nbytes}
        # A larger call takes the wire longer than a thread should wait that could compute.
        self.eager_nbytes = min(options.eager_nbytes, small_nbytes(len(leaders), **sizes))
        self.small = SmallCalls.of(self.network, self.topology.members, may_start_early=self._throws_away(), **sizes)
        self._greeter = (
            Greeter(leaders, self.rank, room=self.small.each, direct=self.small.is_direct, trade=self._trade)
            if self._leads
            else None
        )

    @property
    def memories(self) -> tuple[int, ...]:
        """For each rank, the number of its host; where ranks share no memory, each is one."""
        return self.topology.host_of

    def _make_topology(self, hosts: list[int]) -> Topology:
        return Topology(range(self.size))  # ranks that share no memory are hosts of their own

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, call: Call) -> None:
        """Compare digests of all ranks' calls, and exchange headers where a rank calls from a new place."""
        self._sequence = call.sequence
        self._conclude(call, self._greet(call, self._flags_of(call, [self.rank], [call.tail()]))[0])

    def _measure(self, leaders: Sequence[int]) -> Network:
        """Find out what messages between hosts cost: what the slowest found, on all ranks."""
        costs = np.zeros(3)
        try:
            if self._leads and len(leaders) > 1:
                costs[:] = measure(leaders, self.rank, self._trade).costs()
            told = self._exchange.all_gather_bytes(costs.tobytes(), sequence=self._sequence, is_idle=not self._leads)
        except Interrupted:
            self._give_up(Call(op="open", site=call_site(), sequence=self._sequence))
        latency, overhead, per_byte = map(float, np.frombuffer(b"".join(told)).reshape(-1, 3).max(0))
        return Network(latency, overhead, 1 / per_byte if per_byte else float("inf"))

    def _trade(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        self._exchange.trade(sends, receives, sequence=self._sequence)

    def _flags_of(self, call: Call, ranks: Sequence[int], tails: Sequence[bytes]) -> int:
        """Return what this rank has to say for ``ranks``, whose headers end with ``tails``; `with_place`."""
        number = self.places.number_of(call.tail())
        known = self.places.tails(number)
        is_new = known is None or any(known[rank] != tail for rank, tail in zip(ranks, tails, strict=True))
        return with_place((DIFFERS if call.complaint else 0) | (NEW_PLACE if is_new else 0), number)

    def _greet(
        self, call: Call, flags: int, nbytes: int = 0, most: int = 0, *, parts: Sequence[int] = ()
    ) -> tuple[int, list[Array]]:
        assert self._greeter is not None
        try:
            heard = self._greeter.greet(call, flags, nbytes, most, parts=parts)
        except Interrupted:
            self._give_up(call)
        self._heed_alarms(call)
        return heard

    def _heed_alarms(self, call: Call) -> None:
        """Give up if others have given up this call, or an earlier one."""
        # A rank that comes late still finds the others' words, but they have given up and gone: their alarms tell.
        # One that wakes up late was here in time: what they have given up is a later call.
        self.listened_at = time.monotonic()
        self._exchange.listen()
        ended = [one for one in self._exchange.alarms.values() if one.reason in ("gave up", "failed")]
        if any(alarm.sequence <= call.sequence for alarm in ended):
            self._give_up(call)

    def note_met(self, sequence: int, tails: list[bytes]) -> None:
        """Remember the call at which all last met, and what headers ended with."""
        self._sequence, self._last, self._met_at = sequence, (sequence, tails), time.monotonic()

    def _conclude(self, call: Call, flags: int) -> None:
        """Go on if all ranks agree on the call, when all know where each makes it."""
        if flags & DIFFERS:
            raise self.disagree(call)
        if flags & NEW_PLACE:
            trace.count("headers exchanged")
            try:
                headers = self._exchange.all_gather_bytes(call.header(), sequence=call.sequence)
            except Interrupted:
                self._give_up(call)
            number = self.places.learn([header[SEQUENCE_NBYTES:] for header in headers])
        else:
            number = place_of(flags)
        self.note_met(call.sequence, self.places.use(number))

    def run(self, call: Call) -> None:
        """Do one collective: a small one in one exchange."""
        if self.small.has(call):
            with trace.span("small", track=f"comm {self.name}", sequence=call.sequence, nbytes=call.nbytes):
                self._run_small(call)
        else:
            super().run(call)

    def _cut_sum(self, call: Call, flags: int, whole: Array, partial: Callable[[Array, int], None]) -> int:
        assert self._greeter is not None
        return cut_sum(
            call,
            flags,
            whole,
            members=self.topology.members,
            host=self.topology.host_of[self.rank],
            greeter=self._greeter,
            greet=self._greet,
            partial=partial,
            is_abroad=[self.hosts[ranks[0]] != self.hosts[self.rank] for ranks in self.topology.members],
        )

    def _run_small(self, call: Call) -> None:
        source, out, table = call.source, call.out, call.geometry
        assert source is not None
        assert out is not None
        assert self._greeter is not None
        self._sequence = call.sequence
        if self.small.cuts(call):
            given, whole = source, np.empty(call.numel, source.dtype)

            def partial(part: Array, first: int) -> None:
                np.copyto(part, given[first : first + part.size])

            self._conclude(call, self._cut_sum(call, self._flags_of(call, [self.rank], [call.tail()]), whole, partial))
            first = 0 if table is None else table.takes[self.rank][0]
            np.copyto(out, whole[first : first + out.size])
            return
        sent = source[: 0 if call.op == "broadcast" and call.root != self.rank else source.size].view(np.uint8)
        np.copyto(self._greeter.data(sent.size), sent)
        most = sent.size if table is None or table.reduces else table.longest * source.itemsize
        flags, told = self._greet(call, self._flags_of(call, [self.rank], [call.tail()]), sent.size, most)
        self._conclude(call, flags)
        trace.count("wire.bytes", sent.size * self._abroad)
        takes = ((0, call.numel),) * self.size if table is None else table.takes
        parts = [elements_of(row, take, out.dtype) for row, take in zip(told, takes, strict=True)]
        if table is None or table.reduces:
            if parts[0].size:
                native.reduce_into(out, parts, call.reduction)
        else:
            for place, part in zip(table.places, parts, strict=True):
                out[place : place + part.size] = part

    def exchange_texts(self, text: str) -> list[str]:
        """Gather every rank's text."""
        raw = text.encode()[:_TEXT_NBYTES].decode(errors="ignore").encode().ljust(_TEXT_NBYTES, b"\0")
        try:
            told = self._exchange.all_gather_bytes(raw, sequence=self._sequence)
        except Interrupted:
            self._give_up(Call(op="tell", site="", sequence=self._sequence))
        return [one.rstrip(b"\0").decode() for one in told]

    def announce_failure(self, why: str) -> None:
        """Sound an alarm with the reason."""
        if not MPI.Is_finalized():
            self._exchange.sound(Alarm(self.rank, self._sequence, "failed", why))

    def peer_failure(self) -> Trouble | None:
        """Say what the alarms tell; below MPI_THREAD_MULTIPLE, those that the thread that opened this has heard."""
        self._exchange.listen()
        alarms = sorted(self._exchange.alarms.values(), key=lambda alarm: (alarm.is_gone, alarm.rank))
        if not alarms:
            return None
        first = alarms[0]
        if first.is_gone:
            return gone_trouble([alarm.rank for alarm in alarms])
        return failed_trouble(first.rank, f"it gave up {first.last}" if first.reason == "gave up" else first.last)

    def start(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]], call: Call) -> Messages:
        """Begin to send and receive arrays."""
        return self._exchange.start(sends, receives, sequence=call.sequence)

    def finish(self, messages: Messages, call: Call) -> None:
        """Wait for messages; raise what everybody raises if a rank is lost meanwhile."""
        try:
            self._exchange.finish(messages, sequence=call.sequence)  # not-gpu: between hosts
        except Interrupted:
            self._give_up(call)

    def _follow(self, rounds: PlannedRounds, until: int, call: Call) -> None:
        try:
            self._exchange.follow(rounds, until, sequence=call.sequence)
        except Interrupted:
            self._give_up(call)

    def _give_up(self, call: Call) -> NoReturn:
        """Say so to all, hear who else does, and raise: whoever is not heard of is missing."""
        exchange, began = self._exchange, time.monotonic()
        exchange.look_for_the_dead(call.sequence)  # one that the ranks of its host have missed sounds no alarm itself
        exchange.sound(Alarm(self.rank, call.sequence, "gave up", f"{call.describe()} at {call.site}"))
        try:
            missing = agree_on_missing(exchange, title=self.title, began=began)
        except RankFailedError as failed:
            self.broken = failed
            raise
        found = sightings(exchange, call, missing, last_header=self._last_header, met_at=self._met_at)
        if self.rank in missing or all(seen.arrived for seen in found):
            self.broken = late_error(**self.facts(call), rank=self.rank)
        else:
            self.broken = self.missing(call, found)
        raise self.broken

    def _last_header(self, rank: int) -> bytes | None:
        return None if self._last is None else pack_sequence(self._last[0]) + self._last[1][rank]

    # -- moving ----------------------------------------------------------------------------------------------------

    def move(self, call: Call) -> None:
        """Serve the geometry round by round; large arrays of one rank's by way of all ranks."""
        table, source, out = call.geometry, call.source, call.out
        assert table is not None
        assert source is not None
        assert out is not None
        if call.op == "broadcast" and call.nbytes > _SMALL_NBYTES:
            self._carrier.chain(source, out, call, self._side(call, source, out))
        elif call.op == "reduce" and call.nbytes > _SMALL_NBYTES:
            self._carrier.reduce(call, lambda part: self._side(call, source, part))
        elif table.reduces:
            self._carrier.scatter(table, out, call, self._side(call, source, out))
        elif table.alike:
            self._carrier.gather(table, source, out, call, self._side(call, source, out), ahead=self._ahead(call))
        else:
            self._carrier.all_pairs(table, source, out, call)

    def all_reduce(self, call: Call) -> None:
        """Reduce one's own part, and gather all parts."""
        assert call.source is not None
        assert call.out is not None
        counts = split_evenly(call.numel, self.size)
        mine = np.empty(counts[self.rank], call.out.dtype)  # apart: an out may be another rank's source
        self._carrier.all_reduce(
            geometry.of_reduce_scatter(counts, self.rank),
            geometry.of_all_gather(counts, self.rank),
            mine,
            call.out,
            call,
            sums=self._side(call, call.source, mine),
            copies=self._side(call, mine, call.out),
        )

    def _throws_away(self) -> bool:
        """Say whether what is sent for a call that is not made is thrown away."""
        return False

    def _ahead(self, call: Call) -> Any:
        """Return what sends a call's first rounds before all have agreed on it, by any plan; None: nothing does."""
        if call.ahead is None and self.small.starts_early and call.op == "all_gather" and call.make is None:
            call.ahead = self._exchange.open_ahead()
        return call.ahead

    def _side(self, call: Call, source: Array, out: Array) -> HostSide:
        """Return what this rank's host does for a call from ``source`` to ``out``."""
        return AloneOnHost(source, out)

    # -- memory, parts, end ----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Array:
        """Return plain memory: there is nobody to share it with."""
        return np.zeros(nbytes, np.uint8)

    allocate_shared = allocate

    def split(self, color: int | None, *, key: int, name: str) -> Transport | None:
        """Split the communicator; the part, too, goes over MPI."""
        part = self.split_comm(color, key)
        if part is None:
            return None
        try:
            hosts = part.allgather(self.hosts[self.rank])
            return MpiTransport(part, hosts=hosts, name=name, options=self.options)
        finally:
            part.Free()  # the transport has copies of its own

    def split_comm(self, color: int | None, key: int) -> MPI.Intracomm | None:
        """Return the communicator of the ranks with the same color; None for color None."""
        part = self._exchange.comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else MPI.Intracomm(part)

    def leave(self) -> None:
        """Sound an alarm: whoever waits for this rank learns that it has left."""
        if not self._left and self.broken is None and not MPI.Is_finalized():
            self._left = True
            self._exchange.sound(Alarm(self.rank, self._sequence + 1, "left", self.standing.words()))

    def all_leave(self, *, within: float) -> bool:
        """Leave, and say whether this rank is alone on its host: of others there it cannot tell."""
        self.leave()
        return self.hosts.count(self.hosts[self.rank]) == 1

    def end(self) -> None:
        """Leave, because the process ends: no thread of ours calls MPI any more, which ends, too."""
        super().end()
        self._exchange.hush()

    def close(self) -> None:
        """Leave, and free the communicators if the others do so too."""
        self.leave()
        self._exchange.hush()
        if self.broken is None and not MPI.Is_finalized():
            self._exchange.close(patience=1.0)
        self._exchange.wire.close()

    def details(self) -> str:
        """Say which MPI it is, and whether it carries what crosses hosts."""
        version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        return version if self._exchange.wire.sockets is None else f"{version}; TCP sockets between hosts"
