"""Who came in time has met the others, however late it wakes up; who came late has not. In both forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerort import native
from zerort.native.rendezvous import BROKEN, MET, WAITING, control_nbytes, open_rendezvous


@pytest.fixture(params=[True, False], ids=["native", "NumPy"])
def ranks(request: pytest.FixtureRequest) -> Any:
    """Return two ranks' sides of one meeting place, in one process."""
    if request.param and not native.AVAILABLE:
        pytest.skip("the native module is not built here")
    memory = np.zeros(control_nbytes(2) + 64, np.uint8)
    address = native.address_of(memory) + -native.address_of(memory) % 64
    sides = [
        open_rendezvous(address, rank=rank, size=2, spins=1, yields=1, in_native=request.param) for rank in range(2)
    ]
    yield sides
    assert memory.size  # which the sides read and write until here


def test_a_rank_that_wakes_up_late_has_met_the_others(ranks: Any) -> None:
    """The other has gone on, and given up the next meeting: that is not the one that this rank was at."""
    early, late = ranks
    assert late.part(0.0) == WAITING
    early.part(0.0)
    late.wait(1.0)  # in the NumPy form rank 0 turns the page
    assert early.wait(1.0) == MET
    assert early.part(0.0) == WAITING
    early.give_up()
    assert late.wait(0.0) == MET
    assert late.part(0.0) == BROKEN


def test_a_rank_that_comes_late_finds_the_meeting_given_up(ranks: Any) -> None:
    early, late = ranks
    assert early.part(0.0) == WAITING
    early.give_up()
    assert late.part(1.0) == BROKEN


def test_the_first_meeting_that_was_given_up_counts(ranks: Any) -> None:
    early, late = ranks
    late.give_up()
    early.give_up()
    assert early.part(0.0) == BROKEN
    assert late.part(0.0) == BROKEN
