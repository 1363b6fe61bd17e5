"""Streams of the host: worker threads with an ordered queue.

A stream does its work in the order of submission, one piece at a time, on its worker thread or on a thread that waits
for it: whoever waits for a ticket that nobody works on yet takes the work over. A blocking call then costs no thread
switch, and work that nobody waits for still happens.

An interrupt (Ctrl-C) may meet the main thread anywhere here. Every lock is freed then, every piece of work that was
begun is ended, and one that was not is done by whoever comes next (decision 0184).
"""

# not-gpu: the host's own streams
from __future__ import annotations

import atexit
import collections
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from zerort import forks, trace
from zerort.device.ticket import Done, Ticket
from zerort.errors import ClosedError
from zerort.native import Doorbell

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HostEvent", "HostStream", "owns"]

T = TypeVar("T")

_GRACE = 200e-6
"""Seconds that a worker leaves queued work to whoever waits for it; waking up for nothing costs the others more."""


def owns(turn: threading.RLock) -> bool:
    """Say whether this thread has a stream's turn. It is what `threading.Condition` asks its lock."""
    return turn._is_owned()  # type: ignore[attr-defined,no-any-return]


class HostEvent:
    """A point in a host stream's work. Carries the error, if the work before it raised one."""

    __slots__ = ("_begun", "_error", "_reached", "_signal", "_stream")

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._begun = False
        self._reached = False
        self._error: BaseException | None = None
        # Made only by a thread that must sleep: most events are reached by the thread that asks.
        self._signal: threading.Event | None = None

    def done(self) -> bool:
        """Say whether the point has been reached, without waiting."""
        return self._reached

    def wait(self, timeout: float | None = None) -> None:
        """Block until the point is reached, doing the stream's work meanwhile if nobody else does.

        A wait with a ``timeout`` leaves the work to the worker thread: work taken over could not be left when time is
        up.

        Raises:
            TimeoutError: Not reached after ``timeout`` seconds.
        """
        if not self._reached and (timeout is not None or not self._stream._help(self)):
            if self._stream._is_inherited:  # nobody is here who would reach it
                raise forks.inherited(f"work on stream {self._stream.name!r}")
            signal = self._signal_of_sleeper()
            if not self._reached and not signal.wait(timeout):
                raise TimeoutError(f"Work on stream {self._stream.name!r} is not done after {timeout} s.")
        if self._error is not None:
            self._stream._unseen.discard(self)
            raise self._error

    def _signal_of_sleeper(self) -> threading.Event:
        if self._signal is None:
            with self._stream._lock:  # two sleepers must share one signal
                if self._signal is None:
                    self._signal = threading.Event()
        return self._signal

    def _mark(self, error: BaseException | None = None) -> None:
        """Say that the point is reached. Once more does no harm: an interrupt may have met the first one."""
        if not self._reached:
            self._error = error
            if error is not None:
                self._stream._unseen.add(self)
            self._reached = True
        # Order matters: a sleeper makes its signal first and looks at _reached second; we do the reverse.
        if self._signal is not None:
            self._signal.set()


