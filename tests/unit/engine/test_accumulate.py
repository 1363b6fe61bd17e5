"""Micro-steps: summed over the ranks in every one of them, into shards, or on each rank first."""

import tracemalloc

import numpy as np
import pytest

import zerort as zr
from zerort.errors import CallError, PlanError, UnitStateError
from zerort.testing import run_threads

F4 = np.float32
NUMEL = 20_000
UNITS = ("a", "b", "c")
SMALL = zr.OffloadOptions(chunk_nbytes=16 * 1024)
MEMORY, DISK = zr.Tier.DEVICE, zr.Tier.NVME


def plan_of(stage, gradient):
    return zr.Plan.zero(stage, gradient=gradient, state=gradient if stage == 3 else MEMORY)


def opened(group, tmp_path, *, stage=3, gradient=MEMORY, micro_steps=4, **options):
    return zr.open(
        plan=plan_of(stage, gradient),
        optimizer=zr.SGD(lr=1.0),
        group=group,
        scratch=tmp_path,
        offload=SMALL,
        micro_steps=micro_steps,
        reduction="sum",
        **options,
    )


def gradient_of(rank, micro_step):
    """Whole numbers: their sums are the same in any order."""
    return np.random.default_rng(100 * rank + micro_step).integers(-9, 9, NUMEL).astype(F4)


def values_of(rt):
    found = {}
    for name in UNITS:
        with rt.units[name].gathered() as p:
            found[name] = np.array(p["w"])
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("accumulate", "stage", "gradient"),
    [
        ("local", 2, MEMORY),
        ("local", 3, MEMORY),
        ("sharded", 2, MEMORY),
        ("sharded", 3, MEMORY),
        ("sharded", 3, DISK),
    ],
)
def test_micro_steps_are_summed_over_ranks_and_steps(size, accumulate, stage, gradient, tmp_path):
    def body(group):
        with opened(group, tmp_path, stage=stage, gradient=gradient, accumulate=accumulate, clip_norm=1e9) as rt:
            for name in UNITS:
                rt.register(name, {"w": np.zeros(NUMEL, F4)})
            total = np.sum([gradient_of(rank, at) for rank in range(size) for at in range(4)], axis=0)
            for step in range(1, 3):
                for at in range(4):
                    for name in reversed(UNITS):
                        if at % 2:  # written where they are collected
                            rt.units[name].gradients()["w"][:] = gradient_of(rt.rank, at)
                            rt.units[name].reduce()
                        else:
                            rt.units[name].reduce({"w": gradient_of(rt.rank, at)})
                report = rt.step()
                np.testing.assert_allclose(
                    report.grad_norm, np.sqrt(3 * (total.astype(float) ** 2).sum()), rtol=1e-6
                )  # float32 sums of squares
                times = 4 if accumulate == "sharded" else 1
                assert report.bytes_moved.get("reduce_scatter", 0) == (
                    times * 3 * rt.units["a"].sections[0].layout.nbytes if size > 1 else 0
                )
                for value in values_of(rt).values():
                    np.testing.assert_array_equal(value, -step * total)

    run_threads(size, body)


@pytest.mark.parametrize("gradient", [MEMORY, DISK])
@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_of_gradients_do_not_depend_on_micro_steps_and_are_as_forecast(stage, gradient, tmp_path):
    specs = {name: {"w": zr.TensorSpec((NUMEL,))} for name in UNITS}

    def body(group, micro_steps):
        with opened(group, tmp_path, stage=stage, gradient=gradient, micro_steps=micro_steps) as rt:
            for name in UNITS:
                rt.register(name, specs[name])
            for _ in range(micro_steps):
                for name in UNITS:
                    rt.units[name].reduce({"w": np.ones(NUMEL, F4)})
            rt.step()
            return rt.memory()

    one, four = (run_threads(2, lambda group, at=at: body(group, at)) for at in (1, 4))
    for rank in range(2):
        assert four[rank].gradient == one[rank].gradient
        assert four[rank].nvme == one[rank].nvme
        for micro_steps, found in ((1, one[rank]), (4, four[rank])):
            told = zr.forecast(
                specs,
                plan=plan_of(stage, gradient),
                optimizer=zr.SGD(lr=1.0),
                size=2,
                rank=rank,
                micro_steps=micro_steps,
                offload=SMALL,
            )
            for part in ("parameter", "gradient", "state", "buckets", "nvme", "streaming"):
                assert getattr(found, part) == getattr(told, part), (part, micro_steps)


