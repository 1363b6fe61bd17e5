"""`NcclWatch`: what watches over calls that are on the GPU, and ends them when they can no longer end by themselves.

A kernel of NCCL's that waits for a lost rank waits for ever, and so does whoever waits for the GPU. So while calls are
under way a thread looks, ten times a second, whether NCCL reports an error, another rank has failed or gone, or time is
up. Then the group breaks: the other ranks are told, and the communicator is aborted, which frees the GPU. A call that
waits in line for other groups' calls is under way, too (decisions 0041, 0054).

[Note: the gate]
A communicator must not be aborted or destroyed under a thread that is inside NCCL. So whoever enters goes through
`entry`, which lets nobody in once the end has begun, and the end waits until all are out. If one does not come out, it
is stuck in there: an abort ends that, and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerort.comm.guard.verdict import Trouble
from zerort.device.cuda.library import allow_captures, cupy, has_passed
from zerort.errors import CollectiveError, CollectiveTimeoutError, DeviceError, RankFailedError

__all__ = ["NcclWatch"]

_EVERY = 0.1
"""Seconds between two looks."""

_GRACE = 3.0
"""Seconds that a call gets to end after a rank was seen to have gone: it may have done its part of it before."""

_NAMED_WITHIN = 1.0
"""Seconds in which the host gets to say which rank an error of NCCL comes from."""

_LEFT_WITHIN = 1.0
"""Seconds in which a thread gets out of NCCL by itself, if it ever does: it only queues work there."""

_DEADLINE = 10.0
"""Seconds that NCCL gets to abort or to end."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A call that is in line, in NCCL or on the GPU."""

    text: str
    began: float
    held_up_by: str = "a rank's GPU is stuck, or busy with something else"
    event: Any = None  # behind it on the GPU, once it is queued

    def has_landed(self) -> bool:
        return self.event is not None and has_passed(self.event)


