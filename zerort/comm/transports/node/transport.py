"""Ranks of one machine over shared memory: nothing moves that need not, and no MPI is on the hot path.

[Note: where an array lies]
An array from `Group.zeros` lies in a window that every rank has mapped: the others read it where it is. A small array
of the user's own is copied into this rank's staging slab first; a large one is read in place with process_vm_readv or,
where the kernel forbids that, goes through the slabs in rounds (decision 0006). Each rank says where its arrays lie
when it meets the others, so ranks may mix. If every rank names the *same* memory as its out, the gathered form is that
memory, once per node, and a gather is only the meeting.
"""

# not-gpu: between processes of the host
from __future__ import annotations

import time
from typing import Any

from zerort import native
from zerort.comm.geometry import even_part
from zerort.comm.guard.call import Call
from zerort.comm.neighbours import can_read_each_other
from zerort.comm.transports.node.meeting import LOOK_AFTER, NodeMeeting, open_control
from zerort.comm.transports.node.memory import STAGING, NodeMemory
from zerort.comm.transports.node.rounds import all_reduce_in_rounds, move_in_rounds
from zerort.comm.transports.node.shortcut import Place, make_shortcut
from zerort.comm.transports.node.split import split_node
from zerort.config import GroupOptions
from zerort.errors import CollectiveError
from zerort.native.dtypes import DTYPE_CODES, REDUCTION_CODES
from zerort.native.rendezvous import DISAGREE, MEETING, MET, PARTING, PRIVATE, disallow_reading
from zerort.typing import Array

__all__ = ["NodeTransport"]

_STAGE_NBYTES = 64 * 1024
"""Arrays of a rank's own up to this size are staged even where others could read them: cheaper than a system call."""

_CROWD_NBYTES = 64 * 1024
"""Arrays in windows up to this size are staged where ranks share cores: cheaper than the parting that a staged array
does not need, for which every rank must get its turn on a core."""

_WHOLE_NBYTES = 64 * 1024
"""All-reduces up to this size are summed whole by every rank: cheaper than a second meeting."""


