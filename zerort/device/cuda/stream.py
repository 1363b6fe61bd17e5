"""A CUDA stream as a `Stream`: host work in order, that puts kernels and copies onto the GPU in the same order.

    submit(work)      caller's stream ──event──> this stream: [work's kernels] ──event──> the Ticket
    ticket.on(other)  the GPU waits, the host does not

[Note: two queues] (decision 0037)
Work is a Python callable that runs on the host, as on a host stream, with this CUDA stream current: what it launches is
on this stream. So a stream is two queues, one of callables and one on the GPU, and a Ticket is done when both are. A
collective needs the first: it meets the other ranks before it may enter NCCL. What the host does alone goes to `host`:
in order with the rest, and done when the host is.

[Note: what came before] (decision 0038)
On the host, work that is submitted sees what its caller wrote before. Here too: unless told after which tickets it
comes, work waits on the GPU for what the caller has put onto its own current stream so far.

[Note: references]
CuPy returns memory to its pool when the last reference goes, whether or not the GPU still uses it. So a stream holds
what its work uses until the work's event has fired, also if the caller drops the Ticket; one that was captured into a
graph never does. After a fault the GPU uses nothing any more.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from zerort.device.cuda.library import allow_captures, cupy, has_passed, is_captured, new_stream
from zerort.device.cuda.order import CudaOrder, Place
from zerort.device.host.stream import HostStream
from zerort.device.ticket import AllOf, Ticket
from zerort.errors import DeviceError
from zerort.typing import Event

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CudaEvent", "CudaStream", "order"]

T = TypeVar("T")

_SPINS = 100
"""Looks at an event before a waiting thread begins to sleep: most kernels end within these."""

_LONGEST_SLEEP = 500e-6
"""Seconds. A wait looks, it does not block in CUDA: so Ctrl-C works, and a broken group is noticed."""


_LAST_WORK = 2.0
"""Seconds that work which was given up gets to end when its stream closes, so that its memory comes back."""


class CudaEvent:
    """A point in a CUDA stream's work, on the host and on the GPU."""

    __slots__ = ("_cuda", "_issued", "_reached", "_stream")

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._cuda = cupy.cuda.Event(disable_timing=True)
        self._issued: Ticket[None] | None = None
        self._reached = False

    def done(self) -> bool:
        """Say whether the point has been reached, without waiting.

        Raises:
            DeviceError: The GPU had a fault, and will never reach it.
        """
        if not self._reached:
            self._reached = self._issued is not None and self._issued.done() and has_passed(self._cuda)
        return self._reached

    def wait(self, timeout: float | None = None) -> None:
        """Block until the host has done its part and the GPU too; raise what the work raised.

        Raises:
            TimeoutError: Not reached after ``timeout`` seconds.
            DeviceError: The GPU had a fault.
        """
        until = None if timeout is None else time.monotonic() + timeout
        assert self._issued is not None
        self._issued.wait(timeout)  # gpu-wait: errors_reach_the_waiter
        looks = 0
        while not self._reached:
            try:
                reached, fault = self.done(), None
            except DeviceError as error:
                reached, fault = False, error
            trouble = self._stream.trouble() or fault  # looked for last: work that failed on the GPU ends, too
            if trouble is not None:
                self._reached = False
                # Anew: an error that others hold on to must not hold on to this ticket, and so to arrays.
                raise type(trouble)(*trouble.args) from trouble
            if reached:
                break
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"Work on stream {self._stream.name!r} is not done after {timeout} s.")
            looks += 1
            time.sleep(0 if looks < _SPINS else min(_LONGEST_SLEEP, (looks - _SPINS) * 5e-6))
        self._stream.sweep()

    def precede(self, stream: Any) -> None:
        """Make a CUDA stream wait on the GPU for this point, as soon as the host has come to it."""
        assert self._issued is not None
        self._issued.wait()  # gpu-wait: work_comes_after_tickets_that_the_host_has_not_come_to
        stream.wait_event(self._cuda)  # gpu-wait: copies_go_all_four_ways


