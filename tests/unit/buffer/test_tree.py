"""Sums in one fixed tree: of whole gradients, or of slices that are folded as they arrive."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.buffer import GradientBucket, Leaves, TreeSum, redistribute
from zerort.buffer.folding import FoldedShard
from zerort.device.slots import Slots
from zerort.layout import FlatLayout, Partition, Placement
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (1000,)})


def value_of(leaf, numel):
    return np.random.default_rng(leaf).standard_normal(numel).astype(np.float32)


def level_by_level(values):
    """The tree as it is drawn: neighbours are paired, one that is left over goes up."""
    while len(values) > 1:
        values = [sum(values[at + 1 : at + 2], values[at]) for at in range(0, len(values), 2)]
    return values[0]


@settings(max_examples=60)
@given(total=st.integers(1, 25), data=st.data())
def test_a_tree_has_the_same_bits_whoever_sums_it(total, data):
    size = data.draw(st.integers(1, min(total, 8)))
    values = [value_of(leaf, 129) for leaf in range(total)]
    leaves = Leaves(total, size)

    def body(group):
        tree = TreeSum(leaves, group.rank, numel=129, dtype=np.dtype("f4"))
        held = tree.nbytes
        for _ in range(2):
            for leaf in leaves.of(group.rank):
                tree.add(values[leaf])
            tree.add(values[0] * np.nan)  # one more than it has is dropped
            out = np.empty(129, np.float32)
            partition = Partition.build(129, size)
            redistribute(
                group,
                out,
                placement=Placement.PARTIAL,
                to=Placement.REPLICATED,
                partition=partition,
                out=out,
                tree=tree,
            ).wait()
            tree.clear()
            assert tree.nbytes == held == leaves.depth * 129 * 4
        return out

    assert [leaf for rank in range(size) for leaf in leaves.of(rank)] == list(range(total))
    assert {len(leaves.of(rank)) for rank in range(size)} <= {leaves.most, leaves.most - 1}
    for found in run_threads(size, body):
        np.testing.assert_array_equal(found, level_by_level(values))


@pytest.mark.parametrize(("total", "depth"), [(1, 1), (2, 2), (8, 4), (24, 5)])
def test_a_tree_keeps_a_sum_per_level(total, depth):
    assert Leaves(total, 1).depth == depth
    assert Leaves(total, 1).nodes(0) == (((total - 1).bit_length(), 0),)
    assert Leaves(8, 2).nodes(1) == ((2, 1),)
    assert Leaves(7, 3).nodes(1) == ((1, 1),)
    assert Leaves(8, 3).nodes(1) == ((1, 1), (0, 4))


def slots_of(group, nbytes, count=2):
    slots = Slots("slots", allocate=lambda n: np.ones(n, np.uint8), free=id, persistent=False, device=group.device)
    slots.reserve(nbytes, count=count)
    return slots


@settings(max_examples=40)
@given(total=st.integers(1, 25), copies=st.integers(1, 3), data=st.data())
def test_folded_slices_have_the_trees_bits(total, copies, data):
    ranks = data.draw(st.integers(1, max(min(total // copies, 4), 1)))
    copies = min(copies, total)
    leaves = Leaves(total, ranks * copies, copies, in_turn=True)
    values = [value_of(leaf, LAYOUT.numel) for leaf in range(total)]

    def body(world):
        group = world.split(world.rank // ranks) if copies > 1 else world
        replicas = world.split(world.rank % ranks) if copies > 1 else None
        partition = Partition.build(LAYOUT.numel, ranks)
        mine = partition.of(group.rank)
        sink = FoldedShard(
            leaves,
            numel=mine.stop - mine.first,
            dtype=np.dtype("f4"),
            device=group.device,
            slots=slots_of(group, ranks * LAYOUT.nbytes),
            replicas=replicas,
        )
        bucket = GradientBucket(
            LAYOUT,
            partition,
            group=group,
            placement=Placement.SHARDED,
            needed=Placement.SHARDED,
            slots=slots_of(group, LAYOUT.nbytes),
            sink=sink,
            tree=leaves,
            replicas=replicas,
        )
        own = leaves.of(world.rank)
        assert len(own) in (leaves.most, leaves.most - 1)
        for _ in range(2):
            for at in range(leaves.most):  # a rank with a leaf less computes something all the same
                value = values[own[at]] if at < len(own) else np.full(LAYOUT.numel, np.nan, np.float32)
                bucket.add("w", value[:1000])
                bucket.end_micro_step()
                bucket.fire()
            bucket.end_step()
            found = bucket.finish_reduce().copy()
            bucket.reset()
        expected = level_by_level(values)[mine.first : mine.stop]
        there = min(max(1000 - mine.first, 0), expected.size)
        np.testing.assert_array_equal(found[:there], expected[:there])
        assert bucket.nbytes == leaves.held * found.nbytes
        if copies > 1:
            group.close()
            replicas.close()
        return list(own)

    found = run_threads(ranks * copies, body)
    assert sorted(leaf for own in found for leaf in own) == list(range(total))


@pytest.mark.parametrize("total", [1, 2, 7, 8, 13, 64])
def test_few_shards_are_held(total):
    most = math.floor(math.log2(total)) + 1
    for size in range(1, total + 1):
        assert Leaves(total, size, in_turn=True).held <= most
    assert Leaves(total, total, in_turn=True).held == 1
    for copies in (one for one in (2, 4) if one <= total):
        for ranks in range(1, total // copies + 1):
            assert Leaves(total, ranks * copies, copies, in_turn=True).held <= 2 * most


def test_leaves_are_dealt_in_turn_among_the_ranks_of_a_copy():
    leaves = Leaves(11, 4, 2, in_turn=True)
    assert [[*leaves.of(rank)] for rank in range(4)] == [[0, 2, 4], [1, 3], [5, 7, 9], [6, 8, 10]]
    assert [[*leaves.of_micro_step(0, at)] for at in range(3)] == [[0, 1], [2, 3], [4]]
    assert leaves.nodes_of_copy(0) == ((2, 0), (0, 4))
