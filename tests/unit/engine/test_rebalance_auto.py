"""`rt.rebalance("auto")`: what it measures, does and says, on ranks that are threads."""

import contextlib

import numpy as np
import pytest
import seams

import zerort as zr
from zerort.engine.model.section import Section
from zerort.engine.rebalance import auto
from zerort.engine.rebalance.deciding import LEAST_STEPS
from zerort.errors import CallError, DeviceMemoryError, PlanError, StorageError, UnitStateError
from zerort.layout import Partition
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

X = np.random.default_rng(0).normal(size=(240, 6))
ORDER = zr.data.Order(length=len(X), batch=24, seed=7)
NUMEL = 4096


def opened(group, **options):
    options.setdefault("plan", zr.Plan.zero(3))
    rt = zr.open(optimizer=options.pop("optimizer", None) or zr.AdamW(lr=0.1), group=group, **options)
    rt.register("line", {"w": np.zeros(6)})
    rt.register("rest", {"w": np.ones(NUMEL)})
    return rt


def step(rt, rows, *, weighted=True):
    with rt.units["line"].gathered() as p:
        error = rows @ p["w"] - rows.sum(1)
    rt.units["line"].reduce({"w": error @ rows})
    rt.units["rest"].reduce({"w": np.full(NUMEL, float(len(rows)))})
    return rt.step(weight=len(rows) if weighted else None)


def times(rt, *, compute, update, samples):
    """Have a rank remember steps that took so long."""
    rt.context.pace.times.extend([(compute, update, samples)] * LEAST_STEPS)