class CudaStream:
    """Work in order on one GPU.

    Args:
        name: What the thread and the track in a trace are called.
        device: The CuPy device.
        priority: Of the CUDA stream, from CuPy 14 on; a lower number goes first.
        helping: As in `HostStream`.
        trouble: Returns what makes waiting useless, if anything does; asked by whoever waits.
        order: In which this stream's work takes turns with that of other streams (`take_turn`); None if it need not.
    """

    def __init__(
        self,
        name: str,
        device: Any,
        *,
        priority: int = 0,
        helping: bool = True,
        trouble: Callable[[], BaseException | None] = lambda: None,
        order: CudaOrder | None = None,
    ) -> None:
        self.name = name
        self.trouble = trouble
        self._device = device
        self._shared_order = order
        self._standing: Place | None = None  # of the work that is being done
        with device:
            self.cuda = new_stream(priority)
        # gpu-wait: threads_of_streams_may_allocate [, begin=allow_captures -> ]
        self.host = HostStream(name, helping=helping, begin=allow_captures)
        self.turn, self.queue = self.host.turn, self.host.queue
        self._held: collections.deque[tuple[Any, tuple[object, ...]]] = collections.deque()
        self._sweeping = threading.Lock()

    def submit(
        self,
        work: Callable[[], T],
        *,
        name: str = "work",
        keep: tuple[object, ...] = (),
        eager: bool = False,
        after: Sequence[Ticket[Any]] | None = None,
    ) -> Ticket[T]:
        """Queue ``work``, which launches what it likes on this stream, and return its Ticket.

        Args:
            work: Called once, with this stream current.
            name: What the span in a trace is called.
            keep: Objects that must stay alive until the GPU is done.
            eager: Call it here and now if nothing is queued: launching a kernel is shorter than a thread switch.
            after: Tickets that the GPU waits for first. None: what the caller has on its own stream so far.
        """
        self.sweep()
        with self._device:
            event = CudaEvent(self)
            before = self._mark_caller() if after is None else None
        ticket: Ticket[T] = Ticket(event)
        # Taken out when the work is issued: the traceback of an error holds this frame, and must not hold arrays.
        given: list[Any] = [keep, work]

        def issue() -> None:
            with self._device, self.cuda, self._in_line(place, event):
                try:
                    if before is not None:
                        self.cuda.wait_event(before)  # gpu-wait: a_copy_waits_for_what_the_caller_computed
                    for earlier in after or ():
                        order(earlier, before=self.cuda)  # gpu-wait: work_can_come_after_tickets_alone
                    given.append(given[1]())
                    ticket.fulfil(given[2])
                finally:  # what it launched before it raised still runs
                    try:
                        event._cuda.record(self.cuda)  # gpu-wait: the_gpu_can_time_out
                        self._held.append((event._cuda, tuple(given)))  # gpu-wait: arrays_live_until_the_gpu_is_done
                    finally:
                        given.clear()

        del work, keep
        with self._place() as place:
            event._issued = self.host.submit(issue, name=name, eager=eager)
        return ticket

    def take_turn(self) -> None:
        """Wait until it is the turn of the work that calls this, on the host and on the GPU, if it has a place in line.

        It has its turn until it ends. Work that calls nothing leaves the line when it ends, without a turn.

        Raises:
            BaseException: What `trouble` returns meanwhile.
        """
        if self._standing is not None:
            self._standing.take_turn(self.cuda, trouble=self.trouble)

    def after(self, ticket: Ticket[Any]) -> Ticket[None]:
        """Make what is submitted next wait for ``ticket``: on the GPU if it is the ticket of a CUDA stream."""
        # gpu-wait: copies_go_all_four_ways [order(ticket, before=self.cuda) -> None]
        return self.submit(lambda: order(ticket, before=self.cuda), name="wait", keep=(ticket,), after=())

    def sweep(self) -> None:
        """Let go of what finished work used.

        Raises:
            DeviceError: The GPU had a fault; now nothing is held.
        """
        if self._sweeping.acquire(blocking=False):
            try:
                while self._held and has_passed(self._held[0][0]):
                    self._held.popleft()
            except DeviceError:
                self._held.clear()
                raise
            finally:
                self._sweeping.release()

    def synchronize(self) -> None:
        """Block until everything submitted so far has happened."""
        # gpu-wait: synchronize_waits_for_the_gpu
        self.submit(lambda: None, name="synchronize", eager=True, after=()).wait()

    def close(self) -> None:
        """Finish what was submitted, on the host and on the GPU, then refuse further work. Closing twice is fine."""
        try:
            self.host.close()
        finally:
            until = time.monotonic() + _LAST_WORK
            with contextlib.suppress(DeviceError):  # which whoever waits for a ticket is told
                # gpu-wait: a_stream_closes_behind_its_work
                while self._held and (self.trouble() is None or time.monotonic() < until):
                    if is_captured(self._held[0][0]):
                        break
                    self.sweep()
                    time.sleep(10e-6)

    def abandon(self) -> None:
        """Refuse further work and do not wait for what was submitted."""
        self.host.abandon()

    def _place(self) -> contextlib.AbstractContextManager[Place | None]:
        return contextlib.nullcontext() if self._shared_order is None else self._shared_order.place()

    @contextlib.contextmanager
    def _in_line(self, place: Place | None, event: CudaEvent) -> Iterator[None]:
        self._standing = place
        try:
            yield
        finally:
            self._standing = None
            if place is not None:
                place.leave(event._cuda)

    def _mark_caller(self) -> Any:
        """Return an event behind all that the caller has on its current stream; None if that is this stream."""
        current = cupy.cuda.get_current_stream(self._device.id)
        # gpu-wait: a_copy_waits_for_what_the_caller_computed [-> None]
        return None if current.ptr == self.cuda.ptr else current.record(cupy.cuda.Event(disable_timing=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.host).replace("HostStream", f"CudaStream on GPU {self._device.id}", 1)


def order(ticket: Ticket[T], *, before: Any) -> T:
    """Make a CUDA stream wait for a Ticket: on the GPU for what happens there, on the host for the rest.

    Returns:
        The Ticket's result, for use on that stream.
    """
    events: list[Event] = [ticket.ready]
    while events:
        event = events.pop()
        if isinstance(event, AllOf):
            events += event.events
        elif isinstance(event, CudaEvent):
            event.precede(before)  # gpu-wait: work_can_come_after_tickets_alone
        else:
            event.wait()  # gpu-wait: work_comes_after_tickets_that_the_host_has_not_come_to
    return ticket.result
