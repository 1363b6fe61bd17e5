"""Ranks of a node that leave together know it, all of them or none."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from zerort import native
from zerort.comm.node import NodeTransport, open_control
from zerort.config import GroupOptions


@pytest.fixture
def ranks():
    """Two transports of one node, as if in two processes."""
    control = open_control(2, "/dev/shm")
    made = [
        NodeTransport(control, rank, 2, name="world", options=GroupOptions(timeout=20.0), in_native=native.AVAILABLE)
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.start(), made))
    yield made
    for one in made:
        one.close()
    if os.path.exists(control):
        os.unlink(control)


def test_together(ranks):
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.all_leave(within=20.0), ranks)) == [True, True]


def test_whoever_leaves_later_hears_that_the_others_left_alone(ranks):
    first, last = ranks
    assert not first.all_leave(within=0.02)
    assert not last.all_leave(within=20.0)


def test_a_rank_that_went_without_a_word_does_not_leave_with_the_others(ranks):
    first, gone = ranks
    gone.leave()
    assert not first.all_leave(within=20.0)
