"""Calls that are made again: which of them keep their shortcut, and what they return."""

import copy
import functools
import gc
import threading
import weakref

import numpy as np
import pytest

import zerort
from zerort import native, trace
from zerort.comm import open_group
from zerort.comm.guard.stance import Stance
from zerort.comm.transport import STALE
from zerort.device import Done, Ticket, owns
from zerort.errors import CallError, CollectiveError

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="shortcuts are native")


@pytest.fixture
def group():
    with open_group(kind="node") as group:
        yield group


@pytest.fixture
def source():
    return np.arange(8.0)


@pytest.fixture(params=[True, False], ids=["out", "no out"])
def call(request, group, source):
    """An all_reduce that has a shortcut by now."""
    out = np.empty(8) if request.param else None

    def start():
        return group.all_reduce(source, out=out)

    def call():
        np.testing.assert_array_equal(start().wait(), source)

    call.start = start
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
        stream.submit(functools.partial(done.append, number))  # if the worker is slow, it is there when the call comes
        call()
        assert len(done) == number + 1
    call()
    assert shortcut_of(group) is before


def test_while_another_thread_has_the_turn_a_call_is_queued(group, source, call):
    has, go = threading.Event(), threading.Event()

    def hold():
        with group._calls._turn:
            has.set()
            go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    has.wait(60)
    ticket = call.start()
    assert not ticket.done()
    go.set()
    np.testing.assert_array_equal(ticket.wait(60), source)
    holder.join()


def test_work_of_the_stream_itself_takes_no_shortcut(group, call):
    inner = group._calls._host_stream.submit(call.start).wait(60)
    assert type(inner) is Ticket
    inner.wait(60)


def test_a_trace_has_calls_that_are_made_again(group, call):
    trace.enable()
    try:
        call()
        assert {"meet", "move"} <= {span.name for span in trace.spans()}
    finally:
        trace.disable()
        trace.reset()


def test_while_ranks_differ_a_shortcut_waits(group, call):
    (known,), differences = group._calls._known.values(), group.differences
    known.shortcut = shortcut = Shortcut(lambda: STALE)
    differences.is_known = True
    with differences.having(Stance(turn=1)):
        for _ in range(20):
            call()
    assert shortcut.numbers == []
    differences.forget()
    call()
    assert len(shortcut.numbers) == 1


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
    monkeypatch.setattr(group._calls, "_launch", None)
    assert type(call.start()) is Done


def test_calls_that_zerort_makes_for_a_user_are_known_by_the_users_line(group, source, monkeypatch):
    inside = {}
    exec(compile("def call(group, source): return group.all_reduce(source)", zerort.__file__, "exec"), inside)
    for number in range(4):
        if number == 3:
            monkeypatch.setattr(group._calls, "_launch", None)
        ticket = inside["call"](group, source)
    assert type(ticket) is Done


def test_calls_are_counted_once(group, source, call):
    made, counted = group.made, trace.counters()["all_reduce"]
    for _ in range(5):
        call()
    group.all_reduce(source[:4]).wait()
    assert group.made == made + 6
    assert trace.counters()["all_reduce"] == counted + 6


class Shortcut:
    """One that ends as it is told to."""

    def __init__(self, end):
        self.end, self.numbers = end, []

    def run(self, number, *arrays):
        self.numbers.append(number)
        return self.end()

    run_new = run


def test_a_call_that_its_shortcut_leaves_in_its_middle_breaks_the_group(group, call):
    def end():
        raise RuntimeError("the memory is gone")

    (known,) = group._calls._known.values()
    known.shortcut = Shortcut(end)
    with pytest.raises(RuntimeError, match="the memory is gone"):
        call()
    assert not owns(group._calls._turn)
    with pytest.raises(CollectiveError, match="the memory is gone"):
        call()


def test_a_stale_shortcut_has_done_nothing(group, call):
    (known,) = group._calls._known.values()
    known.shortcut, made = Shortcut(lambda: STALE), group.made
    call()
    assert group.made == made + 1


def test_a_number_is_taken_with_the_turn(source, monkeypatch):
    """A thread that makes a call while another one is about to make one counts first."""
    between = []

    def is_tracing():
        if between:
            between.pop()()
        return False

    monkeypatch.setattr(trace, "is_enabled", is_tracing)
    with open_group(kind="node") as group:

        def call():
            return group.all_reduce(source).wait()

        for _ in range(3):
            call()
        (known,) = group._calls._known.values()
        known.shortcut = shortcut = Shortcut(lambda: source)
        between.append(lambda: group.barrier().wait())
        call()
        assert shortcut.numbers == [4]
        assert group.made == 5


@pytest.mark.parametrize("argument", ["name", "reduction", "counts", "source"])
def test_arguments_that_cannot_be_looked_up_leave_the_group_usable(group, source, argument):
    wrong = {"name": None, "reduction": None, "counts": ([1], [2]), "source": "text"}[argument]
    arguments = {"source": source, argument: wrong}
    with pytest.raises(CallError):
        group.reduce_scatter(**arguments).wait()
    assert group.all_reduce(source).wait().tolist() == source.tolist()


def test_an_error_of_a_source_leaves_the_group_usable(group, source):
    class Source:
        @property
        def shape(self):
            raise RuntimeError("no shape yet")

    with pytest.raises(Exception, match=r"no shape yet|source"):
        group.all_reduce(Source()).wait()
    assert group.all_reduce(source).wait().tolist() == source.tolist()


def test_an_interrupt_of_the_lookup_is_not_lost(group):
    class Source:
        shapes = iter([KeyboardInterrupt])

        @property
        def shape(self):
            for error in self.shapes:
                raise error
            return (8,)

    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(Source())
    assert group._transport.broken is not None


@pytest.mark.parametrize("closes", [True, False])
def test_a_group_that_its_joins_refer_to_is_collected(closes):
    group = open_group(kind="node")
    group.all_reduce(np.ones(4)).wait()
    group.differences.joins["a unit"] = functools.partial(id, group)
    if closes:
        group.close()
    launcher = weakref.ref(group._calls)
    del group
    gc.collect()
    assert launcher() is None
