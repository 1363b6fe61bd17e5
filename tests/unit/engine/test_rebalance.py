"""`rt.rebalance`: shards cut anew between steps change nothing but where values are."""

import contextlib
import math

import numpy as np
import pytest
import seams
from runs import faults

import zerort as zr
from zerort.device.host.reserve import Reserve
from zerort.engine.rebalance import recut
from zerort.errors import CallError, PlanError, StorageError, UnitStateError
from zerort.storage.opening import open_together
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

NVME = zr.Tier.NVME
SMALL = zr.OffloadOptions(chunk_nbytes=16384, threads=2, retries=0)
SHAPES = {"a": {"w": (37, 300), "b": (5,)}, "c": {"w": (9000,)}, "d": {"s": ()}}
PLANS = {
    "zero0": zr.Plan.zero(0),
    "zero1": zr.Plan.zero(1),
    "zero2": zr.Plan.zero(2),
    "zero3": zr.Plan.zero(3),
    "state": zr.Plan.zero(2, state=NVME),
    "disk": zr.Plan.zero(3, parameter=NVME, state=NVME),
}


@pytest.fixture(autouse=True)
def reserved():
    """Give small arrays what large ones have: addresses of their own, in which values stay."""
    with seams.inside(Reserve, LEAST_NBYTES=1):
        yield


def opened(group, tmp_path, plan, *, dtype="float32", optimizer=None, **options):
    rt = zr.open(
        plan=PLANS[plan] if isinstance(plan, str) else plan,
        optimizer=optimizer or zr.AdamW(lr=0.1, weight_decay=0.1),
        group=group,
        scratch=tmp_path / "scratch",
        create_scratch=True,
        offload=SMALL,
        **options,
    )
    for unit, shapes in SHAPES.items():
        rng = np.random.default_rng(len(unit))
        rt.register(unit, {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()})
    return rt


def step(rt, number, dtype="float32"):
    for shard in rt.micro_batches:
        for unit, shapes in SHAPES.items():
            rng = np.random.default_rng((number, shard))
            rt.units[unit].reduce({name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()})
    return rt.step()


def cuts(seed, size):
    """Weights of ranks, now and then nothing for some of them, or None."""
    rng = np.random.default_rng(seed)
    while True:
        weights = rng.integers(0, 5, size)
        yield None if rng.random() < 0.2 else (weights if weights.any() else weights + 1).tolist()


def digests(group, tmp_path, plan, *, changes, steps=5, dtype="float32", **options):
    with opened(group, tmp_path, plan, dtype=dtype, virtual_shards=8, clip_norm=1.0, **options) as rt:
        weights, found = cuts(7, rt.mesh.shard.size), []
        for number in range(steps):
            if changes:
                rt.rebalance(shard_weights=next(weights))
            found.append(step(rt, number, dtype).digest)
        return found


COVERING = [
    (1, "disk", "float32"),
    (2, "zero3", "bfloat16"),
    (2, "state", "float16"),
    (3, "disk", "bfloat16"),
    (3, "zero0", "float64"),
    (4, "zero1", "float32"),
    (4, "zero2", "bfloat16"),
    (8, "zero3", "float64"),
    (8, "state", "float32"),
]


@pytest.mark.parametrize(("ranks", "plan", "dtype"), COVERING)
def test_cuts_that_change_give_the_bits_of_one_that_never_did(tmp_path, ranks, plan, dtype):
    how = {"dtype": dtype, "gradient_dtype": "float32" if "16" in dtype else None}
    expected = run_threads(1, lambda group: digests(group, tmp_path, "zero0", changes=False, **how))
    assert len(set(expected[0])) == 5
    assert run_threads(ranks, lambda group: digests(group, tmp_path, plan, changes=True, **how)) == expected * ranks


def parameters(rt):
    found = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found |= {(unit.name, name): np.array(p[name]) for name in p}
    return found


