"""Several ranks on each of several hosts: shared memory within a host, MPI between hosts, each byte over the wire once.

    reduce_scatter   sum within the host, out of its ranks' memory ── one partial per host pair ──> sum over hosts
    all_gather       write one's shard into the host's window ── each shard to each other host once ──> read the window

[Note: lanes]
A host's ranks share the work of talking to other hosts. With ``lanes`` = the fewest ranks on any host, the rank with
local number i serves lane i % lanes, and only the first ``lanes`` ranks of a host talk. A shard travels in the lane of
its owner.

[Note: rounds]
Arrays pass in pieces of one size, in step on both sides, whether they land in the window that the user holds or in
ours: a host need not know where the other's arrays lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from zerort import native
from zerort.comm import geometry
from zerort.comm.geometry import Geometry, split_evenly
from zerort.comm.guard.call import Call, call_site
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import Trouble
from zerort.comm.transport import Transport
from zerort.comm.transports.mpi import MpiTransport
from zerort.comm.transports.node.transport import NodeTransport
from zerort.config import GroupOptions
from zerort.errors import CollectiveError, SharedMemoryError
from zerort.typing import Array

__all__ = ["HierarchicalTransport"]


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
        super().__init__(comm, hosts=hosts, name=name, options=options)
        self._node = node
        self._open_part = open_part
        node.stand(self.standing)
        self._members = [[r for r in range(self.size) if hosts[r] == host] for host in dict.fromkeys(hosts)]
        self._host_of = [next(h for h, ranks in enumerate(self._members) if r in ranks) for r in range(self.size)]
        self._host = self._host_of[self.rank]
        self._lanes = min(len(ranks) for ranks in self._members)
        self._lane_of = [self._members[self._host_of[r]].index(r) % self._lanes for r in range(self.size)]
        local = self._members[self._host].index(self.rank)
        self._my_lane = local if local < self._lanes else None
        half = min(options.exchange_nbytes, options.staging_nbytes)
        # Where other hosts' pieces land, in two halves that take turns.
        self._landing = self._on_every_host(lambda: node.allocate_shared(2 * half))
        self._half = half
        self._turn = 0

    def _talker(self, host: int, rank: int) -> int:
        """Return the rank on ``host`` that serves the lane of ``rank``."""
        return self._members[host][self._lane_of[rank]]

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, call: Call) -> None:
        """Agree with everyone over MPI, then show the ranks of this host where the arrays lie."""
        super().meet(call)
        self._within(call, lambda: self._node.meet(call))

    def _part(self, call: Call) -> None:
        self._within(call, lambda: self._node.end_barrier(call))

    def announce_failure(self, why: str) -> None:
        """Tell both this host's ranks and the others."""
        self._node.announce_failure(why)
        super().announce_failure(why)

    def peer_failure(self) -> Trouble | None:
        """Say what is known of all ranks, or at least of this host's: a killed one sounds no alarm."""
        return super().peer_failure() or self._node.peer_failure(self._members[self._host])

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

    def move(self, call: Call) -> None:
        """Serve the geometry host by host; an all_to_all has nothing to share and goes straight."""
        table, source, out = call.geometry, call.source, call.out
        assert table is not None
        assert source is not None
        assert out is not None
        if table.reduces:
            self._scatter_by_host(table, out, call)
        elif table.alike:
            self._gather_by_host(table, source, out, call)
        else:
            self._copy(table, source, out, call)

    def all_reduce(self, call: Call) -> None:
        """Reduce one's own part, then gather all parts."""
        assert call.out is not None
        counts = split_evenly(call.numel, self.size)
        mine = np.empty(counts[self.rank], call.out.dtype)  # apart: an out may be another rank's source
        self._scatter_by_host(geometry.scatter(counts, self.rank), mine, call)
        self._gather_by_host(geometry.gather(counts, self.rank), mine, call.out, call)

    def _piece(self, itemsize: int) -> int:
        return self._half // (self.size * itemsize)

    def _gather_by_host(self, table: Geometry, source: Array, out: Array, call: Call) -> None:
        piece = self._piece(out.itemsize)
        whole = self._node.one_out()
        if whole:
            self._put(source, out[table.places[self.rank] :])
            self._part(call)
        for done in range(0, table.longest, piece):
            if whole:
                spots = {r: out[table.places[r] + done :] for r in range(self.size)}
            else:
                landing = self._next_landing(out.dtype)
                spots = {r: landing[r * piece :] for r in range(self.size)}
                many = min(piece, source.size - done)
                if many > 0:
                    spots[self.rank][:many] = source[done:][:many]
                self._part(call)
            pieces = {r: spots[r][: max(0, min(piece, table.takes[r][1] - done))] for r in range(self.size)}
            if self._my_lane is not None:
                lane = [r for r in range(self.size) if self._lane_of[r] == self._my_lane]
                at_home = [r for r in lane if self._host_of[r] == self._host]
                sends = [
                    (self._talker(host, r), pieces[r])
                    for host in range(len(self._members))
                    if host != self._host
                    for r in at_home
                ]
                receives = [
                    (self._talker(self._host_of[r], r), pieces[r]) for r in lane if self._host_of[r] != self._host
                ]
                self.swap(sends, receives, call)
            if not whole:
                self._part(call)
                for r, got in pieces.items():
                    out[table.places[r] + done :][: got.size] = got
        if whole:
            self._part(call)

    def _scatter_by_host(self, table: Geometry, out: Array, call: Call) -> None:
        piece = self._piece(out.itemsize)
        hosts = range(len(self._members))
        lane = [r for r in range(self.size) if self._my_lane is not None and self._lane_of[r] == self._my_lane]
        readable = self._node.sources_are_readable()
        if not readable:
            self._node.memory.start_rounds()
        for done in range(0, table.longest, piece):
            sizes = [max(0, min(piece, count - done)) for _, count in table.gives]
            starts = [first + done for first, _ in table.gives]
            partial = {r: np.empty(sizes[r], out.dtype) for r in lane}
            if readable:
                for r, array in partial.items():
                    self._node.reduce_sources(call, array, first=starts[r])
            else:
                self._sum_staged(partial, starts, sizes, piece, call)
            at_home = [r for r in lane if self._host_of[r] == self._host]
            away = [r for r in lane if self._host_of[r] != self._host]
            parts = {
                (r, host): partial[r] if host == self._host else np.empty(sizes[r], out.dtype)
                for r in at_home
                for host in hosts
            }
            self.swap(
                [(self._talker(self._host_of[r], r), partial[r]) for r in away],
                [(self._talker(host, r), array) for (r, host), array in parts.items() if host != self._host],
                call,
            )
            landing = self._next_landing(out.dtype)
            for r in at_home:
                if sizes[r]:
                    result = out[done:] if r == self.rank else landing[r * piece :]
                    native.reduce_into(result[: sizes[r]], [parts[r, host] for host in hosts], call.reduction)
            if len(self._members[self._host]) > self._lanes:  # ranks without a lane find their part in the window
                self._part(call)
                if self._my_lane is None and sizes[self.rank]:
                    out[done:][: sizes[self.rank]] = landing[self.rank * piece :][: sizes[self.rank]]
        if not self._node.sources_are_staged():
            self._part(call)

    def _sum_staged(
        self, partial: dict[int, Array], starts: list[int], sizes: list[int], piece: int, call: Call
    ) -> None:
        """Reduce this host's pieces through its ranks' staging slabs, where one rank cannot read another's memory."""
        assert call.source is not None
        slab = self._node.memory.next_slab(call.source.dtype)
        for r in range(self.size):
            slab[r * piece :][: sizes[r]] = call.source[starts[r] :][: sizes[r]]
        self._part(call)
        for r, array in partial.items():
            slabs = (self._node.memory.slab_of(local, array.dtype) for local in range(self._node.size))
            native.reduce_into(array, [one[r * piece :][: array.size] for one in slabs], call.reduction)

    def _put(self, source: Array, place: Array) -> None:
        if source.size and source.ctypes.data != place.ctypes.data:
            place[: source.size] = source

    def _next_landing(self, dtype: np.dtype[Any]) -> Array:
        self._turn ^= 1
        raw = self._landing[self._turn * self._half :][: self._half]
        return raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype)

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

    def stand(self, standing: Standing) -> None:
        """Tell the same here and there."""
        super().stand(standing)
        self._node.stand(standing)

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
        self._node.close()
        super().close()

    def details(self) -> str:
        """Say how the hosts hang together."""
        shape = "+".join(str(len(ranks)) for ranks in self._members)
        hosts = f"{len(self._members)} hosts of {shape} ranks, {self._lanes} lanes"
        return f"{hosts}; {self._node.details()}; {super().details()}"
