"""`NcclWatch`: what watches over calls that are on the GPU, and ends them when they can no longer end by themselves.

A kernel of NCCL's that waits for a lost rank waits for ever, and so does whoever waits for the GPU. So while calls are
under way a thread looks, ten times a second, whether NCCL reports an error, another rank has failed or gone, or time is
up. Then the group breaks: the other ranks are told, and the communicator is aborted, which frees the GPU. May import:
errors, device.cuda_library.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerort.device.cuda_library import has_passed
from zerort.errors import CollectiveError, CollectiveTimeoutError, DeviceError, RankFailedError

__all__ = ["NcclWatch"]

_EVERY = 0.1
"""Seconds between two looks."""

_GRACE = 3.0
"""Seconds that a call gets to end after a rank was seen to have gone: it may have done its part of it before."""

_NAMED_WITHIN = 1.0
"""Seconds in which the host gets to say which rank an error of NCCL comes from."""

_DEADLINE = 10.0
"""Seconds that NCCL gets to abort or to end."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A call that is on the GPU."""

    text: str
    event: Any
    began: float


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
        trouble: Callable[[], str],
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
        self._thread: threading.Thread | None = None
        self._ended = threading.Lock()  # taken once, by whoever aborts or destroys the communicator
        self._asking = threading.Lock()

    def follow(self, text: str, event: Any) -> None:
        """Watch a call until its event has fired."""
        self._latest = text
        self._flights.append(_Flight(text, event, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name=f"zerort-watch {self._title}", daemon=True)
            self._thread.start()

    def look(self) -> CollectiveError | None:
        """Return the error that the group has, or that NCCL or the GPU has found meanwhile; then the group breaks."""
        with self._asking:
            if self._error is None and not self._ended.locked():
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
            idle = all(has_passed(flight.event) for flight in list(self._flights))
        except DeviceError:
            idle = False
        self._finish("destroy" if idle else "abort")

    def _finish(self, verb: str) -> None:
        self._stop.set()
        with self._asking:
            if not self._ended.acquire(blocking=False):
                return

        def finish() -> None:
            with self._device:
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
        with self._device:
            while not self._stop.wait(_EVERY):
                error = self._judge()
                if error is not None:
                    self._error = error
                    self._break(error)

    def _break(self, error: CollectiveError) -> None:
        if not self._ended.locked():
            with contextlib.suppress(Exception):  # telling others must not keep the GPU from being freed
                self._on_break(error)
            self.abort()

    def _nccl_error(self, found: str) -> RankFailedError:
        # NCCL says that something went wrong; the host, perhaps a moment later, with whom.
        until, trouble = time.monotonic() + _NAMED_WITHIN, self._trouble()
        while not trouble and time.monotonic() < until:
            time.sleep(0.02)
            trouble = self._trouble()
        return RankFailedError(
            f"Expected every rank of {self._title} to finish {self._latest}, got an error of NCCL on rank "
            f"{self._rank}: {found}{f'; {trouble}' if trouble else ''}. Nothing that was under way can be relied on. "
            "Run with NCCL_DEBUG=WARN to see its cause, then open a new group."
        )

    def _land(self) -> CollectiveError | None:
        """Forget the calls that have ended; return an error if the GPU had a fault, so that none does any more."""
        try:
            while self._flights and has_passed(self._flights[0].event):
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
        if trouble:
            self._seen_at = self._seen_at or now
            if now - self._seen_at > min(_GRACE, self._timeout):
                return RankFailedError(
                    f"Expected every rank of {self._title} to finish {flight.text}, got {trouble}. Look at the output "
                    "of the rank that failed or left, then open a new group."
                )
        if now - flight.began > self._timeout:
            return CollectiveTimeoutError(
                f"Expected {self._title} to finish {flight.text} within {self._timeout:.1f} s, got nothing on rank "
                f"{self._rank}: a rank's GPU is stuck, or busy with something else. Set ZERORT_TIMEOUT=seconds to wait "
                "longer."
            )
        return None
