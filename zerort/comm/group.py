"""`Group`: a communicator (process group). The one class that users hold, whatever carries its bytes.

    all_gather  reduce_scatter  all_reduce  broadcast  reduce  all_to_all  barrier    each returns a Ticket
    zeros  zeros_shared  free  split  save_trace  close                               each has happened when it returns

A `Launcher` checks arguments, numbers the calls and keeps them in order on one stream; a `Transport` carries them out.
A rank whose arguments are wrong still meets the others, so that all of them raise (decisions 0002, 0003, 0012).
"""

# not-gpu: what a group over GPUs waits for is said where it is called
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from zerort import forks, trace
from zerort.comm import ending
from zerort.comm.collectives import Collectives
from zerort.comm.guard import checks
from zerort.comm.guard.call import Call, call_site
from zerort.comm.guard.checks import Given
from zerort.comm.guard.differing import Differences
from zerort.comm.guard.standing import Standing
from zerort.comm.launch import Fill, Launcher
from zerort.comm.transport import Transport
from zerort.device import Ticket
from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, Device, DtypeLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Group", "SharedShards"]

_TOLD_PARTS = 32
"""Groups that were split from one and are told of where ranks differ: texts have an end."""

T = TypeVar("T")

_NOTHING = Given(None, None)


class SharedShards(NamedTuple):
    """An array whose shards lie side by side in memory that the ranks of a node share."""

    full: Array
    """The gathered array: 1-D, one copy per node. Valid after an `all_gather` of ``mine`` into it."""
    mine: Array
    """This rank's shard: a view of ``full``. Only this rank writes to it."""


