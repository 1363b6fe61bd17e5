"""`Ticket`: a future: an event, a result, and the buffers that are kept alive until the event.

Methods that move bytes return one, and may not have happened yet when they return; methods that return anything else
have happened.
"""

# not-gpu: what a ticket of a GPU waits for is in its own class
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from zerort.typing import Event, Stream

__all__ = ["AllOf", "Done", "Ticket", "joined"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """A promise of ``result``, kept when ``ready`` is done.

    >>> from zerort.device import HostStream
    >>> with HostStream("adder") as stream:
    ...     ticket = stream.submit(lambda: 1 + 1)
    ...     ticket.wait()
    2
    """

    __slots__ = ("_keep", "_result", "ready")

    def __init__(self, ready: Event, *, result: T | None = None, keep: tuple[object, ...] = ()) -> None:
        self.ready = ready
        self._result = result
        self._keep = keep

    def fulfil(self, result: T) -> None:
        """Set the result. Called by the stream that does the work, before it marks the event."""
        self._result = result

    def done(self) -> bool:
        """Say whether the work has ended, well or not, without waiting."""
        return self.ready.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the work has happened and return its result.

        Args:
            timeout: Seconds to wait at most; None waits as long as the work takes.

        Raises:
            TimeoutError: The work is not done after ``timeout`` seconds. It goes on; wait again.
            BaseException: Whatever the work raised.
        """
        self.ready.wait(timeout)
        self._keep = ()
        return self._result  # type: ignore[return-value]

    @property
    def result(self) -> T:
        """The result, without waiting; on a GPU it may still be being written."""
        return self._result  # type: ignore[return-value]

    def on(self, stream: Stream) -> Ticket[None]:
        """Make ``stream`` wait for this work before it goes on with what is submitted to it next."""
        ticket: Ticket[None] = stream.after(self)
        return ticket

    def __repr__(self) -> str:
        return f"Ticket({'done' if self.done() else 'pending'})"


class _Reached:
    """The event of work that was done before anyone could ask: one object for all."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


_REACHED = _Reached()


class Done(Ticket[T]):
    """The Ticket of work that was done at once, as most small collectives are: nothing to wait for, nothing to keep."""

    __slots__ = ()

    def __init__(self, result: T) -> None:
        self.ready = _REACHED
        self._result = result

    def wait(self, timeout: float | None = None) -> T:
        """Return the result."""
        return self._result  # type: ignore[return-value]


class AllOf:
    """The event that is reached when all of several are."""

    __slots__ = ("events",)

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.events = events
        """Some may be of the same kind."""

    def done(self) -> bool:
        """Say whether all have been reached, without waiting."""
        return all(event.done() for event in self.events)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all are reached; raise the first error."""
        until = None if timeout is None else time.monotonic() + timeout
        failures = [_failure(event, None if until is None else until - time.monotonic()) for event in self.events]
        # Raised last: memory is the caller's again only when all have ended.
        for failure in failures:
            if failure is not None:
                raise failure


def _failure(event: Event, timeout: float | None) -> Exception | None:
    try:
        event.wait(None if timeout is None else max(0.0, timeout))
    except Exception as error:
        if not event.done():
            raise  # time is up
        return error
    return None


def joined(tickets: Sequence[Ticket[Any]], *, result: T) -> Ticket[T]:
    """Return the Ticket of ``result`` that is done when all ``tickets`` are. If some failed, it raises the first error.

    >>> joined([Done(1), Done(2)], result="both").wait()
    'both'
    """
    return Ticket(AllOf(tuple(ticket.ready for ticket in tickets)), result=result, keep=tuple(tickets))
