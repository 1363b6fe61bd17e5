"""`Staging`: arrays on their way between a host and a GPU, some chunks at a time, with computing in between.

    on="device"    copy in  0 | 1 | 2 |     | 3 …        what rests on the host passes through slots on the GPU
                   compute      0 | 1 | 2 |     | 3 …    and back; chunk 3 takes chunk 0's slot when that has left it
                   copy out         0 | 1 | 2 |     | 3 …

    on="host"      copy out 0 | 1 | 2 | 3 …              what rests on the GPU passes through slots on the host, pinned
                   the host     0 | 1 | 2 …              if they are given, and back
                   copy in          0 | 1 …

[Note: who waits] On the GPU everything waits by events: a copy for the slot, computing for the copies, copies back for
the computing. The host waits only to compute itself. A run begins after what its caller has put onto its own stream,
and what the caller puts there next comes after the run, as far as arrays on the GPU go. Arrays on the host are the
staging's until the Ticket of the run is done; another run of this staging may have them before.

On a `HostDevice` nothing moves. Why not the pipeline: decision 0047.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort.device import Done, HostDevice, Ticket, joined
from zerort.device.slots import Slot, Slots, cut_from
from zerort.errors import CallError, ClosedError
from zerort.storage.files.segments import round_up
from zerort.streaming.transfers import (
    ArrayTransfer,
    Place,
    check_apart,
    do_touch,
    lay_out,
    slot_nbytes_of,
    spans_on_host,
)
from zerort.typing import Array, Device, type_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Staging"]


@dataclass(frozen=True, slots=True)
class _Laid:
    """A chunk that has got its slot."""

    number: int
    slot: Slot
    arrays: list[Any]
    """For compute: those that rest where it computes, and for the others their places in the slot."""
    moves: list[tuple[ArrayTransfer, Any]]
    """The others, each with its place."""
    filled: list[Ticket[Any]]
    """What must have happened before it is computed."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A run on the device that may still have arrays to bring back."""

    ended: Ticket[Any]
    spans: list[tuple[int, int]]
    """Where they lie on the host."""


