"""The permutation behind an order: each sample once, evenly mixed, the same in every release, in O(1) memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerort.data.permutation import LARGEST, permute


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_every_sample_comes_once(length, seed, epoch):
    found = permute(np.arange(length), length=length, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(np.sort(found), np.arange(length))


@given(length=st.integers(1, LARGEST), data=st.data())
def test_what_stands_at_a_position_does_not_depend_on_what_else_is_asked(length, data):
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    together = permute(np.array(positions), length=length, seed=3, epoch=1)
    assert 0 <= together.min() <= together.max() < length
    assert len(set(together.tolist())) == len(set(positions))
    alone = [permute(np.array([one]), length=length, seed=3, epoch=1)[0] for one in positions]
    assert together.tolist() == alone


def test_a_run_can_be_gone_on_with_for_years():
    """Checkpoints hold a position only: other numbers here would give other samples to runs that go on."""
    assert permute(np.arange(8), length=10, seed=7, epoch=0).tolist() == [9, 2, 4, 5, 3, 8, 0, 1]
    assert permute(np.arange(4), length=10**9, seed=7, epoch=3).tolist() == [309397245, 612763402, 91879521, 278949686]


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, 50_000])
def test_samples_land_anywhere_wherever_they_stood(length):
    """Counts of (where it stood, where it landed), in 16 x 16 cells, and of steps between neighbours: as if drawn."""
    for epoch in range(4):
        found = permute(np.arange(length), length=length, seed=1, epoch=epoch)
        cells = np.histogram2d(np.arange(length), found, bins=16)[0]
        assert chi_square(cells) < 340  # 255 degrees of freedom: 1 in 4,000 by chance
        steps = np.histogram((found[1:] - found[:-1]) % length, bins=256)[0]
        assert chi_square(steps) < 340
    other = permute(np.arange(length), length=length, seed=1, epoch=epoch + 1)
    assert (found == other).sum() < 12  # 1 expected


def test_short_orders_have_all_their_permutations():
    seen = {tuple(permute(np.arange(4), length=4, seed=seed, epoch=0).tolist()) for seed in range(1000)}
    assert len(seen) == 24


def test_a_billion_samples_take_no_memory():
    tracemalloc.start()
    found = permute(np.arange(999_990_000, 1_000_000_000), length=10**9, seed=0, epoch=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.unique(found).size == found.size
    assert peak < 1 << 20


def chi_square(counts):
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum()
