"""`StoreOperation`: reads or writes of a store that end together; the event of their Ticket.

    queued ──> asked: all who work on it are known ──> done: all parts have ended, well or not

    store           parts                                               follows others that touch the same bytes
    NvmeStore       threads that share its blocks, and their checksums  when these have ended
    BridgedStore    blocks, as asked of the store below                 when these were asked for
    a pipeline      writes that begin when a GPU has computed           –

Whoever works on it calls `attempt`: the first error is the operation's, and nothing more is attempted. Memory is its
owner's again when all parts have ended, also if one of them failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from zerort import forks
from zerort.device import Ticket

__all__ = ["Span", "StoreOperation"]

T = TypeVar("T")


class Span(NamedTuple):
    """The bytes of a value that an operation touches."""

    name: str
    """The value."""
    begin: int
    """The first byte."""
    end: int
    """One past the last."""
    writes: bool
    """Whether it changes them."""

    def conflicts(self, other: Span) -> bool:
        """Say whether operations on the two spans have to keep their order.

        >>> Span("a", 0, 8, writes=True).conflicts(Span("a", 4, 12, writes=False))
        True
        >>> Span("a", 0, 8, writes=False).conflicts(Span("a", 4, 12, writes=False))
        False
        """
        meet = self.name == other.name and self.begin < other.end and other.begin < self.end
        return meet and (self.writes or other.writes)

    def __str__(self) -> str:
        return f"{'Write' if self.writes else 'Read'} of bytes {self.begin} to {self.end} of {self.name!r}"


class StoreOperation:
    """One read or write of some bytes of a value, or several writes under one name, in parts.

    Args:
        span: The bytes that it touches; None: of several values, in an order that others see to.
        title: What to call it in errors; the span says it if empty.
        after: The operations before it that touch the same bytes.

    >>> from zerort.device import Done
    >>> operation = StoreOperation(title="Sums")
    >>> operation.attempt(lambda: operation.parts.append(Done(1 + 1)))
    >>> operation.done()
    False
    >>> operation.asked.set()
    >>> operation.done()
    True
    """

    __slots__ = ("_after", "_generation", "_seen", "asked", "error", "parts", "span", "title")

    def __init__(self, span: Span | None = None, *, title: str = "", after: Sequence[StoreOperation] = ()) -> None:
        self.span = span
        self.title = title
        self.asked = threading.Event()
        """Set when all who work on it are known. They may add parts while they do."""
        self.parts: list[Ticket[Any]] = []
        self.error: BaseException | None = None
        """What an attempt has raised."""
        self._seen = False  # whether somebody was told of its error
        self._after = tuple(after)
        self._generation = forks.generation()

    @property
    def writes(self) -> bool:
        """Whether it changes bytes of a value."""
        return self.span is not None and self.span.writes

    def conflicts(self, span: Span) -> bool:
        """Say whether an operation on ``span`` has to come after this one."""
        return self.span is not None and self.span.conflicts(span)

    def is_of(self, name: str) -> bool:
        """Say whether it touches bytes of a value."""
        return self.span is not None and self.span.name == name

    def follow_asked(self) -> None:
        """Wait until those before it were asked for."""
        for earlier in self._after:
            earlier.asked.wait()  # gpu-wait: a_read_comes_after_the_write_before_it
        self._after = ()  # or a long line of them would never be freed

    def follow_ended(self) -> None:
        """Wait until those before it have ended."""
        for earlier in self._after:
            earlier.wait_ended()
        self._after = ()

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do some of the work. Raises nothing: the error belongs to whoever waits, and nothing more is attempted."""
        if self.error is None:
            try:
                return work()
            except BaseException as error:
                self.error = self.error or error
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
        error = self.wait_ended(timeout)
        if error is not None:
            self._seen = True
            raise error

    def unseen_error(self) -> BaseException | None:
        """Wait for its end, and return the error that nobody has been told of, if it is a write's."""
        error = self.wait_ended()
        return error if self.writes and not self._seen else None

    def wait_ended(self, timeout: float | None = None) -> BaseException | None:
        """Wait until all parts have ended, and return what one of them raised.

        Raises:
            TimeoutError: Not after ``timeout`` seconds.
        """
        if self._generation != forks.generation() and not self.done():
            raise forks.inherited("a read or write of a store")
        until = None if timeout is None else time.monotonic() + timeout
        if not self.asked.wait(timeout):  # gpu-wait: TestBehindABridge
            raise self._late(timeout)
        failed: BaseException | None = None
        for part in self.parts:  # also those that come while we wait
            try:
                part.wait(None if until is None else max(0.0, until - time.monotonic()))  # gpu-wait: TestBehindABridge
            except TimeoutError as error:  # noqa: PERF203
                if not part.done():
                    raise self._late(timeout) from error
                failed = failed or error
            except Exception as error:  # of its own: a GPU's part may say so before it counts as done
                failed = failed or error
        return failed or self.error

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"{self.title or self.span} has not ended after {timeout} s. It goes on; wait again.")
