"""An order: epochs of their own, batches that end with their epoch, positions that say where a run is."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerort as zr
from zerort.buffer import Leaves
from zerort.data import Order, Share
from zerort.errors import CallError


@given(length=st.integers(1, 50), batch=st.integers(1, 60), epochs=st.integers(0, 3))
def test_batches_tile_every_epoch(length, batch, epochs):
    order = Order(length=length, batch=batch, seed=7)
    batches = list(order.batches(epochs=epochs))
    assert len(batches) == order.batch_count(0, epochs * length)
    taken = np.concatenate([np.empty(0, np.int64), *batches])
    for epoch in range(epochs):
        np.testing.assert_array_equal(np.sort(taken[epoch * length : (epoch + 1) * length]), np.arange(length))
    assert all(len(one) == batch for one in batches if len(one) != (length % batch or batch))


@given(length=st.integers(1, 50), batch=st.integers(1, 60), start=st.integers(0, 150))
def test_a_run_that_goes_on_gets_what_is_left(length, batch, start):
    order = Order(length=length, batch=batch, seed=7)
    left = list(order.batches(start=start, epochs=3))
    assert len(left) == order.batch_count(start, 3 * length)
    whole = np.concatenate([*order.batches(epochs=3)])
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.int64), *left]), whole[start:])


def test_epochs_and_seeds_differ():
    orders = [
        Order(length=100, batch=100, seed=seed).indices(first, first + 100) for seed in (1, 2) for first in (0, 100)
    ]
    assert len({tuple(one.tolist()) for one in orders}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"length": 2.0}, {"length": True}, {"batch": 0}, {"seed": -1}, {"seed": None}, {"name": ""}],
)
def test_what_cannot_be_an_order_is_refused_by_name(wrong):
    with pytest.raises(CallError, match=next(iter(wrong))):
        zr.data.Order(**{"length": 10, "batch": 2, **wrong})


@given(
    count=st.integers(0, 300),
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
)
def test_shares_tile_a_batch_in_proportion(count, weights):
    parts = [Share(parts=len(weights), mine=range(at, at + 1), weights=tuple(weights)) for at in range(len(weights))]
    bounds = [bounds for part in parts for bounds in part.of(count)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    for (first, last), weight in zip(bounds, weights, strict=True):
        assert abs(last - first - count * weight / sum(weights)) <= 1
        assert weight or first == last


@given(count=st.integers(0, 100), leaves=st.integers(1, 12), cuts=st.data())
def test_leaves_are_the_same_whoever_computes_them(count, leaves, cuts):
    """NumPy's own split of a rank's part gives the leaves that it gives of the whole."""
    ranks = cuts.draw(st.integers(1, leaves))
    rank = cuts.draw(st.integers(0, ranks - 1))
    in_turn = cuts.draw(st.booleans())
    own = [*Leaves(leaves, ranks, in_turn=in_turn).of(rank)]
    own += own[-1:] * cuts.draw(st.integers(0, 1))  # computed again
    taken = np.concatenate([np.arange(*bounds) for bounds in Share(parts=leaves, mine=own).of(count)])
    whole = np.array_split(np.arange(count), leaves)
    for leaf, at in zip(np.array_split(taken, len(own)), own, strict=True):
        np.testing.assert_array_equal(leaf, whole[at])
