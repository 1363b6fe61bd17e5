"""A broken group is closed while a thread of this process is at one of its calls: its memory stays as long as that."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zerort as zr
from zerort import native
from zerort.comm import launch
from zerort.comm.transports.node.meeting import open_control
from zerort.comm.transports.node.transport import NodeTransport
from zerort.config import GroupOptions
from zerort.errors import ZerortError

OPTIONS = GroupOptions(timeout=20.0, staging_nbytes=64 * 1024, eager_nbytes=0)


class AtWork:
    """Rank 0 of two, whose communication thread has met the other rank and stands before the move."""

    def __init__(self) -> None:
        self.arrived, self.gate = threading.Event(), threading.Event()
        control = open_control(2, "/dev/shm")
        groups: list[Any] = [None, None]

        def open_rank(rank: int) -> None:
            transport = NodeTransport(
                control.path, rank, 2, name="world", options=OPTIONS, in_native=native.AVAILABLE, sees_processes=True
            )
            transport.start()
            groups[rank] = zr.Group(transport)

        threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        control.close()
        self.group, self.other = groups
        transport = self.group._transport
        self.mapped = weakref.ref(transport.memory._stage.bytes)
        move = transport.move

        def gated(call: Any) -> None:
            self.arrived.set()
            assert self.gate.wait(60.0)
            move(call)

        transport.move = gated
        self.tickets = [group.all_gather(np.full(500, rank + 1.0)) for rank, group in enumerate(groups)]
        assert self.arrived.wait(60.0)
        self.worker = self.group._calls._host_stream._worker

    def finish(self) -> None:
        """Let the thread out, and see it end."""
        self.gate.set()
        if self.worker is not None:
            self.worker.join(60.0)
            assert not self.worker.is_alive()


@pytest.fixture
def at_work() -> Iterator[AtWork]:
    work = AtWork()
    yield work
    work.gate.set()
    for group in (work.group, work.other):
        if group is not None:
            group.give_up("test", KeyboardInterrupt())
            group.close()


def gathered(ticket: Any) -> None:
    """Check what the call that was under way has delivered."""
    np.testing.assert_array_equal(ticket.wait(timeout=60.0), np.repeat([1.0, 2.0], 500))


def test_closing_waits_for_a_thread_that_is_coming_out(at_work: AtWork) -> None:
    group, stream = at_work.group, at_work.group._calls._stream
    abandon = stream.abandon

    def let_out() -> None:
        abandon()
        at_work.gate.set()

    stream.abandon = let_out
    group.give_up("test", KeyboardInterrupt())
    group.close()
    gathered(at_work.tickets[0])
    gc.collect()
    assert at_work.mapped() is None, "the windows of a closed group are given back at once"


def test_memory_of_a_closed_group_stays_for_a_thread_that_is_still_at_it(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LAST_CALL", 0.01)
    at_work.group.give_up("test", KeyboardInterrupt())
    at_work.group.close()
    assert at_work.mapped() is not None
    at_work.finish()
    gathered(at_work.tickets[0])
    at_work.group, at_work.worker, at_work.tickets[0] = None, None, None
    gc.collect()
    assert at_work.mapped() is None, "it goes with the thread and the group"


def test_an_interrupt_while_closing_leaves_the_memory_of_what_is_queued(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LAST_CALL", 0.01)
    stream = at_work.group._calls._stream

    def interrupted() -> None:
        stream.abandon()
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        at_work.group.close()
    assert at_work.mapped() is not None
    at_work.finish()
    gathered(at_work.tickets[0])


def test_a_broken_group_keeps_its_windows_until_it_is_closed(at_work: AtWork) -> None:
    at_work.gate.set()
    for ticket in at_work.tickets:
        gathered(ticket)
    arrays: list[Any] = [None, None]

    def make(rank: int, group: zr.Group) -> None:
        arrays[rank] = group.zeros(500, "float32")

    threads = [threading.Thread(target=make, args=pair) for pair in enumerate((at_work.group, at_work.other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    at_work.group.give_up("test", KeyboardInterrupt())
    at_work.group.release_local(arrays[0])
    assert at_work.group._transport.window_of(arrays[0]) > 0
    with pytest.raises(ZerortError):
        at_work.group.barrier().wait()