def test_an_accumulating_rank_holds_one_shard_and_the_buckets_in_flight(tmp_path):
    units, numel = 20, 100_000

    def body(group):
        with opened(group, tmp_path) as rt:
            for at in range(units):
                rt.register(f"unit{at}", {"w": zr.TensorSpec((numel,))})
            gradient = np.ones(numel, F4)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(4):
                    for unit in rt.units.values():
                        unit.reduce({"w": gradient})
                rt.units.wait_for_reductions()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            rt.discard_gradients()
            return most - before, rt.memory()

    # One rank: what the threads of others hold would be counted, too.
    ((most, memory),) = run_threads(1, body)
    assert memory.gradient == units * 4 * 100_032
    assert most < memory.gradient + memory.buckets + 2**20


@pytest.mark.parametrize(
    ("stage", "accumulate", "text"),
    [(3, None, "accumulated sharded"), (3, "local", "accumulated local, in whole gradients"), (1, None, "whole")],
)
def test_a_runtime_says_how_it_accumulates(stage, accumulate, text):
    def body(group):
        for micro_steps in (1, 4):
            with zr.open(zr.Plan.zero(stage), group=group, micro_steps=micro_steps, accumulate=accumulate) as rt:
                assert (text in repr(rt)) == (micro_steps == 4)

    run_threads(1, body)


def test_the_default_is_sharded_where_the_plan_is():
    def body(group):
        for stage, moved in ((1, 1), (2, 2), (3, 2)):
            with zr.open(plan=zr.Plan.zero(stage), group=group, micro_steps=2) as rt:
                unit = rt.register("a", {"w": np.zeros(64, F4)})
                for _ in range(2):
                    unit.reduce({"w": np.ones(64, F4)})
                assert rt.step().bytes_moved["reduce_scatter"] == moved * unit.sections[0].layout.nbytes

    run_threads(2, body)


@pytest.mark.parametrize("stage", [0, 1])
def test_shards_of_whole_gradients_are_refused(stage):
    def body(group):
        with pytest.raises(PlanError, match=r"^Expected a plan that shards gradients with accumulate='sharded', got"):
            zr.open(plan=zr.Plan.zero(stage), group=group, accumulate="sharded", micro_steps=2)

    run_threads(2, body)
    told = {"plan": zr.Plan.zero(stage), "optimizer": zr.SGD(lr=1.0), "size": 2, "accumulate": "sharded"}
    with pytest.raises(PlanError, match=r"Expected a plan that shards gradients"):
        zr.forecast({"a": {"w": zr.TensorSpec((8,))}}, **told)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("lacking", ["all", "one"])
def test_a_micro_step_too_few_is_refused_on_every_rank_by_name(copies, lacking):
    def body(group):
        mesh = zr.mesh(replicate=copies, group=group)
        with zr.open(mesh=mesh, plan=zr.Plan.zero(3), micro_steps=3) as rt:
            units = [rt.register(name, {"w": np.zeros(100, F4)}) for name in "ab"]
            for at in range(3):
                for unit in units:
                    if at < 2 or unit.name == "a" or (lacking == "one" and rt.rank != group.size - 1):
                        unit.reduce({"w": np.ones(100, F4)})
            with pytest.raises((UnitStateError, CallError), match=r"Expected 3 reduce\(\) of unit 'b' .*, got 2"):
                rt.step()
            for _ in range(3):  # nothing is left over
                for unit in units:
                    unit.reduce({"w": np.ones(100, F4)})
            assert rt.step().updated

    run_threads(4, body)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_micro_step_too_many_is_refused_on_every_rank_by_name(copies):
    def body(group):
        mesh = zr.mesh(replicate=copies, group=group)
        with zr.open(mesh=mesh, plan=zr.Plan.zero(3), micro_steps=2) as rt:
            unit = rt.register("a", {"w": np.zeros(100, F4)})
            text = r"Expected at most 2 reduce\(\) of unit 'a' per step, got one more"
            for _ in range(2):
                unit.reduce({"w": np.ones(100, F4)})
            with pytest.raises((UnitStateError, CallError), match=text):
                unit.reduce({"w": np.ones(100, F4)}) if rt.rank == 1 else rt.step()

    run_threads(4, body)


def test_gradients_that_are_discarded_leave_nothing_behind(tmp_path):
    def body(group, gradient):
        with opened(group, tmp_path, gradient=gradient, micro_steps=2) as rt:
            for name in UNITS:
                rt.register(name, {"w": np.zeros(NUMEL, F4)})
            for name in UNITS[:2]:
                rt.units[name].reduce({"w": np.full(NUMEL, 100, F4)})
            rt.discard_gradients()
            for _ in range(2):
                for name in UNITS:
                    rt.units[name].reduce({"w": np.ones(NUMEL, F4)})
            rt.step()
            for value in values_of(rt).values():
                np.testing.assert_array_equal(value, np.full(NUMEL, -2 * rt.size, F4))

    for gradient in (MEMORY, DISK):
        run_threads(2, lambda group, gradient=gradient: body(group, gradient))