class NcclWatch:
    """Watches one communicator.

    Args:
        communicator: CuPy's ``NcclCommunicator``.
        device: The CuPy device.
        title: What errors call the group.
        rank: This rank.
        timeout: Seconds that a call may take on the GPU.
        trouble: Says what another rank is known to suffer from.
        on_break: Called once, with the error, before the communicator is aborted.
    """

    def __init__(
        self,
        communicator: Any,
        device: Any,
        *,
        title: str,
        rank: int,
        timeout: float,
        trouble: Callable[[], Trouble | None],
        on_break: Callable[[CollectiveError], None],
    ) -> None:
        self._communicator = communicator
        self._device = device
        self._title, self._rank, self._timeout = title, rank, timeout
        self._trouble, self._on_break = trouble, on_break
        self._flights: collections.deque[_Flight] = collections.deque()
        self._latest = "a call"
        self._error: CollectiveError | None = None
        self._seen_at: float | None = None  # since when another rank is in trouble
        self._stop = threading.Event()
        self._asking = threading.Lock()
        self._gate = threading.Condition()
        self._inside = 0  # threads
        self._ended = False  # set once, by whoever aborts or destroys the communicator
        threading.Thread(target=self._look, name=f"zerort-watch {title}", daemon=True).start()

    @contextlib.contextmanager
    def line(self, text: str) -> Iterator[None]:
        """Watch over a call that waits for those of other groups, which may never end."""
        flight = _Flight(text, time.monotonic(), "a call of another group, before it on this GPU, does not end")
        self._flights.append(flight)
        try:
            yield
        finally:
            self._forget(flight)

    def _forget(self, flight: _Flight) -> None:
        with self._asking:  # whoever looks at the first one must not find it gone
            self._flights.remove(flight)

    @contextlib.contextmanager
    def entry(self, text: str) -> Iterator[None]:
        """Enter NCCL to queue a call on the current stream. It is watched from here until the GPU has done it.

        Raises:
            CollectiveError: The communicator has ended.
        """
        flight = _Flight(text, time.monotonic())
        with self._gate:
            if self._ended:
                raise self._why_ended(text) from self._error
            self._latest = text
            self._flights.append(flight)
            self._inside += 1
        try:
            yield
            # gpu-wait: a_call_that_does_not_end_on_the_gpu [cupy.cuda.get_current_stream().record -> ]
            flight.event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
        except BaseException as error:
            self._forget(flight)
            if self._error is not None and isinstance(error, Exception):
                raise self._why_ended(text) from error  # it was in there for so long that the communicator went
            raise
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def look(self) -> CollectiveError | None:
        """Return the error that the group has, or that NCCL or the GPU has found meanwhile; then the group breaks."""
        with self._asking:
            if self._error is None and not self._ended:
                try:
                    self._communicator.check_async_error()
                except Exception as error:  # CuPy does not know the names of all of them
                    self._error = self._nccl_error(f"{type(error).__name__}: {error}")
            if self._error is None:
                self._error = self._land()
        if self._error is not None:
            self._break(self._error)
        return self._error

    def abort(self) -> None:
        """End what is under way, and give NCCL's memory back, within a deadline."""
        self._finish("abort")

    def close(self) -> None:
        """Destroy the communicator: all that was under way has ended."""
        self._finish("destroy")

    def end(self) -> None:
        """Let go because the process ends; gently if nothing is under way: others may be at their last call still."""
        try:
            idle = all(flight.has_landed() for flight in list(self._flights))
        except DeviceError:
            idle = False
        self._finish("destroy" if idle else "abort")

    def _finish(self, verb: str) -> None:
        self._stop.set()
        with self._asking, self._gate:
            if self._ended:
                return
            self._ended = True
        with self._gate:
            # gpu-wait: the_end_waits_until_nobody_is_inside
            if not self._gate.wait_for(lambda: not self._inside, _LEFT_WITHIN):
                verb = "abort"

        def finish() -> None:
            # After a fault CUDA answers everything with it; whoever waited for the GPU was told.
            allow_captures()
            with contextlib.suppress(Exception), self._device:
                getattr(self._communicator, verb)()

        thread = threading.Thread(target=finish, name=f"zerort-{verb}", daemon=True)
        thread.start()
        thread.join(_DEADLINE)
        if thread.is_alive():
            warnings.warn(
                f"Expected NCCL to {verb} {self._title} within {_DEADLINE:.0f} s, got no answer. The GPU stays busy "
                "until this process ends: end it.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _look(self) -> None:
        allow_captures()
        with self._device:
            while not self._stop.wait(_EVERY):  # gpu-wait: an_entry_that_does_not_return
                error = self._judge()
                if error is not None:
                    self._error = error
                    self._break(error)

    def _break(self, error: CollectiveError) -> None:
        if not self._ended:
            with contextlib.suppress(Exception):  # telling others must not keep the GPU from being freed
                self._on_break(error)
            self.abort()

    def _why_ended(self, text: str) -> CollectiveError:
        if self._error is not None:
            return type(self._error)(*self._error.args)
        return CollectiveError(f"Expected {self._title} open for {text}, got it ended meanwhile. Open a new group.")

    def _nccl_error(self, found: str) -> RankFailedError:
        # NCCL says that something went wrong; the host, perhaps a moment later, with whom.
        until, trouble = time.monotonic() + _NAMED_WITHIN, self._trouble()
        while not trouble and time.monotonic() < until:
            time.sleep(0.02)
            trouble = self._trouble()
        return RankFailedError(
            f"Expected every rank of {self._title} to finish {self._latest}, got an error of NCCL on rank "
            f"{self._rank}: {found}{f'; {trouble.text}' if trouble else ''}. Nothing that was under way can be relied "
            "on. Run with NCCL_DEBUG=WARN to see its cause, then open a new group."
        )

    def _land(self) -> CollectiveError | None:
        """Forget the calls that have ended; return an error if the GPU had a fault, so that none does any more."""
        try:
            while self._flights and self._flights[0].has_landed():
                self._flights.popleft()
        except DeviceError as error:
            return RankFailedError(
                f"Expected every rank of {self._title} to finish {self._flights[0].text}, got a fault of rank "
                f"{self._rank}'s GPU: {error}"
            )
        return None

    def _judge(self) -> CollectiveError | None:
        """Return why the oldest call under way can no longer end; None if it may."""
        with self._asking:
            self._error = self._error or self._land()
            flight = self._flights[0] if self._flights else None
        if flight is None:
            self._seen_at = None
            return None
        now = time.monotonic()
        found = self.look()
        if found is not None:
            return found
        trouble = self._trouble()
        if trouble is not None:
            self._seen_at = self._seen_at or now
            if not trouble.in_flight_may_finish or now - self._seen_at > min(_GRACE, self._timeout):
                return RankFailedError(
                    f"Expected every rank of {self._title} to finish {flight.text}, got {trouble.text}. Look at the "
                    "output of the rank that failed or left, then open a new group."
                )
        if now - flight.began > self._timeout:
            return CollectiveTimeoutError(
                f"Expected {self._title} to finish {flight.text} within {self._timeout:.1f} s, got nothing on rank "
                f"{self._rank}: {flight.held_up_by}. Set ZERORT_TIMEOUT=seconds to wait longer."
            )
        return None
