"""Calls that are made again: which of them keep their shortcut, and what they return."""

import copy
import functools
import threading

import numpy as np
import pytest

from zerort import native
from zerort.comm import open_group
from zerort.comm.guard.stance import Stance
from zerort.device import HostEvent, Ticket, owns
from zerort.errors import CollectiveError

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="shortcuts are native")


@pytest.fixture
def group():
    with open_group(kind="node") as group:
        yield group


@pytest.fixture(params=[True, False], ids=["out", "no out"])
def call(request, group):
    """An all_reduce that has a shortcut by now."""
    source = np.arange(8.0)
    out = np.empty(8) if request.param else None

    def call():
        np.testing.assert_array_equal(group.all_reduce(source, out=out).wait(), source)

    for _ in range(3):
        call()
    assert shortcut_of(group)
    return call


def shortcut_of(group):
    (known,) = group._calls._known.values()
    return known.shortcut


def test_behind_queued_work_a_shortcut_waits(group, call):
    before, stream = shortcut_of(group), group._calls._host_stream
    done = []
    for number in range(20):  # more often than a stale shortcut is made anew
        event = HostEvent(stream)
        stream.queue.append((functools.partial(done.append, number), Ticket(event), event, "not begun"))
        call()
        stream._bell.ring()  # for the work above
        assert len(done) == number + 1
    call()
    assert shortcut_of(group) is before


def test_while_ranks_differ_a_shortcut_waits(group, call):
    before, differences = shortcut_of(group), group.differences
    differences.is_known = True
    with differences.having(Stance(turn=1)):
        for _ in range(20):
            call()
    differences.forget()
    call()
    assert shortcut_of(group) is before


def test_a_stale_shortcut_is_made_anew(group, call):
    before = shortcut_of(group)
    group.zeros(8, "float32")  # another window
    call()
    call()
    assert shortcut_of(group)
    assert shortcut_of(group) is not before


def test_calls_without_a_result_return_none(group):
    tickets = [group.barrier() for _ in range(4)]
    assert [ticket.wait() for ticket in tickets] == [None] * 4
    assert all(ticket.done() for ticket in tickets)


def test_a_ticket_of_a_call_that_is_done_can_be_copied(group):
    ticket = group.all_reduce(np.ones(4))
    assert copy.deepcopy(ticket).wait().tolist() == [1.0] * 4


def test_it_is_the_shortcut_that_makes_a_call_again(group, call, monkeypatch):
    def launch(*arguments):
        raise AssertionError("checked anew")

    monkeypatch.setattr(group._calls, "_launch", launch)
    call()


def test_a_call_that_its_shortcut_leaves_in_its_middle_breaks_the_group(group, call):
    class Shortcut:
        def run(self, *arguments):
            raise RuntimeError("the memory is gone")

        run_new = run

    (known,) = group._calls._known.values()
    known.shortcut = Shortcut()
    with pytest.raises(RuntimeError, match="the memory is gone"):
        call()
    assert not owns(group._calls._turn)
    with pytest.raises(CollectiveError, match="the memory is gone"):
        call()


def test_an_interrupt_of_the_lookup_is_not_lost(group, call, monkeypatch):
    class Shape:
        @property
        def shape(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(Shape())
    assert group._transport.broken is not None


def test_threads_take_turns(group):
    sources = [np.full(4, float(number)) for number in range(4)]
    found = []

    def work(source):
        found.extend(float(group.all_reduce(source).wait()[0]) == source[0] for _ in range(300))

    threads = [threading.Thread(target=work, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 1200
