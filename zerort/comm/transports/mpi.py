"""Any communicator of MPI: across machines, or wherever memory cannot be shared.

Reductions are done here, not in MPI (decisions 0005, 0009): each rank receives its range from everybody and sums it in
rank order, so the result is deterministic, and fp16 and bf16, which MPI rounds at every hop or cannot sum, are summed
in fp32. What crosses the wire is the algorithm's bound: (n - 1) / n of the array for each half of an all-reduce.
"""

from __future__ import annotations

import time
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from zerort import native
from zerort.comm import geometry
from zerort.comm.geometry import Geometry, even_part, split_evenly
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import (
    Sighting,
    Trouble,
    failed_error,
    failed_trouble,
    gone_trouble,
    last_call,
    late_error,
)
from zerort.comm.transport import Transport
from zerort.comm.transports.exchange import Alarm, Exchange, Interrupted
from zerort.config import GroupOptions
from zerort.native.rendezvous import AGREED_BYTES
from zerort.typing import Array

__all__ = ["MpiTransport"]

_TEXT_NBYTES = 4096
"""Of a text in `tell`."""

_HEAR_FOR = 1.0
"""Seconds in which the ranks that gave up together tell each other so."""

_SMALL_NBYTES = 64 * 1024
"""Broadcasts up to this size go straight from root to everyone."""


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
        # Below MULTIPLE, a thread of ours could meet the user's own calls of MPI: then nothing is asynchronous.
        self.runs_on = "own thread" if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else "caller"
        self._exchange = Exchange(comm, hosts=hosts, message_nbytes=options.message_nbytes, timeout=options.timeout)
        self._headers: list[bytes] | None = None  # what every rank said when all last met
        self._met_at = time.monotonic()
        self._sequence = 0
        self._left = False

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, call: Call) -> None:
        """Gather every rank's header and compare them."""
        self._sequence = call.sequence
        try:
            headers = self._exchange.all_gather_bytes(call.header(), sequence=call.sequence)
        except Interrupted:
            self._give_up(call)
        # A rank that comes late still finds the others' headers, but they have given up and gone: their alarms tell.
        # One that wakes up late was here in time: what they have given up is a later call.
        self._exchange.listen()
        ended = [one for one in self._exchange.alarms.values() if one.reason in ("gave up", "failed")]
        if any(alarm.sequence <= call.sequence for alarm in ended):
            self._give_up(call)
        self._headers, self._met_at = headers, time.monotonic()
        if call.complaint or any(header[:AGREED_BYTES] != headers[0][:AGREED_BYTES] for header in headers):
            raise self.disagree(call)

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

    def swap(
        self,
        sends: list[tuple[int, Array]],
        receives: list[tuple[int, Array]],
        call: Call,
    ) -> None:
        """Send and receive arrays; raise what everybody raises if a rank is lost meanwhile."""
        try:
            self._exchange.swap(sends, receives, sequence=call.sequence)
        except Interrupted:
            self._give_up(call)

    def _give_up(self, call: Call) -> NoReturn:
        """Say so to all, hear who else does, and raise: whoever is not heard of is missing."""
        exchange, began = self._exchange, time.monotonic()
        exchange.sound(Alarm(self.rank, call.sequence, "gave up", f"{call.describe()} at {call.site}"))
        heard = 0
        while heard < self.size - 1 and time.monotonic() - began < _HEAR_FOR:
            heard = len(exchange.alarms)
            exchange.listen()
            for failed in exchange.alarms.values():
                if failed.reason == "failed":
                    self.broken = failed_error(self.title, rank=failed.rank, why=failed.last)
                    raise self.broken
            time.sleep(1e-3)
        sightings = []
        for rank in range(self.size):
            alarm = exchange.alarms.get(rank)
            if rank == self.rank or (alarm is not None and not alarm.is_gone):
                last = f"#{call.sequence} {call.describe()} at {call.site}" if alarm is None else alarm.last
                sightings.append(Sighting(arrived=True, last=last))
                continue
            sightings.append(
                Sighting(
                    arrived=False,
                    left=alarm is not None,
                    last=last_call(self._headers[rank] if self._headers else None),
                    since=time.monotonic() - self._met_at,
                    process=f"host {self.hosts[rank]}",
                    farewell=Standing.read(alarm.last) if alarm is not None and alarm.reason == "left" else None,
                )
            )
        if all(seen.arrived for seen in sightings):
            self.broken = late_error(**self.facts(call), rank=self.rank)
        else:
            self.broken = self.missing(call, sightings)
        raise self.broken

    # -- moving ----------------------------------------------------------------------------------------------------

    def move(self, call: Call) -> None:
        """Serve the geometry with one message per pair of ranks, or block by block where they are summed."""
        table, source, out = call.geometry, call.source, call.out
        assert table is not None
        assert source is not None
        assert out is not None
        if call.op == "broadcast" and call.nbytes > _SMALL_NBYTES:
            self._broadcast(call)
        elif call.op == "reduce" and call.nbytes > _SMALL_NBYTES:
            self._reduce(call)
        elif table.reduces:
            self._scatter(table, source, out, call)
        else:
            self._copy(table, source, out, call)

    def all_reduce(self, call: Call) -> None:
        """Reduce one's own part, then gather all parts in place."""
        assert call.source is not None
        assert call.out is not None
        counts = split_evenly(call.numel, self.size)
        first, count = even_part(call.numel, self.size, self.rank)
        mine = call.out[first : first + count]
        self._scatter(geometry.scatter(counts, self.rank), call.source, mine, call)
        self._copy(geometry.gather(counts, self.rank), mine, call.out, call)

    def _copy(self, table: Geometry, source: Array, out: Array, call: Call) -> None:
        sends, receives = [], []
        for rank in range(self.size):
            first, count = table.takes[rank]
            place = out[table.places[rank] :][:count]
            if rank != self.rank:
                receives.append((rank, place))
                there, many = table.gives[rank]
                sends.append((rank, source[there : there + many]))
            elif count:
                mine = source[first : first + count]
                if mine.ctypes.data != place.ctypes.data:
                    np.copyto(place, mine)
        self.swap(sends, receives, call)

    def _scatter(self, table: Geometry, source: Array, out: Array, call: Call) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Blocks bound what a rank holds of the others' arrays.
        block = max(1, self.options.exchange_nbytes // (self.size * out.itemsize))
        buffers = {rank: np.empty(min(block, table.longest), out.dtype) for rank in others}
        for done in range(0, table.longest, block):
            mine = max(0, min(block, table.takes[self.rank][1] - done))
            sends = [
                (rank, source[first + done :][: max(0, min(block, count - done))])
                for rank, (first, count) in enumerate(table.gives)
                if rank != self.rank
            ]
            receives = [(rank, buffers[rank][:mine]) for rank in others]
            self.swap(sends, receives, call)
            if mine:
                own = source[table.takes[self.rank][0] + done :][:mine]
                parts = [own if rank == self.rank else buffers[rank][:mine] for rank in range(self.size)]
                native.reduce_into(out[done:][:mine], parts, call.reduction)

    def _broadcast(self, call: Call) -> None:
        """Give every rank a part, then gather the parts: root sends the array once, not once to each rank."""
        assert call.source is not None
        assert call.out is not None
        parts = [even_part(call.numel, self.size, rank) for rank in range(self.size)]
        first, count = parts[self.rank]
        mine = call.out[first : first + count]
        if self.rank == call.root:
            sends = [(rank, call.source[f : f + c]) for rank, (f, c) in enumerate(parts) if rank != call.root]
            self.swap(sends, [], call)
            mine[:] = call.source[first : first + count]
        else:
            self.swap([], [(call.root, mine)], call)
        self._copy(geometry.gather(split_evenly(call.numel, self.size), self.rank), mine, call.out, call)

    def _reduce(self, call: Call) -> None:
        """Reduce one part on each rank, then collect the parts at root: no rank sums it all."""
        assert call.source is not None
        assert call.out is not None
        parts = [even_part(call.numel, self.size, rank) for rank in range(self.size)]
        mine = np.empty(parts[self.rank][1], call.source.dtype)
        counts = split_evenly(call.numel, self.size)
        self._scatter(geometry.scatter(counts, self.rank), call.source, mine, call)
        if self.rank == call.root:
            first, count = parts[self.rank]
            call.out[first : first + count] = mine
            out = call.out
            self.swap([], [(r, out[f : f + c]) for r, (f, c) in enumerate(parts) if r != self.rank], call)
        else:
            self.swap([(call.root, mine)], [], call)

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

    def details(self) -> str:
        """Say which MPI it is."""
        return MPI.Get_library_version().splitlines()[0].strip("\0 ")
