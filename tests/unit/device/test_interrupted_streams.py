"""Ctrl-C in the middle of a host stream's own lines: tickets still end, nothing is done twice, and closing returns."""

from __future__ import annotations

import collections
import threading
from typing import Any

import pytest

from zerort.device import HostStream
from zerort.device.host.stream import HostEvent
from zerort.native.doorbell import Doorbell, PythonDoorbell


class Once:
    """Raises KeyboardInterrupt when it is first asked to."""

    def __init__(self) -> None:
        self.raised = False

    def interrupt(self) -> None:
        if not self.raised:
            self.raised = True
            raise KeyboardInterrupt


def stream_without_worker(bell: Any = Doorbell) -> HostStream:
    """Return a stream whose worker leaves all work to whoever waits for it: the interrupt is to meet that thread."""
    stream = HostStream("interrupted")
    stream._bell = bell(60.0)
    return stream


def close_within(stream: HostStream, seconds: float = 20.0) -> bool:
    """Close a stream on a thread of its own, and say whether that has returned."""
    closer = threading.Thread(target=stream.close, daemon=True)
    closer.start()
    closer.join(seconds)
    return not closer.is_alive()


@pytest.mark.parametrize("reached", [False, True])
def test_a_ticket_ends_though_an_interrupt_comes_while_it_is_marked(
    monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    once, mark, ours = Once(), HostEvent._mark, list[HostEvent]()

    def interrupted(event: HostEvent, error: BaseException | None = None) -> None:
        if any(event is one for one in ours):  # other tests' streams may still be at work
            if not once.raised:
                event._reached = reached
            once.interrupt()
        mark(event, error)

    monkeypatch.setattr(HostEvent, "_mark", interrupted)
    stream = stream_without_worker()
    ticket = stream.submit(lambda: 1)
    assert isinstance(ticket.ready, HostEvent)
    ours.append(ticket.ready)
    sleeper = ticket.ready._signal_of_sleeper()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert ticket.done()
    assert sleeper.is_set()
    stream._unseen.clear()
    assert stream.submit(lambda: 2).wait() == 2


def test_work_is_not_done_again_though_an_interrupt_keeps_it_in_the_queue() -> None:
    once, calls = Once(), list[int]()

    class Queue(collections.deque[Any]):
        def popleft(self) -> Any:
            once.interrupt()
            return super().popleft()

    stream = stream_without_worker()
    stream.queue = Queue()
    first = stream.submit(lambda: calls.append(1))
    with pytest.raises(KeyboardInterrupt):
        first.wait()
    stream.submit(lambda: calls.append(2)).wait()
    assert first.done()
    assert calls == [1, 2]


@pytest.mark.parametrize("bell", [Doorbell, PythonDoorbell])
@pytest.mark.parametrize("rung", [False, True])
def test_a_stream_works_and_closes_after_an_interrupt_between_queueing_and_ringing(bell: Any, rung: bool) -> None:
    once = Once()

    class Bell:
        def __init__(self) -> None:
            self.real = bell(0.0)
            self.answer, self.wait = self.real.answer, self.real.wait

        def ring(self) -> None:
            if rung or once.raised:
                self.real.ring()
            once.interrupt()

    stream, done = HostStream("interrupted"), list[int]()
    stream._bell = Bell()
    with pytest.raises(KeyboardInterrupt):
        stream.submit(lambda: done.append(1))
    stream.submit(lambda: done.append(2)).wait()
    # Nobody helps with these: the worker has to hear of each.
    for number in (3, 4):
        stream.submit(lambda number=number: done.append(number)).wait(timeout=20.0)  # type: ignore[misc]
    assert done == [1, 2, 3, 4]
    assert close_within(stream)


def test_a_stream_closes_though_an_interrupt_came_before_its_worker_began(monkeypatch: pytest.MonkeyPatch) -> None:
    once, start = Once(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        once.interrupt()
        start(thread)

    stream = HostStream("interrupted")
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.submit(lambda: 1)
    assert stream.submit(lambda: 2).wait(timeout=20.0) == 2
    assert close_within(stream)
