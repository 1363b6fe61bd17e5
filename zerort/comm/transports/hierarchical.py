"""Several ranks on each of several hosts: shared memory within a host, MPI between hosts, each byte over the wire once.

    reduce_scatter   sum within the host, out of its ranks' memory ── one partial per host pair ──> sum over hosts
    all_gather       write one's shard into the host's window ── each shard to each other host once ──> read the window

Who sends what to whom is in shift.py, what crosses the wire in carrier.py, what happens within a host in host_side.py.
Arrays pass in pieces of one size, in step on both sides, wherever they lie: a host need not know of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from zerort import native, trace
from zerort.comm import geometry
from zerort.comm.guard.call import SEQUENCE_NBYTES, Call, call_site
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import Trouble
from zerort.comm.transport import Transport
from zerort.comm.transports.greeting import DIFFERS
from zerort.comm.transports.host_side import SharedHost
from zerort.comm.transports.hosts_shortcut import SERVING, HostsShortcut, make_native
from zerort.comm.transports.messages.exchange import Interrupted
from zerort.comm.transports.mpi import MpiTransport
from zerort.comm.transports.node.transport import NodeTransport
from zerort.comm.transports.rounds import HostSide, taken_back_if_left
from zerort.comm.transports.shift import LANDING_SLOTS, Topology
from zerort.config import GroupOptions
from zerort.errors import CollectiveError, SharedMemoryError
from zerort.native.rendezvous import MEETING, PARTING
from zerort.native.wire import GREETING, LISTENING
from zerort.typing import Array

__all__ = ["HierarchicalTransport"]


_NOTE_WORDS = 8
"""Numbers before a small result in the host's window: a cache line, of which the first holds the flags."""


