"""Ctrl-C in the middle of a host stream's own lines: tickets still end, nothing is done twice, and closing returns."""

from __future__ import annotations

import collections
import contextlib
import random
import signal
import threading
from types import FrameType
from typing import Any

import pytest
from interrupter import Interrupter

from zerort.device import HostStream
from zerort.device.host import stream as module
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
    once, mark, stream = Once(), HostEvent._mark, stream_without_worker()

    def interrupted(event: HostEvent, error: BaseException | None = None) -> None:
        if event._stream is stream:  # other tests' streams may be at work
            if not once.raised:
                event._reached = reached
            once.interrupt()
        mark(event, error)

    monkeypatch.setattr(HostEvent, "_mark", interrupted)
    ticket = stream.submit(lambda: 1)
    assert isinstance(ticket.ready, HostEvent)
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
            self.answer, self.wait, self.recount = self.real.answer, self.real.wait, self.real.recount

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


def use(helping: bool, at: int) -> int:
    """Interrupt a stream's use at a line; whatever was begun ends, others go on. Return how many lines there were."""
    stream, calls = HostStream("interrupted", helping=helping), list[int]()
    interrupter, tickets = Interrupter(at, within=module.__file__), list[Any]()
    with contextlib.suppress(KeyboardInterrupt), interrupter:
        tickets.append(stream.submit(lambda: calls.append(0)))
        tickets.append(stream.submit(lambda: calls.append(1), eager=True))
        tickets[-1].wait()
        tickets.append(stream.submit(lambda: calls.append(2), eager=True))
        tickets.append(stream.submit(lambda: calls.append(3)))
    for ticket in tickets:
        with contextlib.suppress(KeyboardInterrupt):
            ticket.wait(timeout=20.0)
    assert stream.submit(lambda: calls.append(4)).wait(timeout=20.0) is None, at  # by the worker: it is not deaf
    assert stream.submit(lambda: 5, eager=True).wait() == 5, at
    stream._unseen.clear()
    assert close_within(stream), at
    assert calls == sorted(set(calls)), at  # in order, nothing twice
    assert calls[-1] == 4, at
    return interrupter.seen


@pytest.mark.parametrize("helping", [True, False])
def test_an_interrupt_at_any_line_frees_the_stream(helping: bool) -> None:
    lines = use(helping, 10**9)
    assert lines > 50
    for at in range(1, lines + 1):
        use(helping, at)


def close_at(at: int) -> int:
    """Interrupt a stream's closing at a line, then close it again. Return how many lines there were."""
    stream, interrupter = HostStream("interrupted"), Interrupter(at, within=module.__file__)
    stream.submit(lambda: 1).wait(timeout=20.0)  # so that it has a worker, which closing waits for
    with contextlib.suppress(KeyboardInterrupt), interrupter:
        stream.close()
    assert close_within(stream), at
    return interrupter.seen


def test_a_stream_closes_after_an_interrupt_at_any_line_of_closing() -> None:
    lines = close_at(10**9)
    assert lines > 5
    for at in range(1, lines + 1):
        close_at(at)


@pytest.mark.parametrize("eager", [True, False])
def test_a_signal_anywhere_frees_the_stream(eager: bool) -> None:
    """Python looks for signals inside of lines, too: after each call. Some hundred of these find most places."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        while frame is not None and frame.f_code.co_filename != module.__file__:
            frame = frame.f_back
        if frame is not None and is_armed:
            is_armed = False  # one, not another while the first is dealt with
            raise KeyboardInterrupt

    is_armed, stream, met, by_chance = False, HostStream("interrupted"), 0, random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(1500):
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, by_chance.uniform(2e-6, 2e-4), 1e-3)
            try:
                for _ in range(1000):
                    stream.submit(lambda: 1, eager=eager).wait()
            except KeyboardInterrupt:
                met += 1
            is_armed = False
            assert stream.submit(lambda: 2).wait(timeout=20.0) == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stream._unseen.clear()
    assert close_within(stream)
    assert met > 100


def test_an_interrupt_while_a_worker_begins_leaves_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread comes up after it was forgotten: it ends, and work that must stay on one thread does."""
    once, start, late = Once(), threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if not once.raised:
            late.append(thread)
        once.interrupt()
        start(thread)

    stream, seen = HostStream("interrupted", helping=False), set[int]()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.submit(lambda: 1)
    stream.submit(lambda: seen.add(threading.get_ident())).wait(timeout=20.0)
    start(late[0])
    late[0].join(20.0)
    assert not late[0].is_alive()
    for _ in range(50):
        stream.submit(lambda: seen.add(threading.get_ident())).wait(timeout=20.0)
    assert len(seen) == 1
    assert close_within(stream)


def test_a_worker_hears_of_everything_while_others_help() -> None:
    """Threads that submit and help at once: rings and answers cross, and no piece waits for another ring."""
    stream, done = HostStream("busy"), list[int]()

    def submit(first: int) -> None:
        for number in range(first, first + 2000):
            ticket = stream.submit(lambda number=number: done.append(number), eager=number % 3 == 0)  # type: ignore[misc]
            if number % 2:
                ticket.wait(timeout=20.0 if number % 5 == 0 else None)

    threads = [threading.Thread(target=submit, args=(2000 * one,), daemon=True) for one in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert close_within(stream)
    assert sorted(done) == list(range(6000))