class Staging:
    """Brings arrays to where they are computed with, and back, through a few slots.

    Args:
        device: The GPU's, or a `HostDevice`, where nothing moves.
        slot_nbytes: Memory of one slot; `slot_nbytes_of` says what a chunk takes.
        depth: Slots, on either side; they are allocated when that side is first computed on.
        pinned: Host memory for slots there: 1-D, uint8, ``depth * slot_nbytes`` bytes or more, as a rule pinned. None
            takes pageable memory, from and to which copies are slow and hold up others.
        name: What it is called in errors and traces.
    """

    def __init__(
        self,
        device: Device,
        *,
        slot_nbytes: int,
        depth: int = 3,
        pinned: Array | None = None,
        name: str = "staging",
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise CallError(f"Expected a depth of at least 1, got {depth!r}.")
        room = round_up(slot_nbytes, ArrayTransfer.alignment)
        if pinned is not None and (pinned.dtype != np.uint8 or pinned.ndim != 1 or pinned.size < depth * room):
            raise CallError(
                f"Expected pinned memory as 1-D uint8 of at least {depth * room:,} bytes, {depth} slots of {room:,}, "
                f"got {pinned.dtype}{list(pinned.shape)}."
            )
        self.name = name
        self.depth = depth
        self.slot_nbytes = room
        self._device: Any = device
        self._pinned = pinned
        self._slots: dict[Place, Slots] = {}
        self._pending: collections.deque[Ticket[Any]] = collections.deque()
        self._runs: collections.deque[_Leaving] = collections.deque()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """The memory of the slots that exist, on both sides."""
        return sum(slots.nbytes for slots in self._slots.values())

    def run(
        self, chunks: Sequence[Sequence[ArrayTransfer]], compute: Callable[..., object], *, on: Place
    ) -> Ticket[list[Ticket[None]]]:
        """Bring every chunk to where it is computed with, compute, and bring back what was changed.

        Runs overlap as chunks do, unless one needs what another brings back to the host, or computes there.

        Args:
            chunks: What to compute with; what one writes, no other one touches.
            compute: Called as ``compute(number, array, array, …)`` with an array for each one of the chunk, in order,
                all of them on the device, or on the host. It changes them in place. On the device it queues kernels on
                the current stream, which is not the caller's, and as a rule is called on the caller's thread; on the
                host it always is.
            on: Where.

        Returns:
            A Ticket that is done when arrays on the host are the caller's again, with what was computed. Arrays on the
            device are, for whatever is put onto the current stream from now on. Its result, there at once, has such a
            Ticket for each chunk by itself.

        Raises:
            CallError: A chunk does not fit into a slot, touches what another one writes, or has foreign arrays.
            Exception: What compute raised. Nothing is under way any more; chunks before that one are computed and
                where they rest, its own arrays on the other side are as they were, and no later one was computed.
        """
        if self._closed:
            raise ClosedError(f"Staging {self.name!r} is closed.")
        if self._device.in_host_memory:
            for number, chunk in enumerate(chunks):
                compute(number, *(one.array for one in chunk))
            return Done([Done(None) for _ in chunks])
        for one in itertools.chain.from_iterable(chunks):
            if not (isinstance(one.array, np.ndarray) or self._device.owns(one.array)):
                raise CallError(
                    f"Expected arrays on the host (NumPy) or on {self._device.name} (CuPy), got {type_name(one.array)}."
                )
        check_apart(chunks)
        needed = slot_nbytes_of(chunks, on=on)
        if needed > self.slot_nbytes:
            raise CallError(
                f"Expected chunks of at most {self.slot_nbytes} bytes, a slot of staging {self.name!r}, got one of "
                f"{needed}. Cut chunks smaller, or make the staging with a larger slot_nbytes."
            )
        try:
            compute_all = self._compute_on_device if on == "device" else self._compute_on_host
            left = list(compute_all(chunks, compute))
        except BaseException:
            self._cancel()
            raise
        return joined(tuple(self._pending), result=left)

    def _compute_on_device(
        self, chunks: Sequence[Sequence[ArrayTransfer]], compute: Callable[..., object]
    ) -> Iterator[Ticket[None]]:
        """Compute chunk by chunk, and yield what is left to do for each: copies back."""
        copy_in, computing, copy_out = map(self._device.named_stream, ("copy in", "compute", "copy out"))
        self._follow_caller(copy_in, computing)
        self._wait_for_runs(chunks, stream=copy_in)
        guarded = _StopsOnFailure(compute)
        computed: Ticket[None] | None = None
        for number, chunk in enumerate(chunks):
            laid = self._lay(number, chunk, "device", stream=copy_in)
            # gpu-wait: adamw_over_state_on_the_host
            computed = computing.submit(
                guarded.call(number, laid.arrays), name=f"{self.name} {number}", eager=True, after=laid.filled
            )
            self._pending.append(computed)
            yield self._leave(laid, stream=copy_out, after=[computed])  # gpu-wait: adamw_over_state_on_the_host
            if guarded.failed:
                break
            self._forget_what_is_done()
        if computed is not None:
            # gpu-wait: adamw_over_state_on_the_host
            self._device.order_after(computed)  # raises what compute raised: no chunk behind that one was computed
            # gpu-wait: the_host_computes_with_what_is_no_longer_read
            ended = copy_out.submit(_nothing, name=f"{self.name} ends", eager=True, after=[computed])
            self._pending.append(ended)
            self._runs.append(_Leaving(ended, spans_on_host(chunks, written=True)))

    def _compute_on_host(
        self, chunks: Sequence[Sequence[ArrayTransfer]], compute: Callable[..., object]
    ) -> Iterator[Ticket[None]]:
        """Do the same on the host."""
        copy_in, copy_out = map(self._device.named_stream, ("copy in", "copy out"))
        if self._runs:
            self._runs[-1].ended.wait()  # gpu-wait: the_host_computes_with_what_is_no_longer_read
        self._follow_caller(copy_in, copy_out)
        rest = iter(enumerate(chunks))
        ahead = collections.deque(
            self._lay(number, chunk, "host", stream=copy_out) for number, chunk in itertools.islice(rest, self.depth)
        )
        last: Ticket[None] | None = None
        while ahead:
            laid = ahead.popleft()
            joined(laid.filled, result=None).wait()  # gpu-wait: adamw_over_state_on_the_host
            compute(laid.number, *laid.arrays)
            left = self._leave(laid, stream=copy_in, after=())
            yield left
            if any(one.write for one, _ in laid.moves):
                last = left
            ahead.extend(
                self._lay(number, chunk, "host", stream=copy_out) for number, chunk in itertools.islice(rest, 1)
            )
            self._forget_what_is_done()
        if last is not None:
            self._device.order_after(last)  # gpu-wait: the_callers_stream_waits_for_what_the_host_computed

    def _lay(self, number: int, chunk: Sequence[ArrayTransfer], on: Place, *, stream: Any) -> _Laid:
        """Give a chunk its slot, and begin to fill it once those before have left it."""
        slot = self._slots_on(on).take()
        arrays = lay_out(chunk, slot.memory, on=on)
        moves = [(one, place) for one, place in zip(chunk, arrays, strict=True) if one.moves_to(on)]
        there = [(one.array, place) for one, place in moves if one.read]
        busy = [] if slot.busy is None else [slot.busy]
        # gpu-wait: something_comes_and_nothing_goes_back
        return _Laid(number, slot, arrays, moves, self._copy(there, stream=stream, after=busy))

    def _leave(self, laid: _Laid, *, stream: Any, after: Sequence[Ticket[Any]]) -> Ticket[None]:
        """Queue the copies back of a chunk, after some tickets, and give its slot to the next; return their Ticket."""
        back = [(place, one.array) for one, place in laid.moves if one.write]
        # gpu-wait: adamw_over_state_on_the_host
        left = joined(self._copy(back, stream=stream, after=after), result=None)
        laid.slot.release(after=left)  # gpu-wait: adamw_over_state_on_the_host [after=left -> ]
        return left

    def _copy(
        self, pairs: Iterable[tuple[Any, Any]], *, stream: Any, after: Sequence[Ticket[Any]]
    ) -> list[Ticket[Any]]:
        """Queue copies after some tickets, and return theirs; those tickets if there is nothing to copy."""
        # gpu-wait: adamw_over_state_on_the_host
        tickets = [self._device.copy(source, out=out, stream=stream, after=after) for source, out in pairs]
        self._pending.extend(tickets)
        return tickets or list(after)

    def _follow_caller(self, *streams: Any) -> None:
        """Make streams wait for what the caller has put onto its own stream."""
        for stream in streams:
            # gpu-wait: adamw_over_state_on_the_host [eager=True -> eager=True, after=()]
            self._pending.append(stream.submit(_nothing, name=f"{self.name} begins", eager=True))

    def _wait_for_runs(self, chunks: Sequence[Sequence[ArrayTransfer]], *, stream: Any) -> None:
        """Make a stream wait for earlier runs that still bring arrays back which are about to be copied in."""
        while self._runs and self._runs[0].ended.done():
            self._runs.popleft()
        coming = spans_on_host(chunks, written=False) if self._runs else []
        for run in self._runs:
            if do_touch(run.spans, coming):
                # gpu-wait: arrays_of_the_host_are_in_order_from_run_to_run
                self._pending.append(stream.after(run.ended))

    def _slots_on(self, on: Place) -> Slots:
        if on not in self._slots:
            allocate: Callable[[int], Any]
            if on == "device":
                allocate = functools.partial(self._device.empty, dtype="uint8")
            elif self._pinned is not None:
                allocate = cut_from(self._pinned)
            else:
                allocate = functools.partial(HostDevice(self.name).empty, dtype="uint8", alignment=4096)
            self._slots[on] = Slots(f"slots of staging {self.name!r}", allocate=allocate)
            self._slots[on].reserve(self.slot_nbytes, count=self.depth)
        return self._slots[on]

    def _forget_what_is_done(self) -> None:
        while self._pending and self._pending[0].done():
            # not-gpu: it is done
            self._pending.popleft().wait()  # raises what it raised

    def finish(self) -> None:
        """Wait until all arrays are where they rest.

        Raises:
            Exception: What a copy raised; all others have ended, too.
        """
        try:
            joined(tuple(self._pending), result=None).wait()  # gpu-wait: adamw_over_state_on_the_host
        except Exception:
            self._forget()
            raise
        self._forget()

    def _cancel(self) -> None:
        """Wait for all that was begun, whatever becomes of it."""
        try:
            for ticket in self._pending:
                with contextlib.suppress(Exception):
                    ticket.wait()  # gpu-wait: an_error_leaves_nothing_under_way
        finally:  # also after a second Ctrl-C: else no later run would find a free slot
            self._forget()

    def _forget(self) -> None:
        """Nothing is under way."""
        self._pending.clear()
        self._runs.clear()
        for slots in self._slots.values():
            for slot in slots:
                slot.busy = None
            slots.reclaim()

    def close(self) -> None:
        """Wait for copies that are under way and give the memory back. Closing twice is fine.

        Raises:
            Exception: What a copy raised.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.finish()  # gpu-wait: a_staging_closes_behind_its_copies
        finally:
            self._slots.clear()
            self._pinned = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"depth {self.depth}, slots of {self.slot_nbytes} bytes"
        return f"Staging({self.name!r}, {what})"


class _StopsOnFailure:
    """A compute that is queued for many chunks: once it has failed, it raises the same instead of being called."""

    def __init__(self, compute: Callable[..., object]) -> None:
        self._compute = compute
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether it has."""
        return self._failure is not None

    def call(self, number: int, arrays: list[Any]) -> Callable[[], None]:
        """Return the work for one chunk. The stream holds it, and so the arrays, until the GPU is done."""

        def work() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                self._compute(number, *arrays)
            except BaseException as error:
                self._failure = error
                raise

        return work


def _nothing() -> None:
    return None
