"""Flat buffers: the placement table as code, sums in a tree, slots that take turns."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.buffer import HOST_KERNELS, FlatBuffer, GradientBucket, TreeSum, redistribute
from zerort.comm import open_group
from zerort.device import HostStream
from zerort.device.slots import Slots
from zerort.errors import CallError, PlanError, UnitStateError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.testing import run_threads
from zerort.testing.tolerance import rounding

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
NUMEL = 1000


def value_of(rank, numel=NUMEL):
    return np.random.default_rng(rank).standard_normal(numel).astype(np.float32)


@pytest.mark.parametrize("tree", [None, HOST_KERNELS])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("source", "to"), [(P, S), (P, R), (S, R), (R, S), (R, R), (S, S)])
def test_every_move_of_the_table_is_what_it_says(source, to, size, tree):
    def body(group):
        partition = Partition.build(NUMEL, size, weights=[rank % 3 + 1 for rank in range(size)])
        mine = partition.of(group.rank).slice
        total = np.sum([value_of(rank) for rank in range(size)], axis=0)
        given = value_of(group.rank) if source is P else total
        given = given[mine].copy() if source is S else given
        out = np.empty_like(total[mine] if to is S else total)
        traffic = Counter()
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


@settings(max_examples=40)
@given(leaves=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]), data=st.data())
def test_a_tree_has_the_same_bits_whoever_sums_it(leaves, data):
    values = [value_of(leaf, 129) for leaf in range(leaves)]
    whole = TreeSum(leaves, numel=129, dtype=np.dtype("f4"))
    for value in values:
        whole.add(value)
    sizes = [
        size
        for size in range(1, leaves + 1)
        if leaves % size == 0 and (size == 1 or not (leaves // size) & (leaves // size - 1))
    ]
    size = data.draw(st.sampled_from(sizes))
    each = leaves // size

    def body(group):
        node = TreeSum(each, numel=129, dtype=np.dtype("f4"))
        for value in values[group.rank * each : (group.rank + 1) * each]:
            node.add(value)
        partition = Partition.build(129, size)
        out = np.empty(129, np.float32)
        redistribute(group, node.result(), placement=P, to=R, partition=partition, out=out, tree=HOST_KERNELS).wait()
        return out

    for found in run_threads(size, body):
        np.testing.assert_array_equal(found, whole.result())


def test_a_tree_keeps_a_sum_per_level_and_reuses_their_memory():
    tree = TreeSum(8, numel=64, dtype=np.dtype("f4"))
    for round_ in range(2):
        assert tree.empty
        for leaf in range(8):
            tree.add(value_of(leaf, 64))
        a, b, c, d, e, f, g, h = (value_of(leaf, 64) for leaf in range(8))
        np.testing.assert_array_equal(tree.result(), ((a + b) + (c + d)) + ((e + f) + (g + h)))
        assert tree.nbytes == 4 * 64 * 4, round_
        tree.clear()


@pytest.mark.parametrize("placement", [R, S])
def test_a_buffer_holds_packs_and_restores(placement):
    layout = FlatLayout.build({"w": (3, 5), "b": (7,)}, alignment=8)
    values = {"w": np.arange(15, dtype=np.float32).reshape(3, 5), "b": np.arange(7, dtype=np.float32)}

    def body(group):
        partition = Partition.build(layout.numel, group.size)
        buffer = FlatBuffer(layout, partition, group=group, placement=placement, name="flat")
        buffer.pack(values)
        buffer.changed()
        group.barrier().wait()
        buffer.restore().wait()
        for name, value in values.items():
            np.testing.assert_array_equal(buffer.view(name), value)
        assert buffer.whole.sum() == sum(value.sum() for value in values.values())  # padding is zero
        assert buffer.nbytes == (layout.nbytes if placement is R else partition.counts[group.rank] * 4)
        with pytest.raises(CallError, match=r"Expected 'b' as float32\[7\], got float64\[7\]"):
            buffer.pack({"b": np.ones(7)})
        group.barrier().wait()
        buffer.close()

    run_threads(3, body)


def test_a_buffer_of_sums_is_refused():
    layout = FlatLayout.build({"w": (3,)})
    with open_group(kind="solo") as group:
        with pytest.raises(PlanError, match="Sums grow in buckets"):
            FlatBuffer(layout, Partition.build(layout.numel, 1), group=group, placement=P)
        with pytest.raises(CallError, match="Expected a partition of 64 elements over 1 ranks"):
            FlatBuffer(layout, Partition.build(3, 1), group=group, placement=R)


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
        bucket.end_round()
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
        ({"placement": S, "micro_steps": 2}, 1),
        ({"placement": S, "resident": True}, 1),
        ({"placement": S, "tree": True}, 3),  # the sum, what is being added, and a level of the tree
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
