"""`Launcher`: how a group's calls go: looked up or checked, numbered, and handed to the transport in order.

    launch      a collective: a Ticket
    together    something that needs all ranks and has happened when it returns

A call that was made before, with the same arrays from the same line, takes the transport's shortcut if it has one, here
and now, in native code (``native/src/repeater.cpp``): the first lines of `launch` are what a small collective costs in
Python (decisions 0004, 0013, 0205).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zerort import native, trace
from zerort.comm.arrays import tensors_like
from zerort.comm.guard import checks
from zerort.comm.guard.call import INVALID, Call, call_site, users_frame
from zerort.comm.guard.checks import Given
from zerort.comm.guard.differing import Differences, RanksDiffer
from zerort.comm.guard.verdict import broken_error
from zerort.comm.prepared import Prepared, PreparedCalls, key_of
from zerort.comm.transport import STALE, Transport
from zerort.device import Done, Ticket, owns
from zerort.errors import (
    BootstrapError,
    CallError,
    ClosedError,
    CollectiveError,
    DeviceMemoryError,
    SharedMemoryError,
)
from zerort.native.rendezvous import open_repeater

__all__ = ["Fill", "Launcher"]

T = TypeVar("T")

_LAST_CALL = 1.0
"""Seconds that closing waits for a thread that is at a call of a broken group: breaking it has woken that thread."""

Fill = Callable[[Call, int, int, Given], None]

_VERDICTS = (BootstrapError, CallError, CollectiveError, DeviceMemoryError, SharedMemoryError)
"""Errors that all ranks reach together: the group is as it was, unless it says itself that it is broken."""


class Launcher:
    """The calls of one group.

    Args:
        transport: What carries them out.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        # Calls up to this size run at once, on the thread that makes them.
        self._eager_nbytes = {
            "any thread": transport.eager_nbytes,
            "own thread": -1,
            "caller": sys.maxsize,
        }[transport.runs_on]
        # The same for a call that should be queued: none, unless the transport knows no other thread.
        self._least_eager_nbytes = sys.maxsize if transport.runs_on == "caller" else -1
        self._stream = transport.open_stream()
        self._host_stream = self._stream.host
        self._turn, self._queue = self._stream.turn, self._stream.queue
        self._sequence = 0  # of the next call; when it is made, `surplus` is added
        self.differences = Differences()
        self.tally: Callable[[], dict[str, int]] | None = None
        """Says how many calls were made in groups that were split from this one; None: there are none."""
        self._prepared = PreparedCalls(transport)
        self._known = self._prepared.known
        self._again = _never
        if native.AVAILABLE and type(transport).shortcut is not Transport.shortcut:
            self._again = open_repeater(
                known=self._known,
                transport=transport,
                differences=self.differences,
                turn=self._stream.turn,
                queue=self._stream.queue,
                most_nbytes=min(self._eager_nbytes, sys.maxsize),
                frame_at=sys._getframe,
                users_frame=users_frame,
                is_tracing=trace.is_enabled,
                count=trace.count,
                promise=Done,
            )
        self._closed = False

    @property
    def made(self) -> int:
        """How many calls were made, as the other ranks count them."""
        return self._sequence + self.differences.surplus

    def launch(
        self,
        op: str,
        fill: Fill,
        name: str,
        source: Any = None,
        out: Any = None,
        counts: Sequence[Any] | None = None,
        root: int = -1,
        reduction: str = "",
        *,
        eager: bool = True,
        after: Ticket[Any] | None = None,
        follows: Ticket[Any] | None = None,
    ) -> Ticket[Any]:
        """Make a call. Called by the verb that the user called."""
        if type(counts) is list:  # which could not be looked up
            counts = tuple(counts)
        if self.differences.suffix:
            name += self.differences.suffix
        repeating = eager and after is None and follows is None
        try:
            if repeating:  # an error means that the call was left in its middle
                made = self._again(self, op, name, source, out, counts, root, reduction)
                if type(made) is Done:
                    return made
                repeating = False
                if made is not None:
                    known, progress, result = made
                    if progress != STALE:
                        return self._go_on(known, progress, source, result, is_new=out is None and source is not None)
                    known.renew_shortcut()
            limit = self._eager_nbytes if eager else self._least_eager_nbytes
            return self._launch(op, fill, name, Given(source, out, counts, root, reduction), limit, after, follows)
        except BaseException as error:
            self._break_if_left(op, error, left=repeating)
            raise

    def _break_if_left(self, op: str, error: BaseException, *, left: bool = False) -> None:
        """Break the group if a call was left in its middle: by its shortcut's error, or by an interrupt anywhere."""
        if (left or not isinstance(error, Exception)) and self._transport.broken is None:
            call = self._number(Call(op, call_site()))
            call.sequence += self.differences.surplus  # as the other ranks number it: this one is not made any more
            self._transport.fail(call, error)

    def _go_on(self, known: Prepared, progress: int, source: Any, out: Any, *, is_new: bool) -> Ticket[Any]:
        """Finish a call that its shortcut has begun."""
        # Not found anew: to the shortcut another array in the same place is as good as the one before.
        call = known.call.take_new(source, out) if is_new else known.call.take(source, out)
        call.stance = self.differences.stance
        self._number(call)
        work = functools.partial(self._perform, call, None, progress)
        return self._stream.submit(work, name=call.op, eager=True)

    def _launch(
        self,
        op: str,
        fill: Fill,
        name: str,
        given: Given,
        eager_nbytes: int,
        after: Ticket[Any] | None,
        follows: Ticket[Any] | None,
    ) -> Ticket[Any]:
        """Make a call that has no shortcut, or cannot take it now."""
        source, out = given.source, given.out
        frame = users_frame(3)
        key = key_of(op, name, given, frame)
        tensors = tensors_like(source, out)
        if tensors is not None:
            fill, key = functools.partial(checks.fill_tensors, fill=fill, tensors=tensors), None
        call = None
        if key is not None and not self._closed and self._transport.broken is None:
            call = self._prepared.take(key, source, out)
        if call is None:
            call = self._new_call(op, name, fill, given)
            if key is not None:
                self._prepared.keep(key, frame.f_code, call, source, out)
        else:
            self._number(call)
        call.stance = None if call.complaint else self.differences.stance
        title = f"{op} {name}" if name and trace.is_enabled() else op
        work = functools.partial(self._perform, call)
        if after is not None:
            work = functools.partial(self._perform_after, after, call)
        if follows is not None:
            work = functools.partial(self._perform_following, follows, work, call)
        # A call over a device's arrays lets go of them when it is queued; the device is not done with them then.
        if call.where:  # these take turns in the order of the program, on the GPU, too: they come after what was before
            keep = (call.source, call.out)
            return self._stream.submit(work, name=title, keep=keep, eager=call.nbytes <= eager_nbytes)
        return self._host_stream.submit(work, name=title, eager=call.nbytes <= eager_nbytes)

    def _perform_after(self, earlier: Ticket[Any], call: Call) -> Any:
        with contextlib.suppress(Exception):  # whoever waits for it is told; the ranks of this call meet all the same
            self._transport.device.order_after(earlier)  # gpu-wait: each_units_sum_over_copies_follows
        return self._perform(call)

    def _perform_following(self, earlier: Ticket[Any], work: Callable[[], Any], call: Call) -> Any:
        """Make a call unless the one that it completes has failed: on all ranks, so none of them makes it."""
        try:
            earlier.wait()  # not-gpu: a call before this one, which has ended
        except Exception:
            self.differences.surplus -= 1
            call.finish()  # not-gpu: no synchronisation: what the call delivers
            raise
        return work()

    def disregard(self, ticket: Ticket[Any]) -> None:
        """Let nobody be told what went wrong with a call."""

        def look() -> None:
            with contextlib.suppress(Exception):
                # not-gpu: for its error
                ticket.wait()

        if ticket.done():
            look()
        else:
            with contextlib.suppress(ClosedError):
                self._host_stream.submit(look, name="disregard")

    def _number(self, call: Call) -> Call:
        call.sequence = self._sequence
        self._sequence += 1
        return call

    def together(self, op: str, name: str, fill: Fill, make: Callable[[], T], given: Given) -> T:
        """Meet as collectives do, then ``make`` something that needs all ranks; wait for it."""
        call = self._new_call(op, name, fill, given)
        work = functools.partial(self._perform, call, make)
        try:
            # not-gpu: the host needs what is made
            made: T = self._stream.submit(work, name=op, eager=self._eager_nbytes >= 0).wait()
        except BaseException as error:
            self._break_if_left(op, error)
            raise
        return made

    def after(self, ticket: Ticket[Any]) -> None:
        """Make the next calls wait for ``ticket``."""
        # not-gpu: what a group over GPUs waits for is said where it is called
        ticket.on(self._stream)

    def close(self) -> None:
        """Finish what was submitted, unless it can no longer end, and refuse further calls.

        Tells the transport whether a thread may still be at a call (decision 0183).
        """
        self._closed = True
        self._again = _never
        self._known.clear()
        try:
            if self._transport.broken is None:
                self._stream.close()
            else:
                self._stream.abandon()
        finally:
            self._transport.in_use = not self._is_quiet()

    def _is_quiet(self) -> bool:
        """Say whether no thread is at a call or will be, once closed. Waits a moment for one that is."""
        if owns(self._turn) or not self._turn.acquire(timeout=_LAST_CALL):
            return False
        try:
            return self._transport.broken is not None or not self._queue  # what is queued is refused if it is broken
        finally:
            self._turn.release()

    def _new_call(self, op: str, name: str, fill: Fill, given: Given) -> Call:
        self._check_usable(op)
        transport = self._transport
        call = self._number(Call(op, call_site(), name=name, device=transport.device_arrays))
        try:
            checks.check_name(call, name)
            fill(call, transport.rank, transport.size, given)
        except CallError as error:
            call = Call(INVALID, call.site, call.sequence, complaint=str(error))
        except Exception as error:  # no memory for a result, say: the others must hear of it all the same
            call = Call(INVALID, call.site, call.sequence, complaint=f"{op}: {type(error).__name__}: {error}")
        return call

    def _check_usable(self, op: str) -> None:
        transport = self._transport
        if self._closed:
            raise ClosedError(f"{op}: Expected an open group, got {transport.title}, closed. Call it before closing.")
        if transport.broken is not None:
            raise broken_error(op, transport.title, transport.broken)

    def _perform(self, call: Call, make: Callable[[], Any] | None = None, progress: int = STALE) -> Any:
        transport, entry = self._transport, None
        flights = transport.flights
        call.tally = self.tally
        try:
            if transport.broken is not None:  # since this call was queued
                self._check_usable(call.op)
            self.differences.check(call)
            call.sequence += self.differences.surplus
            entry = flights.begin(call.sequence, call.op, call.dtype, call.numel, call.name, call.site)
            self._run(call, progress)
            made = None if make is None else make()
        except BaseException as error:
            # Of anything else only this rank knows.
            if not isinstance(error, _VERDICTS):
                transport.fail(call, error)
            if entry is not None:
                flights.end(entry, f"failed: {type(error).__name__}")
            # not-gpu: no synchronisation: what the call delivers
            call.finish()
            raise
        flights.end(entry)
        trace.count(call.op)
        # not-gpu: no synchronisation: what the call delivers
        return call.finish() if make is None else made

    def _run(self, call: Call, progress: int) -> None:
        """Make a call; where ranks may differ, take part in the others' until all have come to this one."""
        transport = self._transport
        while True:
            try:
                if progress == STALE:
                    transport.run(call)
                else:
                    transport.resume(call, progress)
                return
            except RanksDiffer as difference:
                name = self.differences.settle(call, difference)
            progress = STALE
            self._count_meeting(call)
            if name is not None:
                self._join(name, sequence=call.sequence)
                self._count_meeting(call)

    def _count_meeting(self, call: Call) -> None:
        """Number a call anew that is made once more."""
        self.differences.surplus += 1
        call.sequence += 1

    def _join(self, name: str, *, sequence: int) -> None:
        """Take part in a gather that other ranks need: nobody uses what comes of it here."""
        transport = self._transport
        call = Call("all_gather", call_site(), sequence, name=name, device=transport.device_arrays)
        with contextlib.ExitStack() as held:
            try:
                source, out, counts = held.enter_context(self.differences.joins[name]())
                checks.fill_all_gather(call, transport.rank, transport.size, Given(source, out, counts))
            except Exception as error:  # a disk that fails, say: the others must hear of it
                call = Call(INVALID, call.site, sequence, complaint=f"{name}: {type(error).__name__}: {error}")
            trace.count("joined")
            transport.run(call)


def _never(*call: Any) -> Any:
    """Repeat no call: there are no shortcuts."""
    return None