class NodeTransport(NodeMeeting):
    """One rank's side of a rendezvous in shared memory.

    Args:
        control: Path of the file that `open_control` made.
        in_native: Use the native rendezvous. The same on all ranks.
        sees_processes: The ranks see each other's processes: then one that is not there has died. The same on all.
        named: Shared memory has a name until all have mapped it: they may not open each other's. The same on all.
        crowded: Ranks share cores (`zerort.comm.neighbours.share_cores`); None guesses from this rank's own cores.
        abroad: Its ranks are part of a group over several hosts.
    """

    kind = "node"
    one_memory = True

    def __init__(
        self,
        control: str,
        rank: int,
        size: int,
        *,
        name: str,
        options: GroupOptions,
        in_native: bool,
        sees_processes: bool,
        named: bool = False,
        crowded: bool | None = None,
        abroad: bool = False,
    ) -> None:
        super().__init__(
            control,
            rank,
            size,
            name=name,
            options=options,
            in_native=in_native,
            sees_processes=sees_processes,
            crowded=crowded,
            abroad=abroad,
        )
        self._named = named
        self.memory = NodeMemory(rank, size, options=options, link=self._link, tell=self.exchange_texts, named=named)
        self._crowd_up_to = min(_CROWD_NBYTES, self.memory.slab_nbytes) if self._crowded else 0
        self._stage_up_to = 0
        self.reads_in_place = False

    def start(self) -> None:
        """Meet the others for the first time: make the slabs, and find out whether memory can be read in place."""
        self.memory.start()
        self.reads_in_place = can_read_each_other(
            self.exchange_texts, wanted=self._in_native and self.options.cross_memory
        )
        slab = self.memory.slab_nbytes
        self._stage_up_to = min(_STAGE_NBYTES, slab) if self.reads_in_place else slab

    # -- the whole of a call ---------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Do one collective: by its shortcut, if it has one, else step by step."""
        if not self._take_shortcut(call):
            super().run(call)

    def shortcut(self, call: Call) -> Any:
        """Return the native form of a call that the ranks can serve out of windows."""
        place = self.shortcut_place(call)
        if place is None:
            return False
        return make_shortcut(**place, call=call, rank=self.rank, size=self.size, whole_nbytes=_WHOLE_NBYTES)

    def shortcut_place(self, call: Call, *, in_windows: bool = True) -> dict[str, Any] | None:
        """Return where a native form of ``call`` meets, and finds its arrays, by name; None if there can be none.

        Args:
            call: A call that was checked.
            in_windows: Whether sources have to lie in windows, or be staged.
        """
        places = self.memory.places_of(call)
        source = self._source_place(call, places)
        slab_nbytes = 0
        if source is None:
            source, slab_nbytes = (STAGING, self.memory.slab_offset()), self.memory.slab_nbytes
        if self._log is None or (in_windows and source[0] == PRIVATE):
            return None
        return {"link": self._link, "log": self._log, "source": source, "out": places[2:], "slab_nbytes": slab_nbytes}

    def resume(self, call: Call, progress: int) -> None:
        """Go on where a shortcut stopped: someone is late, calls differ, or memory is not in windows."""
        if progress >= PARTING:
            self._wait(call, progress - PARTING)
        else:
            self._agree(call, progress - MEETING)
            self._serve(call)

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, call: Call) -> None:
        """Say what this rank came for and where its arrays lie; wait for the others."""
        self._agree(call, self._show(call))

    def compare(self, call: Call, status: int | None = None) -> bool:
        """Do as `meet` does, but say whether all ranks here agree instead of raising what differs.

        Args:
            call: This rank's.
            status: What came of its arrival, if it has shown its call already.
        """
        if status is None:
            status = self._show(call)
        if status != MET:
            status = self._wait(call, status)
        return status != DISAGREE

    def _show(self, call: Call) -> int:
        places = self.memory.places_of(call)
        place = self._source_place(call, places)
        if place is None:
            assert call.source is not None
            place = self.memory.stage(call.source)
        status: int = self._link.meet(call.header(), *place, *places[2:], LOOK_AFTER)
        return status

    def _agree(self, call: Call, status: int) -> None:
        if status != MET:
            status = self._wait(call, status)
        if status == DISAGREE or call.complaint:
            raise self.disagree(call)

    def _source_place(self, call: Call, places: tuple[int, int, int, int]) -> Place | None:
        """Return where the others find this rank's source; None if it must be staged first."""
        window, offset, _, _ = places
        source = call.source
        if source is None or source.size == 0:
            return window, offset
        if call.op == "broadcast" and call.geometry is not None and not call.geometry.gives[0][1]:
            return STAGING, 0  # nobody reads it: root is another, by its number in the whole group
        if window == PRIVATE:
            return None if source.nbytes <= self._stage_up_to else (window, offset)
        staged = source.nbytes <= self._crowd_up_to and call.geometry is not None
        return None if staged and not self.memory.is_shared(window) else (window, offset)

    def _serve(self, call: Call) -> None:
        try:
            super()._serve(call)
        except CollectiveError:
            raise
        except RuntimeError as error:  # memory that cannot be read, it may be because its owner has gone
            until, dead = time.monotonic() + LOOK_AFTER, list[int]()
            while not dead and time.monotonic() < until:  # one that is killed loses its memory first
                dead = [rank for rank, slot in enumerate(self._slots()) if slot.died]
            if not dead:
                raise
            raise self._give_up(call, dead=dead) from error

    # -- moving ----------------------------------------------------------------------------------------------------

    def move(self, call: Call) -> None:
        """Take from the other ranks' memory what the geometry says."""
        table, out = call.geometry, call.out
        assert table is not None
        assert out is not None
        link = self._link
        if not self.sources_are_readable():
            move_in_rounds(self.memory, call, lambda: self.end_barrier(call))
            return
        width, address = out.itemsize, call.out_address
        one_out = table.alike and self.one_out()
        if table.reduces:
            first, count = table.takes[self.rank]
            if count:
                link.reduce_sources(address, DTYPE_CODES[call.dtype], REDUCTION_CODES[call.reduction], first, count)
        elif one_out:
            # Every rank writes its own part of the one gathered array; nothing at all if it already lies there.
            first, count = table.takes[self.rank]
            link.copy_from_source(self.rank, first * width, address + table.places[self.rank] * width, count * width)
        else:
            for step in range(self.size):
                rank = (self.rank + step) % self.size  # everybody starts at home: no two queue at one rank's memory
                first, count = table.takes[rank]
                if count:
                    to = address + table.places[rank] * width
                    link.copy_from_source(rank, first * width, to, count * width)
        if one_out or not self.sources_are_staged():
            self.end_barrier(call)

    def all_reduce(self, call: Call) -> None:
        """Reduce one's own part for everybody, in as few passes over memory as the arrays' places allow."""
        source, out, link = call.source, call.out, self._link
        assert source is not None
        assert out is not None
        dtype, reduction = DTYPE_CODES[call.dtype], REDUCTION_CODES[call.reduction]
        first, count = even_part(call.numel, self.size, self.rank)
        width, address = out.itemsize, call.out_address
        sources_in_windows = link.sources_in_windows()
        staged_whole = link.all_sources_in(STAGING) and out.nbytes <= _WHOLE_NBYTES
        if not (self.reads_in_place or staged_whole or (sources_in_windows and link.outs_in_windows())):
            all_reduce_in_rounds(self.memory, call, lambda: self.end_barrier(call))
            return
        if link.one_out():
            link.reduce_sources(address + first * width, dtype, reduction, first, count)
        elif sources_in_windows and link.outs_in_windows():
            link.reduce_into_all(dtype, reduction, first, count)
        elif staged_whole:
            link.reduce_sources(address, dtype, reduction, 0, call.numel)
            return
        else:
            link.reduce_sources(address + first * width, dtype, reduction, first, count)
            self.end_barrier(call)  # every rank's own part stands in its own out: the others fetch it there
            for step in range(1, self.size):
                rank = (self.rank + step) % self.size
                there, many = even_part(call.numel, self.size, rank)
                link.copy_from_out(rank, there * width, address + there * width, many * width)
        self.end_barrier(call)

    def one_out(self) -> bool:
        """Say whether every rank's out is one and the same memory."""
        return bool(self._link.one_out())

    def sources_are_readable(self) -> bool:
        """Say whether every rank can read every other's source where it lies."""
        return self.reads_in_place or bool(self._link.sources_in_windows())

    def sources_are_staged(self) -> bool:
        """Say whether all that the ranks read of each other are copies: then nobody need wait for the readers."""
        return bool(self._link.all_sources_in(STAGING))

    def outs_are_readable(self) -> bool:
        """Say whether every rank can read every other's out where it lies."""
        return self.reads_in_place or bool(self._link.outs_in_windows())

    def copy_from_out(self, rank: int, first: int, to: Array, nbytes: int) -> None:
        """Copy bytes of a rank's out, from ``first`` on, to where an array begins."""
        self._link.copy_from_out(rank, first, native.address_of(to), nbytes)

    def reduce_sources(self, call: Call, out: Array, *, first: int) -> None:
        """Reduce the elements from ``first`` on of every rank's source, in rank order, into all of ``out``."""
        if out.size:
            dtype, reduction = DTYPE_CODES[call.dtype], REDUCTION_CODES[call.reduction]
            self._link.reduce_sources(native.address_of(out), dtype, reduction, first, out.size)

    def copy_source(self, rank: int, out: Array) -> None:
        """Copy the first bytes of a rank's source into all of ``out``."""
        self._link.copy_from_source(rank, 0, native.address_of(out), out.nbytes)

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's segment of a new window."""
        return self.memory.allocate(nbytes)

    def allocate_shared(self, nbytes: int) -> Array:
        """Return the whole of a new window: one copy for the node."""
        return self.memory.allocate_shared(nbytes)

    def window_of(self, array: Array) -> int:
        """Return the number of the window in which ``array`` lies."""
        return self.memory.window_of(array)

    def release(self, array: Array) -> None:
        """Forget the window in which ``array`` lies."""
        self.memory.release(array)

    def split(self, color: int | None, *, key: int, name: str) -> NodeTransport | None:
        """Return the transport among this node's ranks of the same color."""
        return split_node(
            color,
            key=key,
            rank=self.rank,
            tell=self.exchange_texts,
            open_control=lambda size: open_control(size, self.options.shm_dir, named=self._named),
            make=lambda control, rank, size: NodeTransport(
                control,
                rank,
                size,
                name=name,
                options=self.options,
                in_native=self._in_native,
                sees_processes=self._sees_processes,
                named=self._named,
                crowded=self._crowded,  # the ranks of the other parts are still there
            ),
        )

    def close(self) -> None:
        """Leave, and let go of the windows; arrays in them, and a thread at work, keep theirs (decision 0183)."""
        self.leave()
        if not self.in_use:  # else they go with this object, which the thread at work holds
            self.memory.clear()
        if self.reads_in_place:
            self.reads_in_place = False
            disallow_reading()

    def details(self) -> str:
        """Say how the ranks reach each other's memory."""
        reads = "process_vm_readv" if self.reads_in_place else "staged"
        kernels = "native" if self._in_native else "NumPy"
        cores = ", cores shared" if self._crowded else ""
        return f"shared memory in {self.options.shm_dir}, own arrays {reads}, kernels {kernels}{cores}"