def trained(group, tmp_path, plan, *, between, dtype="float32", **options):
    """Return the parameters after four steps, with ``between(rt)`` in the middle."""
    with opened(group, tmp_path, plan, dtype=dtype, **options) as rt:
        for number in range(4):
            if number == 2:
                between(rt)
            step(rt, number, dtype)
        return parameters(rt)


def assert_same(found, expected):
    for one in found:
        assert one.keys() == expected[0].keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, expected[0][name], err_msg=str(name))


@pytest.mark.parametrize(
    "how",
    [
        {"plan": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME), "micro_steps": 2},
        {"plan": zr.Plan.zero(3), "micro_steps": 2, "accumulate": "local"},
        {"plan": zr.Plan.zero(2), "optimizer": zr.Adafactor(lr=0.1), "dtype": "float64"},
        {"plan": zr.Plan.fit(host="600KiB", nvme="1GiB")},
        {"plan": zr.Plan.zero(3), "wire": zr.Wire(gather="int8", over="all")},
        {"plan": PLANS["disk"], "optimizer": zr.AdamW(lr=0.1, moments="int8"), "dtype": "bfloat16"},
    ],
    ids=["gradients-on-disk", "local", "adafactor", "budget", "coded", "int8-moments"],
)
def test_a_cut_changes_no_parameter(tmp_path, how):
    def runs(between):
        return run_threads(3, lambda group: trained(group, tmp_path, between=between, **how))

    expected = runs(lambda rt: None)
    found = runs(lambda rt: rt.rebalance(shard_weights=[3, 0, 1]))
    if isinstance(how.get("optimizer"), zr.Adafactor):  # its sums over whole tensors are made of other parts
        for name, value in found[0].items():
            np.testing.assert_allclose(value, expected[0][name], rtol=OVER_STEPS, atol=OVER_STEPS)
    else:
        assert_same(found, expected)


def test_copies_of_the_model_are_cut_alike(tmp_path):
    def runs(between):
        def body(group):
            return trained(None, tmp_path, "zero3", between=between, mesh=zr.mesh(shard=2, replicate=2, group=group))

        return run_threads(4, body)

    assert_same(runs(lambda rt: rt.rebalance(shard_weights=[1, 4])), runs(lambda rt: None))


@pytest.mark.parametrize("plan", ["zero1", "zero3", "disk"])
def test_a_rank_holds_what_it_would_if_it_had_begun_so(tmp_path, plan):
    weights = [1, 0, 4]

    def body(group):
        with opened(group, tmp_path, plan, shard_weights=weights) as rt:
            step(rt, 0)
            expected = rt.memory()
        with opened(group, tmp_path, plan) as rt:
            step(rt, 0)
            done = rt.rebalance(shard_weights=weights)
            step(rt, 1)
            units = {name: unit.tensors for name, unit in rt.units.items()}
            asked = {
                "optimizer": zr.AdamW(lr=0.1),
                "size": 3,
                "rank": rt.rank,
                "shard_weights": weights,
                "offload": SMALL,
            }
            return rt.memory(), expected, done, zr.forecast(units, plan=PLANS[plan], **asked)

    for found, expected, done, seen in run_threads(3, body):
        assert (found.at_rest, found.nvme) == (expected.at_rest, expected.nvme) == (seen.at_rest, seen.nvme)
        assert done.shard_weights == (1, 0, 4)
        assert done.nbytes > 0


def test_units_that_come_later_are_cut_as_the_others(tmp_path):
    def body(group):
        with opened(group, tmp_path, "zero3") as rt:
            rt.rebalance(shard_weights=[0, 1])
            late = rt.register("late", {"w": np.zeros(5000)})
            return late.sections[0].partition.counts

    assert run_threads(2, body) == [(0, 5056)] * 2


