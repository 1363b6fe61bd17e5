"""`Passage`: one read or write that passes through slots in blocks; the event of its Ticket.

    queued ──> asked: all of its blocks were asked of the store below ──> done: all of them have ended

May import: device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zerort.device import Ticket, joined

__all__ = ["Passage"]

T = TypeVar("T")


class Passage:
    """One read or write of some bytes of a value.

    Args:
        name: The value.
        begin: The first byte.
        end: One past the last.
        writes: Whether it changes them.
        after: What has to be asked for before it is.
    """

    __slots__ = ("_after", "_failure", "asked", "begin", "end", "name", "parts", "seen", "writes")

    def __init__(self, name: str, begin: int, end: int, *, writes: bool, after: Sequence[Passage]) -> None:
        self.name, self.begin, self.end, self.writes = name, begin, end, writes
        self.asked = threading.Event()
        self.parts: list[Ticket[Any]] = []
        """Of its blocks; all of them once it is asked."""
        self.seen = False
        """Whether somebody was told of its error."""
        self._after = tuple(after)
        self._failure: BaseException | None = None

    def conflicts(self, name: str, begin: int, end: int, *, writes: bool) -> bool:
        """Say whether one of this range has to be asked for after this one."""
        mine = self.name == name and self.begin < end and begin < self.end
        return mine and (self.writes or writes) and not self.asked.is_set()

    def hold_back(self) -> None:
        """Wait until those before it were asked."""
        for earlier in self._after:
            earlier.asked.wait()
        self._after = ()

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do a part of the work. Raises nothing: the error belongs to whoever waits, and nothing more is attempted."""
        if self._failure is None:
            try:
                return work()
            except BaseException as error:
                self._failure = error
        return None

    def done(self) -> bool:
        """Say whether it has ended, well or not."""
        return self.asked.is_set() and all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all blocks have ended.

        Raises:
            TimeoutError: Not after ``timeout`` seconds.
            BaseException: What one of them raised.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self.asked.wait(timeout):
            raise TimeoutError(f"{self} is not done after {timeout} s.")
        try:
            joined(self.parts, result=None).wait(None if until is None else max(0.0, until - time.monotonic()))
            if self._failure is not None:
                raise self._failure
        except Exception:
            self.seen = self.seen or self.done()
            raise

    def settle(self) -> Exception | None:
        """Wait until it has ended, and return the error that nobody has been told of, if it is a write's."""
        seen = self.seen
        try:
            self.wait()
        except Exception as error:
            self.seen = seen
            return error if self.writes and not seen else None
        return None

    def __repr__(self) -> str:
        return f"{'Write' if self.writes else 'Read'} of bytes {self.begin} to {self.end} of {self.name!r}"
