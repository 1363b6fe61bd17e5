"""Ranks of a node that leave together know it, all of them or none."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from zerort import native
from zerort.comm.transports.node.meeting import open_control
from zerort.comm.transports.node.transport import NodeTransport
from zerort.config import GroupOptions


@pytest.fixture
def ranks():
    """Two transports of one node, as if in two processes."""
    control, options = open_control(2, "/dev/shm"), GroupOptions(timeout=20.0)
    made = [
        NodeTransport(
            control.path, rank, 2, name="world", options=options, in_native=native.AVAILABLE, sees_processes=True
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.start(), made))
    yield made
    for one in made:
        one.close()
    control.close()


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
