"""Ranks that meet in shared memory, in both forms; here they are objects of one process over the same bytes."""

import resource
import subprocess
import sys

import numpy as np
import pytest

from zerort import native
from zerort.native.rendezvous import BROKEN, MET, WAITING, control_nbytes, is_alive, open_rendezvous

FORMS = [pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built")), False]


@pytest.fixture(params=FORMS, ids=["native", "numpy"])
def ranks(request):
    memory = np.zeros(control_nbytes(3) + 64, np.uint8)
    address = -(-memory.ctypes.data // 64) * 64
    yield [open_rendezvous(address, rank=rank, size=3, spins=1, yields=1, in_native=request.param) for rank in range(3)]
    assert memory.size  # alive until here


def meet(*ranks):
    """Let the ranks arrive in this order; the last but one and those before have not looked yet whether all came."""
    return [rank.part(0.0) for rank in ranks]


def test_a_rank_that_sleeps_through_a_meeting_is_not_told_of_the_next_ones_failure(ranks):
    first, second, sleeper = ranks
    assert meet(sleeper, first, second) == [WAITING, WAITING, MET]
    assert first.wait(0.0) == MET
    assert first.part(0.0) == WAITING
    first.give_up()
    assert sleeper.wait(0.0) == MET
    assert sleeper.part(0.0) == BROKEN
    assert second.part(0.0) == BROKEN


def test_a_rank_that_fails_after_a_meeting_spoils_the_next_one_alone(ranks):
    first, second, sleeper = ranks
    assert meet(sleeper, first, second) == [WAITING, WAITING, MET]
    second.give_up()
    assert [sleeper.wait(0.0), first.wait(0.0)] == [MET, MET]
    assert [sleeper.part(0.0), first.part(0.0)] == [BROKEN, BROKEN]


def test_a_rank_that_comes_late_is_told_so(ranks):
    first, second, late = ranks
    assert meet(first, second) == [WAITING, WAITING]
    first.give_up()
    assert late.part(0.0) == BROKEN
    assert second.wait(0.0) == BROKEN


def test_a_meeting_takes_place_whoever_of_those_who_came_looks(ranks):
    for absent in range(3):
        others = [rank for number, rank in enumerate(ranks) if number != absent]
        assert ranks[absent].part(0.0) == WAITING  # and looks no more, as if it had died
        assert meet(*others)[-1] == MET
        assert others[0].wait(0.0) == MET
        assert ranks[absent].wait(0.0) == MET


def test_the_first_meeting_that_was_given_up_counts(ranks):
    early, other, late = ranks
    late.give_up()
    early.give_up()
    assert [early.part(0.0), other.part(0.0), late.part(0.0)] == [BROKEN] * 3


def test_a_process_that_cannot_be_looked_at_is_not_dead():
    """A rank that has no descriptor left must not take all others for dead."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_alive(child.pid)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            known = is_alive(child.pid)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    finally:
        child.communicate(b"\n")
    assert known
    assert not is_alive(child.pid)