@pytest.mark.parametrize("gradient", [zr.Tier.DEVICE, zr.Tier.NVME])
@pytest.mark.parametrize("virtual_shards", [None, 5])
def test_ties_go_on_after_a_cut(tmp_path, virtual_shards, gradient):
    """Their buckets, and with virtual_shards their trees, are those of the new ranges."""
    numel = 6000

    def runs(between):
        def body(group):
            options = {"plan": zr.Plan.zero(3, gradient=gradient), "scratch": str(tmp_path)}
            with zr.open(optimizer=zr.SGD(lr=0.1), group=group, virtual_shards=virtual_shards, **options) as rt:
                first = rt.register("first", {"w": np.arange(float(numel))})
                last = rt.register("last", {"b": np.ones(3)}, ties={"w": (first, "w")})
                for number in range(3):
                    if number:
                        between(rt)
                    for at in rt.micro_batches if virtual_shards else [rt.rank]:
                        last.reduce({"w": np.full(numel, 1.0 + at), "b": np.ones(3)})
                        first.reduce({"w": np.full(numel, 2.0)})
                    rt.step()
                return parameters(rt)

        return run_threads(2, body)

    assert_same(runs(lambda rt: rt.rebalance(shard_weights=[rt.updates, 3])), runs(lambda rt: None))


def test_loops_of_take_follow_from_their_next_batch_on(tmp_path):
    order = zr.data.Order(length=60, batch=10, seed=1)

    def body(group):
        with opened(group, tmp_path, "zero3") as rt:
            counts, seen = [], []
            for number, indices in enumerate(rt.take(order)):
                counts.append(len(indices))
                seen += indices.tolist()
                step(rt, number)
                if number == 2:
                    rt.rebalance(shard_weights=[1, 4])
            return counts, seen

    (first, some), (second, others) = run_threads(2, body)
    assert (first, second) == ([5] * 3 + [2] * 3, [5] * 3 + [8] * 3)
    assert sorted(some + others) == list(range(60))


def test_readers_of_a_feed_get_a_whole_version_then(tmp_path):
    def body(group):
        with opened(group, tmp_path, "zero3") as rt:
            feed = rt.publish(tmp_path / "feed", dtype=None)
            versions = []
            for number in range(4):
                step(rt, number)
                if number == 2:
                    rt.rebalance(shard_weights=[4, 1])
                versions.append(feed.push().wait().is_full)
            return versions, parameters(rt)

    versions, expected = run_threads(2, body)[0]
    assert versions == [True, False, True, False]
    np.testing.assert_array_equal(zr.Reader(tmp_path / "feed").update()["a.w"], expected["a", "w"])


def test_a_checkpoint_of_a_cut_is_one_of_any(tmp_path):
    def body(group):
        with opened(group, tmp_path, "disk") as rt:
            step(rt, 0)
            rt.rebalance(shard_weights=[1, 5])
            rt.save(tmp_path / "c")
            rt.rebalance(shard_weights=None)
            rt.load(tmp_path / "c")
            step(rt, 1)
            return parameters(rt)

    def whole(group):
        with opened(group, tmp_path, "zero0", micro_steps=2) as rt:
            rt.load(tmp_path / "c")
            for shard in range(2):
                for unit, shapes in SHAPES.items():
                    rng = np.random.default_rng((1, shard))
                    rt.units[unit].reduce({n: rng.normal(size=s).astype("f4") for n, s in shapes.items()})
            rt.step()
            return parameters(rt)

    assert_same(run_threads(2, body), run_threads(1, whole))


