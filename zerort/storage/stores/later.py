"""`Later`: the event of work in parts that are not all known yet: some are asked for only when others have ended.

queued ──> asked: all parts are known ──> done: all of them have ended
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from zerort.device import Ticket, joined

__all__ = ["Later"]

T = TypeVar("T")


class Later:
    """Work in parts. Whoever does it calls `attempt`, appends to `parts`, and at last sets `asked`.

    Args:
        what: What to call it in errors.

    >>> from zerort.device import Done
    >>> later = Later("sums")
    >>> later.attempt(lambda: later.parts.append(Done(1 + 1)))
    >>> later.done()
    False
    >>> later.asked.set()
    >>> later.done()
    True
    """

    def __init__(self, what: str) -> None:
        self.asked = threading.Event()
        self.parts: list[Ticket[Any]] = []
        """All of them once it is asked."""
        self._what = what
        self._failure: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do some of the work. Raises nothing: the error belongs to whoever waits, and nothing more is attempted."""
        if self._failure is None:
            try:
                return work()
            except BaseException as error:
                self._failure = error
        return None

    def done(self) -> bool:
        """Say whether all parts have ended, well or not."""
        return self.asked.is_set() and all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all parts have ended.

        Raises:
            TimeoutError: Not after ``timeout`` seconds.
            BaseException: What one of them raised.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self.asked.wait(timeout):  # gpu-wait: TestBehindABridge
            raise TimeoutError(f"{self._what} not done after {timeout} s.")
        # gpu-wait: TestBehindABridge
        joined(self.parts, result=None).wait(None if until is None else max(0.0, until - time.monotonic()))
        if self._failure is not None:
            raise self._failure
