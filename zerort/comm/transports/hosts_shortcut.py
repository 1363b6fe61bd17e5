"""`HostsShortcut`: a call between hosts that is made again, in one native step (``native/src/hosts.h``).

    meet the host's ranks ── the leader: sum or collect, one exchange with the other hosts ── part ── copy the result

Of a larger call the step compares what all ranks make, and moves nothing: rounds do (carrier.py, decision 0203). Of a
gather that is planned what they send first leaves meanwhile (decision 0204).

From Python these steps cost several times what the network does (decision 0168). What the native step does not finish,
`HierarchicalTransport.resume` does: someone is late, calls differ, or a rank calls from a place that others have not
heard of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zerort import trace
from zerort.comm import geometry
from zerort.comm.guard.call import Call
from zerort.comm.transport import DONE, STALE
from zerort.comm.transports.messages.exchange import LISTEN_EVERY
from zerort.comm.transports.node.shortcut import Place, prepared_facts
from zerort.comm.transports.places import Places
from zerort.comm.transports.small_calls import ranges_of
from zerort.native.rendezvous import MOVES, PARTING
from zerort.native.wire import CONCLUDING, prepare_hosts
from zerort.typing import Array

__all__ = ["SERVING", "Caller", "HostsShortcut", "make_native"]

SERVING = CONCLUDING + 8
"""How far a shortcut came that only meets: all agree on the call, and nothing has moved."""


_PATIENCE, _SLOWER = 2e-3, 4
"""Seconds that the native step waits for others, and how many times as long as the network takes when it is alone."""

_MOST_PATIENCE = 50e-3
"""Seconds. Meanwhile nobody hears of a rank that has failed, however slow the network seemed to be."""

_MEETING_PATIENCE = LISTEN_EVERY
"""The same of a call that only meets: what it waits for are ranks that are late."""


class Caller(Protocol):
    """The transport whose calls take shortcuts."""

    places: Places
    begun: HostsShortcut | None
    """The shortcut of a call that it has not finished."""
    listened_at: float
    """When this rank last looked for alarms."""

    def note_met(self, sequence: int, tails: list[bytes]) -> None:
        """Remember the call at which all last met."""


class HostsShortcut:
    """One call's shortcut.

    Args:
        transport: Whose call it is.
        native: The native ``HostsCall``.
        tail: What this rank's header ends with, for this call.
        places: The set of places that it is made from; another if one of the others has called from elsewhere since.
        wire_nbytes: What this rank sends to other hosts.
        completes: Whether the native form does all of the call; else it meets for it, and the transport moves it.
    """

    __slots__ = ("_places", "_tail", "_tails", "_transport", "_wire_nbytes", "completes", "native")

    def __init__(
        self, transport: Caller, native: Any, *, tail: bytes, places: int, wire_nbytes: int, completes: bool
    ) -> None:
        self._transport = transport
        self.completes = completes
        self._tail, self._places, self._wire_nbytes = tail, places, wire_nbytes
        self._tails = transport.places.use(places)
        self.native = native

    def run(self, sequence: int, source: Array | None, out: Array | None) -> int:
        """Make the call with this number; return how far it came."""
        if not self._begin(sequence):
            return STALE
        progress: int = self.native.run(sequence, source, out)
        self._end(sequence, progress)
        return SERVING if progress == DONE and not self.completes else progress

    def run_new(self, sequence: int, source: Array) -> Any:
        """Make the call with a new array for the result; return that, or how far it came (and the array)."""
        if not self._begin(sequence):
            return STALE
        made = self.native.run_new(sequence, source)
        kind = type(made)
        self._end(sequence, made[0] if kind is tuple else made if kind is int else DONE)
        return made

    def _begin(self, sequence: int) -> bool:
        transport = self._transport
        if transport.places.number_of(self._tail) != self._places:
            return False
        self.native.listen_at = int((transport.listened_at + LISTEN_EVERY) * 1e9)
        return True

    def _end(self, sequence: int, progress: int) -> None:
        if progress == STALE:
            return
        if self._wire_nbytes and (progress == DONE or progress >= PARTING):  # else nothing was sent yet
            trace.count("wire.bytes", self._wire_nbytes)
        if progress == DONE:
            self._transport.note_met(sequence, self._tails)
        else:
            self._transport.begun = self


def make_native(
    link: Any,
    log: Any,
    call: Call,
    *,
    rank: int,
    members: Sequence[Sequence[int]],
    host: int,
    source: Place,
    out: Place,
    slab_nbytes: int,
    notes: Array,
    tails: Sequence[bytes],
    places: int,
    plan: Any,
    moves: bool,
    is_cut: bool,
    wire_seconds: float,
    busy: float,
    ahead: Any,
) -> Any:
    """Return the native form of a ``call``: all of a small one, of others what comes before anything is moved.

    Args:
        link: The native rendezvous of this host's ranks.
        log: Where it notes its runs.
        call: A call that was checked, with its arrays.
        rank: This rank among all.
        members: The ranks of each host.
        host: The number of this one.
        source: Where the source lies; if it is staged, where this rank's slab begins.
        out: Where the out lies.
        slab_nbytes: Of half a slab if the source is staged, else 0.
        notes: Where the leader leaves flags and the result.
        tails: What headers of this host's ranks end with.
        places: The set of places that they are of.
        plan: How the leader greets other hosts; None for the others.
        moves: Whether it moves data.
        is_cut: Whether it is a sum that is cut by host.
        wire_seconds: About what the network takes for it.
        busy: Seconds for which the leader polls for messages.
        ahead: What leaves before all have agreed on the call; None for nothing.
    """
    table, width = call.geometry if moves else None, 1 if call.out is None else call.out.itemsize
    reduces = moves and (call.op == "all_reduce" or (table is not None and table.reduces))
    shards: list[list[tuple[int, int]]] = []
    if reduces:
        shards = ranges_of(call, members) if is_cut else []
    elif table is not None:
        counts = [count for _, count in table.takes]
        firsts = geometry.starts(counts)
        shards = [[(firsts[r], counts[r]) for r in ranks] for ranks in members]
    numel = call.numel if reduces else sum(count for ranges in shards for _, count in ranges)
    first = table.takes[rank][0] if table is not None and table.reduces else 0
    return prepare_hosts(
        link,
        log,
        **prepared_facts(call, rank=rank, source=source, out=out, slab_nbytes=slab_nbytes),
        move=MOVES.index("reduce" if reduces else "copy" if shards else "nothing"),
        alike=call.out is not None and (table is None or table.alike),
        whole_nbytes=numel * width,
        first=first * width,
        notes=notes,
        plan=plan,
        places=places,
        tails=list(tails),
        shards=[[(start * width, count * width) for start, count in ranges] for ranges in shards],
        scattered=table is not None,
        host=host,
        patience=min(_PATIENCE + _SLOWER * wire_seconds, _MOST_PATIENCE if moves else _MEETING_PATIENCE),
        busy=busy,
        ahead=ahead,
    )