@pytest.mark.parametrize(
    ("weights", "got"),
    [
        ([1, -1], r"\[1, -1\]"),
        ([1, math.nan], "nan"),
        ([1, math.inf], "inf"),
        ([0, 0], r"\[0, 0\]"),
        ([1, 1, 1], r"\[1, 1, 1\]"),
        ("ab", "ab"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_on_every_rank(tmp_path, weights, got):
    def body(group):
        with opened(group, tmp_path, "zero3") as rt:
            with pytest.raises(CallError, match=rf"Expected shard_weights to be 2 numbers of at least 0.*got .*{got}"):
                rt.rebalance(shard_weights=weights if rt.rank else [1, 2])
            with pytest.raises(CallError, match="shard_weights to be the same on every rank"):
                rt.rebalance(shard_weights=[1, rt.rank])
            return step(rt, 0).updated

    assert run_threads(2, body) == [True] * 2


def test_only_between_steps(tmp_path):
    def body(group):
        with opened(group, tmp_path, "zero3") as rt:
            with rt.units["c"].gathered(), pytest.raises(UnitStateError, match=r"released before rebalance.*got c"):
                rt.rebalance(shard_weights=[1, 2])
            for unit, shapes in SHAPES.items():
                rt.units[unit].reduce({name: np.ones(shape, "f4") for name, shape in shapes.items()})
            with pytest.raises(UnitStateError, match=r"rebalance\(\) between steps, got gradients"):
                rt.rebalance(shard_weights=[1, 2])
            rt.step()
            rt.rebalance(shard_weights=[1, 2])

    run_threads(2, body)


@pytest.mark.parametrize("fault", ["eio@{}:file=-r1-", "enospc@{}:times=all:file=-r0-"])
def test_a_disk_that_fails_on_the_way_leaves_all_values_as_they_were(tmp_path, fault):
    """Whichever operation of the move fails, training goes on with the bits of a run that was never cut."""

    def body(group, number):
        with opened(group, tmp_path, "disk", virtual_shards=4) as rt:
            step(rt, 0)
            refused = False
            if number is not None:
                with faults(group, fault.format(number)):
                    try:
                        rt.rebalance(shard_weights=[1, 9])
                    except StorageError:
                        refused = True
            return refused, [step(rt, at).digest for at in (1, 2)]

    expected = run_threads(2, lambda group: body(group, None))[0][1]
    ends = []
    for number in (3, 9, 13, 25, 1000):
        both = run_threads(2, lambda group, number=number: body(group, number))
        assert both[0] == both[1]
        assert both[0][1] == expected
        ends.append(both[0][0])
    assert (ends[0], ends[-1]) == (True, False)


def test_coded_gradients_find_room_after_a_failure_half_way(tmp_path, monkeypatch):
    move_section = recut._move_section

    def fail_at_last(context, section, partition):
        if section.name.startswith("c"):
            raise StorageError("EIO")
        move_section(context, section, partition)

    def body(group):
        with opened(group, tmp_path, "zero3", wire=zr.Wire(reduce="int8", over="all")) as rt:
            step(rt, 0)
            with pytest.raises(StorageError, match="EIO"):
                rt.rebalance(shard_weights=[1, 9])
            return [step(rt, at).updated for at in (1, 2)]

    monkeypatch.setattr(recut, "_move_section", fail_at_last)
    assert run_threads(2, body) == [[True, True]] * 2


def test_a_disk_without_room_is_refused_before_anything_moves(tmp_path):
    def body(group):
        with opened(group, tmp_path, "disk", virtual_shards=2) as rt:
            counts = [section.partition.counts for section in rt.units.sections()]
            group.barrier().wait()
            with contextlib.ExitStack() as stack:
                if rt.rank == 0:
                    stack.enter_context(seams.inside(open_together, free_nbytes=lambda path: 100_000))
                group.barrier().wait()
                with pytest.raises(StorageError, match="shards that are cut anew"):
                    rt.rebalance(shard_weights=[1, 9])
                group.barrier().wait()
            assert [section.partition.counts for section in rt.units.sections()] == counts
            return step(rt, 0).updated

    assert run_threads(2, body) == [True] * 2


def test_a_budget_that_a_cut_would_exceed_refuses_it(tmp_path):
    def body(group):
        with opened(group, tmp_path, zr.Plan.fit(host="420KiB", nvme="180KiB")) as rt:
            with pytest.raises(PlanError, match=r"Expected at least .*KiB of memory per rank"):
                rt.rebalance(shard_weights=[1, 0])
            return step(rt, 0).updated

    assert run_threads(2, body) == [True] * 2
