"""`Transport`: what a group needs to be able to do between its ranks, and nothing of how users call it.

    meet              wait for every rank's call; raise the same error everywhere if they differ
    move              serve a Geometry: take from every rank what the table says
    exchange_texts    exchange short texts: names of windows, stories of errors
    announce_failure  tell whoever waits that this rank failed, and why

`zerort.comm.Group` checks arguments and keeps order; a transport only ever sees calls that make sense on this rank, one
at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from zerort import trace
from zerort.comm.arrays import DeviceArrays
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import (
    Sighting,
    Trouble,
    failed_error,
    mismatch_error,
    missing_error,
    tell_story,
    why_failed,
)
from zerort.config import GroupOptions
from zerort.device import HostDevice, HostStream
from zerort.errors import CollectiveError
from zerort.trace import FlightRecorder
from zerort.typing import Array, Device

if TYPE_CHECKING:
    from zerort.device.cuda.stream import CudaStream

__all__ = ["DONE", "STALE", "Transport"]

DONE, STALE = 0, 1
"""What a shortcut's ``run`` returns when the call is done; and when nothing was, for the call must be checked anew."""


class Transport(abc.ABC):
    """How the ranks of one group reach each other.

    Args:
        rank: This rank, 0 ≤ rank < size.
        size: Ranks in the group.
        name: What the group is called in errors and traces.
        options: Timeouts and sizes.
    """

    kind: ClassVar[str]
    runs_on: Literal["any thread", "own thread", "caller"] = "any thread"
    """Which thread may call the transport: any, one at a time; the group's own only; or only the one that opened it."""
    one_memory: ClassVar[bool] = False
    """Whether all ranks share memory: what `allocate_shared` returns is then one array for the whole group."""
    reads_in_place: bool = False
    """Whether any memory of a rank is read where it lies, on all ranks alike: what `allocate` returns gains little."""
    prefers_equal_counts: ClassVar[bool] = False
    """Whether shards of one length travel in one call, and others in one for each rank."""

    def __init__(self, rank: int, size: int, *, name: str, options: GroupOptions) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.options = options
        self.eager_nbytes = options.eager_nbytes
        """Calls up to this size are done soon enough for the thread that makes them."""
        self.device: Device = HostDevice()
        """Whose memory `allocate` returns."""
        self.device_arrays: DeviceArrays | None = None
        self.serves = ""
        self.standing = Standing()
        """How far this rank has come: told to the others when it leaves."""
        self.flights = FlightRecorder(options.flight_length)
        self.broken: CollectiveError | None = None
        self.ending = False
        self.in_use = False
        """Whether a thread is still at a call when the group closes: memory that it may touch then goes with it."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, as far as this can tell: nothing travels between hosts."""
        return self.one_memory

    @property
    def memories(self) -> tuple[int, ...]:
        """For each rank, a number of the memory that it shares with those of the same number; alike on every rank."""
        return (0,) * self.size if self.one_memory else tuple(range(self.size))

    @property
    def title(self) -> str:
        """What errors call this group."""
        kind = f"{self.serves} over {self.kind}" if self.serves else self.kind
        return f"group {self.name!r} ({kind}, {self.size} ranks)"

    def open_stream(self) -> HostStream | CudaStream:
        """Return the stream on which the group's calls keep their order."""
        return HostStream(f"comm {self.name}", helping=self.runs_on == "any thread")

    def run(self, call: Call) -> None:
        """Do one collective: all of it, on this thread."""
        if not trace.is_enabled():
            self.meet(call)
            self._serve(call)
            return
        # Apart in a trace, for a rank that comes late looks like slow memory otherwise.
        track = f"comm {self.name}"
        with trace.span("meet", track=track, sequence=call.sequence):
            self.meet(call)
        with trace.span("move", track=track, nbytes=call.nbytes):
            self._serve(call)

    def _serve(self, call: Call) -> None:
        if call.op == "all_reduce":
            self.all_reduce(call)
        elif call.geometry is not None:
            self.move(call)

    def shortcut(self, call: Call) -> Any:
        """Return a faster way to make this very call again; False if there is none, None if there is none yet.

        Its ``run(sequence, source, out)`` returns `DONE`, `STALE`, or how far it came, for `resume`. For a call without
        an out its ``run_new(sequence, source)`` returns the result, `STALE`, or how far it came with the array for it.
        """
        return False

    def _take_shortcut(self, call: Call) -> bool:
        """Make a call by its shortcut; False if it has none, or none that is of use now: then nothing was done."""
        progress = STALE
        if call.shortcut is not None and not trace.is_enabled():
            progress = call.shortcut.run(call.sequence, call.source, call.out)
        if progress == STALE:
            call.shortcut = None
            return False
        if progress != DONE:
            self.resume(call, progress)
        return True

    def resume(self, call: Call, progress: int) -> None:
        """Finish a call that a shortcut has begun."""
        raise NotImplementedError(f"{type(self).__name__} has no shortcuts.")

    @abc.abstractmethod
    def meet(self, call: Call) -> None:
        """Wait for every rank's call; return when all agree on it.

        Raises:
            CallError: A rank's arguments cannot be used. The same text on every rank.
            CollectiveMismatchError: Ranks came with different calls. The same text on every rank.
            CollectiveTimeoutError: A rank did not come in time.
            RankFailedError: A rank has left.
        """

    @abc.abstractmethod
    def move(self, call: Call) -> None:
        """Serve ``call.geometry`` and return when this rank's arrays may be used again."""

    @abc.abstractmethod
    def all_reduce(self, call: Call) -> None:
        """Reduce every rank's source, in rank order, into every rank's out."""

    @abc.abstractmethod
    def exchange_texts(self, text: str) -> list[str]:
        """Give ``text`` to every rank and return what each of them gave. For what happens rarely."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """Return ``nbytes`` of this rank's own, as near to the other ranks as memory gets. 1-D, uint8, zeroed."""

    @abc.abstractmethod
    def allocate_shared(self, nbytes: int) -> Array:
        """Return ``nbytes`` that are one and the same memory for all ranks of a node. 1-D, uint8, zeroed."""

    @abc.abstractmethod
    def split(self, color: int | None, *, key: int, name: str) -> Transport | None:
        """Return the transport among the ranks with the same color, ordered by key; None for color None."""

    def share_standing(self, standing: Standing) -> None:
        """Tell the others a larger group's `Standing` when this rank leaves: this one is a part of that group."""
        self.standing = standing

    def release(self, array: Array) -> None:  # noqa: B027 (plain memory needs no releasing)
        """Forget memory that `allocate` gave."""

    def leave(self) -> None:  # noqa: B027 (most transports have nobody to tell)
        """Tell the other ranks that this one takes part no longer. Never waits, never raises."""

    def all_leave(self, *, within: float) -> bool:
        """Leave, and say whether every rank of this node does so within some seconds; if one says no, all do."""
        self.leave()
        return self.size == 1  # a transport that cannot tell says no

    def end(self) -> None:
        """Leave, because the process ends: a thread that still waits for other ranks stops waiting."""
        self.leave()
        self.ending = True

    def close(self) -> None:
        """Give back what the transport holds."""
        self.leave()

    def details(self) -> str:
        """Say what a person would want to know of this transport beyond its kind."""
        return ""

    def fail(self, call: Call, error: BaseException) -> None:
        """Break the group because of an error that only this rank knows of, and tell the others why."""
        self.broken = failed_error(self.title, rank=self.rank, why=why_failed(call, error))
        self.announce_failure(why_failed(call, error))

    def announce_failure(self, why: str) -> None:  # noqa: B027 (a transport of one has nobody to tell)
        """Tell whoever waits, or will wait, for this rank that it failed, and why. Never waits, never raises."""

    def peer_failure(self) -> Trouble | None:
        """Say, without waiting, what another rank is known to suffer from; None if nothing. Any thread may ask."""
        return None

    def window_of(self, array: Array) -> int:
        """Return which of the group's windows ``array`` lies in, by a number that is the same on every rank.

        Raises:
            CallError: It lies in none.
        """
        return 0

    def facts(self, call: Call) -> dict[str, Any]:
        """Return what every error about a missing rank says, and keep the flight record that it names."""
        record = self.flights.dump(self.options.flight_dir, rank=self.rank, reason="a rank is missing")
        return {"group": self.title, "call": call, "waited": self.options.timeout, "record": record}

    def missing(self, call: Call, sightings: Sequence[Sighting]) -> CollectiveError:
        """Return the error about ranks that did not come."""
        return missing_error(**self.facts(call), sightings=sightings, updates=self.standing.updates)

    def disagree(self, call: Call) -> CollectiveError | Exception:
        """Find out what every rank came with and return the error that says so."""
        return mismatch_error(self.title, self.exchange_texts(tell_story(call)))