def test_a_slow_rank_takes_less_of_each_batch_and_training_stays_the_same():
    """A sample is said to take 3 ms on one rank, and 0.5 ms on the others."""

    def body(group):
        with opened(group) as rt:
            done, counts = [], []
            for indices in rt.take(ORDER, epochs=3):
                step(rt, X[indices])
                counts.append(len(indices))
                if len(counts) == 14:
                    rt.context.pace.times.clear()
                    times(rt, compute=8 * (0.003 if rt.rank == 1 else 0.0005), update=0.0, samples=8)
                if len(counts) in (2, 14):
                    done.append(rt.rebalance("auto"))
            with rt.units["line"].gathered() as p:
                return done, counts, p["w"].copy(), rt.context.run.shares

    found = run_threads(3, body)
    early, late = found[0][0]
    assert early.why.startswith("kept: 1 steps were measured")
    assert (early.changed, late.changed) == (False, True)
    assert late.shares == pytest.approx((6 / 13, 1 / 13, 6 / 13), abs=1e-3)
    assert late.step_seconds == pytest.approx((0.024, 24 * 0.003 / 13), rel=1e-2)
    assert "rank 1 takes" in late.why
    assert str(late).startswith(f"shards alike, shares {late.shares[0]:.3f} {late.shares[1]:.3f}")
    assert [one[0] for one in found] == [found[0][0]] * 3  # the same on every rank
    assert all(one[1][:14] == [8] * 14 for one in found)
    assert found[1][1][14] < 8
    assert [sum(one[1][at] for one in found) for at in range(30)] == [24] * 30
    alone = run_threads(1, body)[0]
    np.testing.assert_allclose(found[0][2], alone[2], rtol=OVER_STEPS, atol=OVER_STEPS)
    assert alone[0][1].shares is None


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"virtual_shards": 2}, "with virtual_shards a rank takes whole leaves"),
        ({"shares": [1, 1]}, "rt.take was given shares="),
        ({"weighted": False}, "steps have no weight="),
        ({"epochs": 0}, "no order is taken"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_shares_that_may_not_change_say_why(how, why):
    options = {key: how[key] for key in ("virtual_shards",) if key in how}
    taking = {key: how[key] for key in ("shares",) if key in how}

    def body(group):
        with opened(group, **options) as rt:
            if "epochs" not in how:
                rows = X[next(rt.take(ORDER, **taking))]
                step(rt, rows, weighted=how.get("weighted", True))
            else:
                step(rt, X[:8])
            times(rt, compute=1.0 + rt.rank, update=0.0, samples=12)
            return rt.rebalance("auto")

    done, other = run_threads(2, body)
    assert done == other
    assert (done.shares, done.nbytes, done.changed) == (None, 0, False)
    assert done.why.startswith("kept: a step would take 2 s instead of 2 s")
    assert f"shares stay, {why}" in done.why


@pytest.mark.parametrize("plan", [zr.Plan.zero(1), zr.Plan.zero(3, state=zr.Tier.NVME)], ids=["memory", "disk"])
def test_shards_follow_where_shares_cannot_and_nothing_else_changes(tmp_path, plan):
    def body(group):
        with opened(group, plan=plan, virtual_shards=2, scratch=tmp_path) as rt:
            digests = []
            for at in range(4):
                for _ in rt.micro_batches:
                    rt.units["line"].reduce({"w": np.full(6, 1.0 + at)})
                    rt.units["rest"].reduce({"w": np.full(NUMEL, 1.0 + at)})
                digests.append(rt.step(weight=[1.0] * rt.micro_steps).digest)
                if at == 1:
                    times(rt, compute=0.1 + 0.4 * rt.rank, update=0.5, samples=0)
                    done = rt.rebalance("auto")
            return digests, done, rt.context.run.cut.weights

    (digests, done, weights), (_, other, _) = run_threads(2, body)
    assert done == other
    assert done.nbytes > 0
    assert done.shard_weights == weights
    assert weights == pytest.approx((0.7, 0.3))  # 0.1 + 0.7, 0.5 + 0.3
    assert done.shares is None  # leaves stay what they are
    alone = run_threads(1, body)[0]
    assert digests == alone[0]
    assert alone[1].nbytes == 0


def test_weights_given_by_hand_end_what_auto_chose():
    def body(group):
        with opened(group) as rt:
            taking = rt.take(ORDER)
            step(rt, X[next(taking)])
            times(rt, compute=1.0 + rt.rank, update=0.0, samples=12)
            first = rt.rebalance("auto")
            counts = [len(next(taking))]
            step(rt, X[:1])
            rt.rebalance(shard_weights=[3, 1])
            return first.shares, [*counts, len(next(taking))]

    (shares, counts), (_, others) = run_threads(2, body)
    assert shares == pytest.approx((2 / 3, 1 / 3), abs=1e-3)
    assert (counts, others) == ([16, 18], [8, 6])


def test_memory_without_room_keeps_shards_where_they_are():
    """With room, the same times move shards."""

    def body(group):
        with opened(group, plan=zr.Plan.zero(1)) as rt:
            step(rt, X[:8])
            times(rt, compute=0.1 + 0.4 * rt.rank, update=0.5, samples=0)
            return rt.rebalance("auto").nbytes

    assert min(run_threads(2, body)) > 0
    with seams.inside(auto.rebalance_auto, left_of_limits=lambda: 5000):
        assert run_threads(2, body) == [0, 0]


def test_a_cut_that_is_refused_is_kept_as_it_was():
    def body(group):
        with opened(group, plan=zr.Plan.zero(1)) as rt:
            step(rt, X[:8])
            times(rt, compute=0.1 + 0.4 * rt.rank, update=0.5, samples=0)

            def refuse(weights):
                raise PlanError("Expected 1GiB of memory, got none.")

            done = auto.rebalance_auto(rt.context, rt.units, payback_steps=100, cut=refuse)
            return done, step(rt, X[:8]).updated

    for done, updated in run_threads(2, body):
        assert (done.why, done.nbytes, done.shares) == ("kept: Expected 1GiB of memory, got none.", 0, None)
        assert updated


def test_a_failure_in_the_middle_of_a_move_is_raised_and_training_goes_on():
    """The last section cannot be made on its new partition: those before it have moved, it has not."""
    real = Section.make_parts

    def body(group):
        with opened(group, plan=zr.Plan.fit(host="10MiB")) as rt:
            rt.register("last", {"w": np.ones(NUMEL)})
            step(rt, X[:8])
            last = list(rt.units.sections())[-1]
            before = [section.partition.counts for section in rt.units.sections()]

            def make_parts(section, other=None):
                real(section, other)
                if section.name == last.name:
                    raise DeviceMemoryError("Expected 1GiB of GPU memory, got less.")

            for section in rt.units.sections():
                section.__class__ = type("Failing", (Section,), {"make_parts": make_parts})
            times(rt, compute=0.1, update=0.1 + 3.9 * rt.rank, samples=0)
            with pytest.raises(DeviceMemoryError, match="Expected 1GiB of GPU memory"):
                rt.rebalance("auto")
            assert rt.context.planner._model_spec.shard_weights is None  # as units that are registered now are cut
            after = [section.partition.counts for section in rt.units.sections()]
            return [old == new for old, new in zip(before, after, strict=True)], step(rt, X[:8]).updated

    assert run_threads(2, body) == [([True, False, True], True)] * 2  # the first one is too small to be cut


@pytest.mark.parametrize("error", [DeviceMemoryError, PlanError, StorageError])
@pytest.mark.parametrize("moved", [False, True])
def test_a_refusal_is_kept_if_nothing_has_moved_and_raised_if_something_has(error, moved):
    def body(group):
        with opened(group, plan=zr.Plan.zero(1)) as rt:
            step(rt, X[:8])
            times(rt, compute=0.1 + 0.4 * rt.rank, update=0.5, samples=0)

            def refuse(weights):
                if moved:
                    *_, section = rt.units.sections()
                    section.partition = Partition.build(section.layout.numel, 2, weights=[1, 0])
                raise error("Expected 1GiB of room, got none.")

            with pytest.raises(error) if moved else contextlib.nullcontext():
                done = auto.rebalance_auto(rt.context, rt.units, payback_steps=100, cut=refuse)
                assert (done.why, done.changed) == ("kept: Expected 1GiB of room, got none.", False)

    run_threads(2, body)


@pytest.mark.parametrize(
    ("call", "got"),
    [
        ({"mode": "fast"}, "got 'fast'"),
        ({}, "got neither"),
        ({"mode": "auto", "shard_weights": [1, 1]}, r"got 'auto' and shard_weights=\[1, 1\]"),
        ({"shard_weights": [1, 1], "payback_steps": 5}, r"payback_steps with rt.rebalance\(\"auto\"\) alone, got 5"),
        ({"mode": "auto", "payback_steps": 0}, "payback_steps to be an int of at least 1, got 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_on_every_rank(call, got):
    def body(group):
        with opened(group) as rt:
            with pytest.raises(CallError, match=got):
                rt.rebalance(**call if rt.rank else {"mode": "auto"})
            rt.units["rest"].reduce({"w": np.ones(NUMEL)})
            with pytest.raises(UnitStateError, match=r"rebalance\(\) between steps, got gradients"):
                rt.rebalance("auto")

    run_threads(2, body)