class Group(Collectives):
    """Ranks that talk. Made by `zerort.comm.open_group` and `Group.split`.

    Every rank makes the same calls in the same order, from one thread at a time. A small call waits for the other ranks
    then and there (`GroupOptions.eager_nbytes`), so ranks must take several groups in the same order, too.

    Arrays are C-contiguous and are taken as 1-D: NumPy's, or CuPy's as well if the group is NCCL's. A verb that returns
    a Ticket may not have happened yet: leave its arrays alone until ``ticket.wait()`` has returned. Tensors of the host
    are taken as they lie, without a copy, once their framework's binding is imported (``zerort_torch``): a result is
    ``out`` itself if it was given, or else a new tensor.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._options = transport.options
        self._calls = Launcher(transport)
        self._closed = False
        self._parent: Group | None = None
        self._children: list[Group] = []
        self._splits = 0
        self._part = ""  # of its parent: the same text on all ranks of this group, and of no other
        ending.add(transport)
        forks.follow(self)

    # -- who is here -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._transport.size

    @property
    def kind(self) -> str:
        """What carries the bytes: solo, threads, node, mpi, hierarchical or nccl."""
        return self._transport.kind

    @property
    def one_memory(self) -> bool:
        """Whether all ranks share memory, so that the group as a whole holds a `zeros_shared` array once."""
        return self._transport.one_memory

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host: they share its memory, though not that of their GPUs."""
        return self._transport.one_host

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank, a number of the memory that it shares with those of the same number: not of its machine.

        Ranks over plain MPI, and those on GPUs, have one each; `one_host` is about machines.
        """
        return self._transport.memories

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read a rank's ordinary arrays where they lie, without a staging copy."""
        return self._transport.reads_in_place

    @property
    def prefers_equal_counts(self) -> bool:
        """Whether shards of one length travel in one call, and others in one for each rank: NCCL's do."""
        return self._transport.prefers_equal_counts

    @property
    def runs_ahead(self) -> bool:
        """Whether calls travel while the caller computes on. Not if only the thread that opened the group may call."""
        return self._transport.runs_on != "caller"

    @property
    def device(self) -> Device:
        """Whose memory `zeros` and `zeros_shared` return, and whose arrays collectives are made for."""
        return self._transport.device

    def after(self, ticket: Ticket[Any]) -> None:
        """Make the calls that are made from now on wait for ``ticket``; the caller does not."""
        self._calls.after(ticket)

    @property
    def differences(self) -> Differences:
        """What becomes of calls that differ between ranks: they are a mismatch, unless a caller says otherwise here."""
        return self._calls.differences

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for the others before the group breaks."""
        return self._options.timeout

    @property
    def name(self) -> str:
        """What the group is called in errors and traces."""
        return self._transport.name

    @property
    def standing(self) -> Standing:
        """How far this rank has come; the others hear of it when it leaves."""
        return self._transport.standing

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def made(self) -> int:
        """How many calls this rank has made in the group, or queued: where all ranks are alike, the same on each."""
        return self._calls.made

    # -- ranks that cannot make a call -----------------------------------------------------------------------------

    def complain(self, text: str, *, wait: bool = True, part: Group | None = None) -> None:
        """Meet the other ranks with a complaint instead of a call: each of them raises `CallError` with ``text``.

        For a rank that cannot make the call that the others make, or are about to: it must not leave them waiting.

        Args:
            text: Why.
            wait: Whether to return only when the others have come. False needs a group that `runs_ahead`.
            part: A group that was split from this one, in which others may have made calls that this rank will not
                make any more: as many as it lacks are met with the complaint, too (decision 0198).
        """

        def fill(call: Call, rank: int, size: int, given: Given) -> None:
            raise CallError(text)

        ticket = self._calls.launch("complaint", fill, "", eager=wait)
        if not wait:
            self.disregard(ticket)
            return
        try:
            ticket.wait()
        except CallError as met:
            if part is not None and part.runs_ahead:  # else nothing is under way there
                most = max((made.get(part._part, 0) for made in met.parts), default=0)
                for _ in range(most - part.made):
                    part.complain(text, wait=False)

    def disregard(self, ticket: Ticket[Any]) -> None:
        """Wait no more for a call of this group: whatever becomes of it, the caller has been told of worse."""
        self._calls.disregard(ticket)

    def give_up(self, op: str, error: BaseException) -> None:
        """Break the group because this rank left ``op`` in its middle, and tell the others why. Never waits."""
        if not self._closed and self._transport.broken is None:
            self._transport.fail(Call(op, call_site()), error)

    # -- memory, parts, end ----------------------------------------------------------------------------------------

    def zeros(self, numel: int, dtype: DtypeLike, *, name: str = "") -> Array:
        """Return a zeroed 1-D array of this rank's own that the other ranks of its node can read where it lies.

        Collectives over such arrays move nothing that need not move. Every rank calls this; ``numel`` may differ. The
        memory goes when the last array in it does, after `free` or `close`.

        Raises:
            SharedMemoryError: There is not enough shared memory; on every rank.
        """

        def fill(call: Call, rank: int, size: int, given: Given) -> None:
            call.dtype = checks.check_dtype(call, dtype).name
            checks.check_numel(call, numel)

        def make() -> Array:
            kind = numpy_dtype(dtype)
            return self._transport.allocate(numel * kind.itemsize).view(kind)

        return self._together("zeros", name, fill, make)

    def zeros_shared(self, counts: Sequence[int], dtype: DtypeLike, *, name: str = "") -> SharedShards:
        """Return an array of ``sum(counts)`` elements that the ranks of a node hold once, and this rank's shard of it.

        ``group.all_gather(shards.mine, out=shards.full, counts=counts)`` makes every shard visible and copies nothing
        within a node. Zeroed.
        """
        shares: list[int] = []

        def fill(call: Call, rank: int, size: int, given: Given) -> None:
            call.dtype = checks.check_dtype(call, dtype).name
            shares.extend(checks.check_counts(call, counts, size))
            call.numel = sum(shares)

        def make() -> SharedShards:
            kind = numpy_dtype(dtype)
            full = self._transport.allocate_shared(sum(shares) * kind.itemsize).view(kind)
            first = sum(shares[: self.rank])
            return SharedShards(full, full[first : first + shares[self.rank]])

        return self._together("zeros_shared", name, fill, make)

    def free(self, array: Array, *, name: str = "") -> None:
        """Give the memory of an array from `zeros` or `zeros_shared` back. Every rank calls this for its array."""

        def fill(call: Call, rank: int, size: int, given: Given) -> None:
            call.numel = self._transport.window_of(array)  # all ranks must mean the same one

        self._together("free", name, fill, lambda: self._transport.release(array))

    def release_local(self, array: Array) -> None:
        """Give memory back as `free` does, but without meeting the others: for an owner that closes, come what may.

        Each rank does so when it likes, after its last call over the array. An array from elsewhere is left alone. That
        of a broken group goes when it is closed: a call that nobody could wait for may still be at it.
        """
        if not self._closed and self._transport.broken is None:
            with contextlib.suppress(CallError):
                self._transport.release(array)

    def split(self, color: int | None, *, key: int | None = None, name: str = "") -> Group | None:
        """Return the group of the ranks that gave the same ``color``, ordered by ``key``, then by rank.

        Args:
            color: Which group to be in; None for none of them.
            key: Where in it; this rank's number if None.
            name: What to call it; derived from this group's name and the color if empty.
        """
        title = name or f"{self.name}/{color}"
        place = self.rank if key is None else key
        transport = self._together(
            "split",
            "",
            checks.fill_split,
            lambda: self._transport.split(color, key=place, name=title),
            Given(color, place),
        )
        self._splits += 1
        if transport is None:
            return None
        transport.share_standing(self.standing)
        group = Group(transport)
        group._parent, group._part = self, f"{self._splits}:{color}"
        self._children.append(group)
        self._calls.tally = self._made_in_parts
        return group

    def _made_in_parts(self) -> dict[str, int]:
        """Return how many calls this rank has made in each group that was split from this one, of the latest few."""
        return {one._part: one.made for one in self._children[-_TOLD_PARTS:]}

    def save_trace(self, path: str | Path) -> Path | None:
        """Gather every rank's spans and counters and write one Chrome/Perfetto trace, on rank 0. Every rank calls this.

        Returns:
            The path, on rank 0; None elsewhere.
        """
        payload = json.dumps(trace.rank_events(self.rank, os.uname().nodename)).encode()
        sizes = self.all_gather(np.array([len(payload)]), name="trace sizes").wait()
        events = self.all_gather(
            np.frombuffer(payload, np.uint8), counts=[int(size) for size in sizes], name="trace"
        ).wait()
        if self.rank:
            return None
        ends = np.cumsum(sizes)
        payloads = [json.loads(events[end - size : end].tobytes()) for end, size in zip(ends, sizes, strict=True)]
        trace.write_chrome(path, payloads)
        return Path(path)

    def flight_record(self, directory: str | Path | None = None) -> Path | None:
        """Write the last calls of this rank as JSON and return where."""
        where = self._options.flight_dir if directory is None else directory
        return self._transport.flights.dump(where, rank=self.rank, reason="asked for")

    def close(self) -> None:
        """Finish what was submitted and leave the group. Closing twice is fine; other ranks need not close at once."""
        if self._closed:
            return
        self._closed = True
        ending.remove(self._transport)
        if self._parent is not None:
            self._parent._children.remove(self)
        with contextlib.ExitStack() as last_first:  # all of them, whatever one raises
            last_first.callback(self._transport.close)
            last_first.callback(self._calls.close)
            for child in reversed(self._children):
                last_first.callback(child.close)

    def disown(self) -> None:
        """In a forked child, which has no place among these ranks: be closed, without leaving in its parent's name."""
        self._closed = True
        self._calls = _Inherited(self.name)  # type: ignore[assignment]
        ending.discard(self._transport)

    def _together(self, op: str, name: str, fill: Fill, make: Callable[[], T], given: Given = _NOTHING) -> T:
        return self._calls.together(op, name, fill, make, given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.standing.take_exit(error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._transport.broken is not None else "open"
        details = self._transport.details()
        about = f"{self.name!r}, {self.kind}, rank {self.rank} of {self.size}, {state}"
        return f"Group({about}; {details})" if details else f"Group({about})"


class _Inherited:
    """The calls of a group that is a parent's: all of them raise."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, verb: str) -> Any:
        def refuse(*args: object, **options: object) -> None:
            raise forks.inherited(f"group {self._name!r}")

        return refuse