class HierarchicalTransport(MpiTransport):
    """One rank's side of a communicator over several hosts.

    Args:
        comm: All ranks.
        node: This host's ranks, in the order that they have in ``comm``.
        hosts: For each rank, a number that tells its host.
        open_part: Opens the best transport for the ranks of a communicator, when this one is split.
    """

    kind = "hierarchical"
    reads_in_place = False  # that is for each host to say, and they may differ

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: NodeTransport,
        *,
        hosts: list[int],
        name: str,
        options: GroupOptions,
        open_part: Callable[..., Transport],
    ) -> None:
        self._node = node  # first: opening may be given up
        super().__init__(comm, hosts=hosts, name=name, options=options)
        self._open_part = open_part
        node.share_standing(self.standing)
        self._host = self.topology.host_of[self.rank]
        self._here = self.topology.members[self._host]
        # Flags, and behind them a small result, from the leader for the ranks of this host. Written when all have met
        # for a call, so all have read what was there of the one before.
        self._notes = self._on_every_host(lambda: node.allocate_shared(8 * _NOTE_WORDS + self.small.room))
        self._flags = self._notes[: 8 * _NOTE_WORDS].view(np.int64)
        self.begun: HostsShortcut | None = None
        """The shortcut of a call that it has not finished."""
        self.flights = node.flights  # which know of calls that took shortcuts
        # Where other hosts' pieces land if the ranks of this one cannot read each other's memory.
        landing_nbytes = LANDING_SLOTS * self.topology.most * self._piece_nbytes
        self._landing = self._on_every_host(lambda: node.allocate_shared(landing_nbytes))

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, call: Call) -> None:
        """Show the ranks of this host where the arrays lie; one of them compares the call with the other hosts'."""
        self._meet(call, None)

    def _meet(self, call: Call, status: int | None) -> None:
        self._sequence = call.sequence
        flags = self._compare(call, status)
        if self._leads:
            self._flags[0] = self._greet(call, flags)[0]
        self._part(call)
        self._conclude(call, int(self._flags[0]))

    def _compare(self, call: Call, status: int | None) -> int:
        """Meet the ranks of this host; return what their first one has to say for them all.

        Args:
            call: This rank's.
            status: What came of this rank's arrival, if it has shown its call there; None if it has not.
        """
        agrees = True

        def compare() -> None:
            nonlocal agrees
            agrees = self._node.compare(call, status)

        self._within(call, compare)
        if not self._leads:
            return 0
        tails = [header[SEQUENCE_NBYTES:] for header in self._node.headers()]
        return self._flags_of(call, self._here, tails) | (0 if agrees else DIFFERS)

    def _run_small(self, call: Call, status: int | None = None) -> None:
        """Sum, or collect, within the host; exchange that with the other hosts; share the result within the host."""
        source, out, table = call.source, call.out, call.geometry
        assert source is not None
        assert out is not None
        self._sequence = call.sequence
        flags = self._compare(call, status)
        counts = (call.numel,) if table is None or table.reduces else tuple(count for _, count in table.takes)
        raw = self._notes[8 * _NOTE_WORDS :]
        # An array that a host holds once is written by one rank: when a late one came, its owner might be changing it.
        result = out if (table is None or table.alike) and self._node.one_out() else None
        whole = raw[: sum(counts) * out.itemsize].view(out.dtype) if result is None else result
        if self._leads:
            self._flags[0] = self._lead(call, flags, counts, whole)
        self._part(call)
        self._conclude(call, int(self._flags[0]))
        if result is None and out.size:
            first = table.takes[self.rank][0] if table is not None and table.reduces else 0
            np.copyto(out, whole[first : first + out.size])

    def _lead(self, call: Call, flags: int, counts: Sequence[int], whole: Array) -> int:
        """Return the flags of all hosts; ``whole`` is then the sum over them, or all their shards side by side."""
        assert self._greeter is not None
        assert call.source is not None
        if self.small.cuts(call):
            return self._cut_sum(call, flags, whole, lambda part, at: self._node.reduce_sources(call, part, first=at))
        reduces = call.geometry is None or call.geometry.reduces
        width = call.source.itemsize
        shares = [sum(counts[rank] for rank in ranks) for ranks in self.topology.members] if not reduces else [*counts]
        mine = self._greeter.data((shares[0] if reduces else shares[self._host]) * width).view(whole.dtype)
        if not flags & DIFFERS:
            if reduces:
                self._node.reduce_sources(call, mine, first=0)
            else:
                for local, part in enumerate(_cut(mine, [counts[rank] for rank in self._here])):
                    self._node.copy_source(local, part)
        flags, told = self._greet(call, flags, mine.nbytes, max(shares) * width)
        if flags & DIFFERS:
            return flags
        trace.count("wire.bytes", mine.nbytes * (len(self.topology.members) - 1))
        if reduces:
            if whole.size:
                native.reduce_into(whole, [row[: whole.nbytes].view(whole.dtype) for row in told], call.reduction)
            return flags
        places = geometry.starts(counts)
        for ranks, row in zip(self.topology.members, told, strict=True):
            shards = _cut(row.view(whole.dtype), [counts[rank] for rank in ranks])
            for rank, shard in zip(ranks, shards, strict=True):
                whole[places[rank] :][: shard.size] = shard
        return flags

    # -- shortcuts -------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Do one collective: by its shortcut, if it has one, else step by step."""
        with taken_back_if_left(call):
            if not self._take_shortcut(call):
                super().run(call)

    def shortcut(self, call: Call) -> Any:
        """Return the native form of a call that takes one exchange, or of the meeting before a larger one."""
        number, post = self.places.number_of(call.tail()), self._exchange.wire.post
        is_small = self.small.has(call)
        if post is None or (call.make is not None and not is_small):  # whose result lies elsewhere each time
            return False
        place = self._node.shortcut_place(call, in_windows=is_small and not self._node.reads_in_place)
        if place is None:
            return False
        tails = self.places.tails(number)
        if tails is None:  # calls differed when it was made first
            return None
        is_cut = is_small and self.small.cuts(call)
        nbytes, most, wire_nbytes, plan = 0, 0, 0, None
        if self._greeter is not None:
            if is_small:
                nbytes, most, wire_nbytes = self.small.sizes(call, self._host)
            plan = self._greeter.plan(post, call, nbytes, most, places=number)
        native_call = make_native(
            **place,
            call=call,
            rank=self.rank,
            members=self.topology.members,
            host=self._host,
            notes=self._notes,
            tails=[tails[rank] for rank in self._here],
            places=number,
            plan=plan,
            moves=is_small,
            is_cut=is_cut,
            wire_seconds=call.nbytes / self.network.bandwidth,
            busy=self._exchange.busy_for,
            ahead=None if is_small else self._ahead(call),
        )
        return HostsShortcut(
            self,
            native_call,
            tail=call.tail(),
            places=number,
            wire_nbytes=wire_nbytes,
            completes=is_small or call.op == "barrier",
        )

    def _throws_away(self) -> bool:
        """Say yes over sockets; MPI would keep it for ever."""
        return self._exchange.wire.sockets is not None

    def resume(self, call: Call, progress: int) -> None:
        """Go on where a shortcut stopped: someone is late, calls differ, it is time to look for alarms, or to move."""
        stage, status = progress - progress % 8, progress % 8
        self._sequence = call.sequence
        is_small = self.small.has(call)
        with taken_back_if_left(call):
            if stage == MEETING and is_small:
                self._run_small(call, status)
            elif stage == MEETING:
                self._meet(call, status)
            elif stage != SERVING:
                self._finish(call, stage, status)
            if not is_small:
                self._serve(call)

    def _finish(self, call: Call, stage: int, status: int) -> None:
        """Finish what a shortcut has begun, after its ranks met."""
        assert self.begun is not None
        begun = self.begun.native
        if stage == GREETING:
            self._finish_greeting(call, begun)
        if stage in (GREETING, LISTENING):
            self._heed_alarms(call)
            self._part(call)
        elif stage == PARTING:
            self._within(call, lambda: self._node.finish_barrier(call, status))
        self._conclude(call, begun.flags())
        begun.deliver()

    def _finish_greeting(self, call: Call, begun: Any) -> None:
        """Wait for greetings that a shortcut has sent, and for those that come."""
        try:
            while True:
                self._exchange.await_greeting(begun, self._greeter, self._notes, sequence=call.sequence)
                if begun.hear():
                    return
        except Interrupted:
            self._give_up(call)

    # -- what a host's ranks do together ---------------------------------------------------------------------------

    def _part(self, call: Call) -> None:
        self._within(call, lambda: self._node.end_barrier(call))

    def announce_failure(self, why: str) -> None:
        """Tell both this host's ranks and the others."""
        self._node.announce_failure(why)
        super().announce_failure(why)

    def peer_failure(self) -> Trouble | None:
        """Say what is known of all ranks, or at least of this host's: a killed one sounds no alarm."""
        return super().peer_failure() or self._node.peer_failure(self._here)

    def _give_up(self, call: Call) -> NoReturn:
        """Break this host's meeting place, too: ranks that talk to no other host wait there."""
        self._node.announce_failure("")
        super()._give_up(call)

    def _within(self, call: Call, step: Callable[[], None]) -> None:
        """Do a step among this host's ranks; if one is missing there, it is missing for all hosts."""
        try:
            step()
        except CollectiveError:
            self._give_up(call)

    # -- moving ----------------------------------------------------------------------------------------------------

    def _make_topology(self, hosts: list[int]) -> Topology:
        return Topology(hosts)

    def _side(self, call: Call, source: Array, out: Array) -> HostSide:
        if self._node.size == 1:
            return super()._side(call, source, out)
        return SharedHost(
            call,
            source,
            out,
            node=self._node,
            topology=self.topology,
            rank=self.rank,
            landing=self._landing,
            part=lambda: self._part(call),
        )

    # -- memory, parts, end ----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Array:
        """Return memory that this host's ranks can read."""
        return self._on_every_host(lambda: self._node.allocate(nbytes))

    def allocate_shared(self, nbytes: int) -> Array:
        """Return memory that is one and the same for this host's ranks."""
        return self._on_every_host(lambda: self._node.allocate_shared(nbytes))

    def _on_every_host(self, make: Callable[[], Array]) -> Array:
        made, story = None, ""
        try:
            made = make()
        except SharedMemoryError as error:
            story = f"{error} (rank {self.rank})"
        except CollectiveError:  # a rank of this host is missing: the other hosts wait for none of them
            self._give_up(Call(op="allocate", site=call_site(), sequence=self._sequence))
        except BaseException as error:
            self.announce_failure(f"{type(error).__name__}: {error}")
            raise
        for text in self.exchange_texts(story):
            if text:
                raise SharedMemoryError(text)
        assert made is not None
        return made

    def window_of(self, array: Array) -> int:
        """Return the number of the window; hosts make theirs together and so number them alike."""
        return self._node.window_of(array)

    def release(self, array: Array) -> None:
        """Forget memory that this host's ranks share."""
        self._node.release(array)

    def split(self, color: int | None, *, key: int, name: str) -> Transport | None:
        """Split the communicator; the part reaches its ranks in the way that is best for where they are."""
        part = self.split_comm(color, key)
        if part is None:
            return None
        try:
            return self._open_part(part, name=name, options=self.options)
        finally:
            part.Free()

    def share_standing(self, standing: Standing) -> None:
        """Tell the same here and there."""
        super().share_standing(standing)
        self._node.share_standing(standing)

    def leave(self) -> None:
        """Tell both the ranks of this host and those of others."""
        self._node.leave()
        super().leave()

    def all_leave(self, *, within: float) -> bool:
        """Leave both, and say whether the ranks of this host do."""
        super().leave()  # not the node's: whoever has left there must have said with whom
        return self._node.all_leave(within=within)

    def end(self) -> None:
        """Leave both."""
        super().end()
        self._node.end()

    def close(self) -> None:
        """Close both."""
        self._node.in_use = self.in_use
        self._node.close()
        super().close()

    def details(self) -> str:
        """Say how the hosts hang together."""
        members = self.topology.members
        hosts = f"{len(members)} hosts of {'+'.join(str(len(ranks)) for ranks in members)} ranks"
        return f"{hosts}; {self._node.details()}; {super().details()}"


def _cut(array: Array, counts: Sequence[int]) -> Iterator[Array]:
    """Yield pieces of an array, one after the other."""
    first = 0
    for count in counts:
        yield array[first : first + count]
        first += count
