"""Calls that are made again: which of them keep their shortcut, and what they return."""

import copy

import numpy as np
import pytest

from zerort import native
from zerort.comm import open_group
from zerort.comm.guard.stance import Stance

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


def more_often_than_one_is_made_anew(call):
    for _ in range(20):
        call()


def test_behind_queued_work_a_shortcut_waits(group, call, monkeypatch):
    before = shortcut_of(group)
    with monkeypatch.context() as patch:
        patch.setattr(group._calls, "_queue", ["work that nobody has begun"])
        more_often_than_one_is_made_anew(call)
    call()
    assert shortcut_of(group) is before


def test_while_ranks_differ_a_shortcut_waits(group, call):
    before, differences = shortcut_of(group), group.differences
    differences.is_known = True
    with differences.having(Stance(turn=1)):
        more_often_than_one_is_made_anew(call)
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
