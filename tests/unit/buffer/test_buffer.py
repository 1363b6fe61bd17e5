"""Flat buffers: the placement table as code, buckets, slots that take turns."""

import threading
from collections import Counter

import numpy as np
import pytest

from zerort.buffer import GradientBucket, Leaves, TreeSum, redistribute
from zerort.comm import open_group
from zerort.device import HostStream
from zerort.device.slots import Slots
from zerort.errors import PlanError, UnitStateError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.testing import run_threads
from zerort.testing.tolerance import rounding

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
NUMEL = 1000


def value_of(rank, numel=NUMEL):
    return np.random.default_rng(rank).standard_normal(numel).astype(np.float32)


@pytest.mark.parametrize("in_tree", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("source", "to"), [(P, S), (P, R), (S, R), (R, S), (R, R), (S, S)])
def test_every_move_of_the_table_is_what_it_says(source, to, size, in_tree):
    def body(group):
        partition = Partition.build(NUMEL, size, weights=[rank % 3 + 1 for rank in range(size)])
        mine = partition.of(group.rank).slice
        total = np.sum([value_of(rank) for rank in range(size)], axis=0)
        given = value_of(group.rank) if source is P else total
        given = given[mine].copy() if source is S else given
        out = np.empty_like(total[mine] if to is S else total)
        traffic = Counter()
        tree = TreeSum(Leaves(size, size), group.rank, numel=NUMEL, dtype=total.dtype) if in_tree else None
        if tree is not None and source is P:
            tree.add(given)
        redistribute(
            group, given, placement=source, to=to, partition=partition, out=out, tree=tree, traffic=traffic
        ).wait()
        expected = total[mine] if to is S else total
        if tree is None or source is not P:
            np.testing.assert_array_equal(out, expected)  # summed in rank order, as NumPy does over the first axis
        else:
            magnitudes = np.sum([np.abs(value_of(rank)) for rank in range(size)], axis=0)
            apart = np.abs(out - expected) / (magnitudes[mine] if to is S else magnitudes)
            assert apart.max() <= rounding("float32", size)
        moves = size > 1 and source is not to and source is not R
        assert sum(traffic.values()) == (NUMEL * 4 if moves else 0)

    run_threads(size, body)


def test_a_move_that_is_not_in_the_table_is_refused():
    with open_group(kind="solo") as group, pytest.raises(PlanError, match="got REPLICATED → PARTIAL"):
        redistribute(group, np.ones(2), placement=R, to=P, partition=Partition.build(2, 1), out=np.ones(2))


def test_slots_take_turns_and_wait_for_what_still_uses_them():
    slots = Slots("slots", cure="Wait.", allocate=lambda nbytes: np.zeros(nbytes, np.uint8), free=lambda memory: None)
    slots.reserve(100, count=2)
    first, second = slots.lease(100), slots.lease(40)
    assert (slots.available, slots.nbytes, slots.peak_nbytes) == (0, 200, 140)
    with pytest.raises(UnitStateError, match=r"Expected a free one of 2 slots, got all of them in use\. Wait\."):
        slots.lease(1)
    with pytest.raises(UnitStateError, match="Expected no slots in use while they grow, got 2"):
        slots.reserve(200, count=2)
    with HostStream("slow") as stream:
        done = []
        first.release(after=stream.submit(lambda: done.append("used")))
        second.release()
        assert slots.lease(1) is first
        assert done == ["used"]
    first.release()
    slots.reserve(50, count=1)
    assert slots.nbytes == 200  # it never shrinks
    slots.reserve(300, count=3)
    assert slots.nbytes == 900


def test_slots_that_are_not_persistent_have_memory_from_the_lease_to_the_next_trim():
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    slots = Slots("slots", cure="Wait.", allocate=allocate, free=lambda memory: None, persistent=False)
    slots.reserve(100, count=2)
    assert (made, slots.nbytes) == ([], 200)
    small, brought = slots.lease(40), np.zeros(60, np.uint8)
    other = slots.lease(60, memory=brought)
    assert made == [40]
    assert other.memory is brought
    under_way = threading.Event()
    with HostStream("slow") as stream:
        small.release(after=stream.submit(under_way.wait))
        other.release()
        slots.trim()
        assert [slot.memory.size for slot in (small, other)] == [40, 0]  # the first is still read
        under_way.set()
        small.busy.wait()
        slots.trim()
    assert [slot.memory.size for slot in (small, other)] == [0, 0]
    assert small.busy is None  # nor is its result kept


@pytest.mark.parametrize(("is_given", "numel", "copied"), [(True, 128, False), (False, 128, True), (True, 100, True)])
def test_a_gradient_that_is_given_is_used_where_it_lies(is_given, numel, copied):
    """All of a bucket's, that is: one that leaves a gap is copied beside zeros."""
    layout = FlatLayout.build({"w": (numel,)})

    def body(group):
        made = []
        slots = Slots(
            "b", cure="", allocate=lambda n: made.append(n) or np.ones(n, np.uint8), free=id, persistent=False
        )
        slots.reserve(layout.nbytes, count=1)
        partition = Partition.build(layout.numel, group.size)
        bucket = GradientBucket(layout, partition, group=group, placement=S, needed=S, slots=slots)
        gradient = np.full(numel, group.rank + 1.0, np.float32)
        bucket.add("w", gradient, donate=is_given)
        bucket.add("w", np.ones(numel, np.float32), donate=is_given)  # used twice: summed
        assert bool(made) is copied
        bucket.end_micro_step()
        bucket.fire()
        whole = group.all_gather(bucket.finish_reduce(), counts=partition.counts).wait()
        expected = np.zeros(layout.numel, np.float32)
        expected[:numel] = sum(range(1, group.size + 1)) + group.size
        assert np.array_equal(whole, expected)
        bucket.close()

    run_threads(3, body)


def test_nan_in_a_given_gradient_is_found():
    layout = FlatLayout.build({"w": (64,)})
    with open_group(kind="solo") as group:
        slots = Slots("b", cure="", allocate=lambda n: np.ones(n, np.uint8), free=id, persistent=False)
        slots.reserve(layout.nbytes, count=1)
        bucket = GradientBucket(layout, Partition.build(64, 1), group=group, placement=S, needed=S, slots=slots)
        bucket.add("w", np.full(64, np.nan, np.float32), donate=True)
        assert bucket.nonfinite == "w"


@pytest.mark.parametrize(
    ("options", "arrays"),
    [
        ({"placement": S}, 0.5),  # its range of two
        ({"placement": R}, 1),
        ({"placement": S, "micro_steps": 2}, 0.5),
        ({"placement": S, "whole": True}, 1),
        ({"placement": S, "whole": True, "tree": Leaves(2, 2)}, 2),  # what is being added, and a level of the tree
    ],
)
def test_a_bucket_says_how_many_bytes_it_holds(options, arrays):
    layout = FlatLayout.build({"w": (1024,)})

    def body(group):
        slots = Slots("b", cure="", allocate=lambda n: np.ones(n, np.uint8), free=id, persistent=False)
        slots.reserve(layout.nbytes, count=1)
        bucket = GradientBucket(
            layout, Partition.build(layout.numel, group.size), group=group, needed=S, slots=slots, **options
        )
        assert bucket.nbytes == arrays * layout.nbytes
        bucket.close()

    run_threads(2, body)