class HostStream:
    """Work done in order, on a worker thread or by whoever waits for it.

    Args:
        name: What the thread and the track in a trace are called.
        helping: Let a waiting thread take queued work over. False pins all work to the worker thread, as an MPI library
            that is not thread-safe wants it.
        begin: Called first on the worker thread.
    """

    def __init__(self, name: str, *, helping: bool = True, begin: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.helping = helping
        self._begin = begin
        self.queue: collections.deque[tuple[Callable[[], Any], Ticket[Any], HostEvent, str]] = collections.deque()
        """What was submitted and not begun. For the stream; others may look whether it is empty."""
        self._bell = Doorbell(_GRACE if helping else 0.0)
        self._lock = threading.Lock()
        # It knows its owner: an interrupt may come between taking it, or giving it back, and noting that.
        self.turn = threading.RLock()
        """Held by the thread that does the stream's work. Who takes it and finds nothing queued may work in its stead;
        work of the stream itself, which has it already, may not (`owns`)."""
        self._worker: threading.Thread | None = None
        self._unseen: set[HostEvent] = set()  # work that failed and that nobody has waited for yet
        self._closed = self._is_inherited = False
        forks.follow(self)

    def submit(
        self, work: Callable[[], T], *, name: str = "work", keep: tuple[object, ...] = (), eager: bool = False
    ) -> Ticket[T]:
        """Queue ``work`` and return its Ticket.

        Args:
            work: Called once, with no arguments; what it returns is the Ticket's result.
            name: What the span in a trace is called.
            keep: Objects that must stay alive until the work is done.
            eager: Do the work here and now if the stream is idle. For work that is shorter than a thread switch.
        """
        self._check_open()
        if eager and not self.queue:
            done = self._in_turn(functools.partial(self._do_at_once, work, name))
            if done is not None:
                return done
        event = HostEvent(self)
        ticket: Ticket[T] = Ticket(event, keep=keep)
        if self._worker is None:
            self._start_worker()
        try:
            with self._lock:  # so that nothing is queued behind the back of a worker that has gone home
                self._check_open()
                self.queue.append((work, ticket, event, name))
                self._bell.ring()
        except BaseException:  # perhaps it is queued and has not rung; the worker puts right what rings too often
            self._bell.ring()
            raise
        return ticket

    @property
    def host(self) -> HostStream:
        """The stream for what the host does alone: this one. A GPU's stream has one in the same order."""
        return self

    def record(self) -> Ticket[None]:
        """Return a Ticket that is done when everything submitted so far is."""
        return self.submit(lambda: None, name="record", eager=True)

    def after(self, ticket: Ticket[Any]) -> Ticket[None]:
        """Make what is submitted next wait for ``ticket``."""
        return self.submit(ticket.ready.wait, name="wait", keep=(ticket,))

    def synchronize(self) -> None:
        """Block until everything submitted so far has happened."""
        self.record().wait()

    def close(self) -> None:
        """Finish what was submitted, then refuse further work. Closing twice is fine.

        Warns of work that failed if nobody waited for it: the error would be lost.
        """
        if self._is_inherited:
            return
        self.abandon()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        if self._unseen:
            error = next(iter(self._unseen))._error
            warnings.warn(
                f"Stream {self.name!r}: {len(self._unseen)} pieces of work failed and nobody waited for them; one with "
                f"{type(error).__name__}: {error}. Call wait() on every ticket.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._unseen.clear()

    def abandon(self) -> None:
        """Refuse further work and do not wait for what was submitted: for a stream whose work can no longer end."""
        with self._lock:
            self._closed = True
            self._bell.ring()  # for the worker, which finds the door closed; again if an interrupt met the first time

    def disown(self) -> None:
        """In a forked child: be closed. What was queued is its parent's to do, and the worker is not here."""
        self._closed = self._is_inherited = True
        self._lock, self.turn = threading.Lock(), threading.RLock()
        self._worker = None
        self.queue.clear()
        self._unseen.clear()

    def _check_open(self) -> None:
        if self._is_inherited:
            raise forks.inherited(f"stream {self.name!r}")
        if self._closed:
            raise ClosedError(f"Stream {self.name!r} is closed. Submit work before closing it.")

    def _start_worker(self) -> None:
        try:
            with self._lock:
                if self._worker is None:
                    self._worker = threading.Thread(target=self._serve, name=f"zerort-{self.name}", daemon=True)
                    _working.add(self)
                    self._worker.start()
        except BaseException:  # an interrupt, or no more threads: one that has not begun is no worker
            with self._lock:
                if self._worker is not None and self._worker.ident is None:
                    self._worker = None
            raise

    def _serve(self) -> None:
        with self._lock:
            if self._worker is not threading.current_thread():  # an interrupt came before it began
                return
        self._begin()
        while not self._closed or self.queue:
            self._bell.wait()
            with self.turn:
                if not self._do_next():
                    with self._lock:  # nobody takes work now, nor adds to it
                        self._bell.recount(len(self.queue))

    def _help(self, event: HostEvent) -> bool:
        """Do queued work until ``event`` is reached; False if another thread is at it."""
        while self.helping and not event._reached:
            if not self._in_turn(self._do_next):
                break
        return event._reached

    def _in_turn(self, act: Callable[[], T]) -> T | None:
        """Return what ``act`` returns, done with the turn; None if another thread has it, or this one's work asks."""
        turn = self.turn
        if owns(turn):
            return None
        try:
            if not turn.acquire(False):  # noqa: FBT003 (a keyword costs as much again)
                return None
            made = act()
            turn.release()
        except BaseException:
            if owns(turn):
                turn.release()
            raise
        return made

    def _do_next(self) -> bool:
        while self.queue and self.queue[0][2]._begun:  # an interrupt met whoever did it
            self.queue[0][2]._mark(KeyboardInterrupt(f"Work on stream {self.name!r} was interrupted."))
            self.queue.popleft()
        if not self.queue:
            return False
        work, ticket, event, name = self.queue[0]
        try:
            self._bell.answer()
            self._do(work, ticket, event, name)
        except BaseException as error:  # Ctrl-C
            if event._begun:
                event._mark(error)
            else:  # whoever comes next does it
                self._bell.ring()
            raise
        finally:
            if event._begun:
                self.queue.popleft()
        return True

    def _do_at_once(self, work: Callable[[], T], name: str) -> Ticket[T] | None:
        if self.queue:
            return None
        try:
            if trace.is_enabled():
                with trace.span(name, track=self.name):
                    return Done(work())
            return Done(work())
        except Exception as error:
            event = HostEvent(self)
            event._mark(error)
            return Ticket(event)

    def _do(self, work: Callable[[], T], ticket: Ticket[T], event: HostEvent, name: str) -> None:
        event._begun = True
        try:
            if trace.is_enabled():
                with trace.span(name, track=self.name):
                    ticket.fulfil(work())
            else:
                ticket.fulfil(work())
        except BaseException as error:  # whoever waits gets it, whichever thread that is
            event._mark(error)
            if not isinstance(error, Exception) and threading.current_thread() is not self._worker:
                raise  # Ctrl-C is meant for the thread that it met, not for this piece of work
        else:
            event._mark()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostStream({self.name!r}, {'closed' if self._closed else f'{len(self.queue)} queued'})"


_working: weakref.WeakSet[HostStream] = weakref.WeakSet()


@atexit.register
def _send_workers_home() -> None:
    """End the worker threads while Python still runs: one that comes out of native code later would end in a crash.

    They are daemons because one that is stuck must not keep the process; such a one is given up after a moment.
    """
    streams = [stream for stream in _working if not stream._is_inherited]
    for stream in streams:
        stream.abandon()
    for stream in streams:
        if stream._worker is not None:
            stream._worker.join(timeout=0.5)
