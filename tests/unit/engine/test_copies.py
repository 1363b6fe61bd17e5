"""Copies of the model: sums over them follow each unit's own reduction, and nobody waits for one that never comes."""

import json
import time

import numpy as np
import pytest

import zerort as zr
from zerort.engine.step.discard import forget_gradients
from zerort.errors import CallError, CollectiveError, UnitStateError
from zerort.testing import run_threads

F4 = np.float32
DEADLINE = 60.0
"""Seconds, for what happens by itself: nothing here takes as long, on any machine."""


def ones(numel):
    return np.ones(numel, F4)


def opened(group, *, shard=2, stage=3, **options):
    """Open a runtime over copies of a model of three units."""
    ranks = zr.mesh(shard=shard, replicate=group.size // shard, group=group)
    rt = zr.open(mesh=ranks, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=1.0), reduction="sum", **options)
    for name in "abc":
        rt.register(name, {"w": np.zeros(100, F4)})
    return rt


def sums_over_copies(rt, directory):
    """Return the sums over copies that were made, as the group's flight record has them: (name, how it ended)."""
    path = rt.mesh.replicate.flight_record(directory)
    calls = json.loads(path.read_text())["calls"]
    return [(call["name"].split()[0], call["status"]) for call in calls if call["op"] == "all_reduce"]


def until(rt, directory, expected):
    """Wait until the sums over copies are these, without a call that would help them along."""
    give_up = time.monotonic() + DEADLINE
    while sums_over_copies(rt, directory) != expected and time.monotonic() < give_up:
        time.sleep(0.01)
    assert sums_over_copies(rt, directory) == expected


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("shard", [1, 2])
def test_each_units_sum_over_copies_follows_its_own_before_the_step(stage, shard, tmp_path):
    def body(group):
        directory = tmp_path / str(group.rank)
        with opened(group, shard=shard, stage=stage) as rt:
            made = []
            for name in "cab":  # in the order of reductions, not of registration
                rt.units[name].reduce({"w": (rt.rank + 1) * ones(100)})
                made.append((name, "done"))
                until(rt, directory, made)  # on all ranks, and none has come to the next
            report = rt.step()
            assert sums_over_copies(rt, directory) == made  # no further one
            assert report.bytes_moved["all_reduce"] == bytes_over_copies(rt, stage)
            for name in "abc":
                with rt.units[name].gathered() as p:
                    np.testing.assert_array_equal(p["w"], -10 * ones(100))

    run_threads(4, body)


def bytes_over_copies(rt, stage):
    """Return what the three units' sums over copies are: of shards, or of all; and of all over one copy, in ZeRO-0."""
    within = 3 * 128 * 4 * (stage == 0 and rt.mesh.shard.size > 1)
    return within + 3 * 4 * (128 if stage == 0 else 128 // rt.mesh.shard.size)


def test_micro_steps_are_summed_over_copies_with_the_last(tmp_path):
    def body(group):
        directory = tmp_path / str(group.rank)
        with opened(group, micro_steps=2) as rt:
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            group.barrier().wait()
            assert sums_over_copies(rt, directory) == []
            rt.units["b"].reduce({"w": ones(100)})
            until(rt, directory, [("b", "done")])
            for name in "ac":
                rt.units[name].reduce({"w": ones(100)})
            rt.step()
            with rt.units["a"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -8 * ones(100))

    run_threads(4, body)


def test_gradients_that_rest_partial_are_summed_over_copies_in_the_step():
    def body(group):
        with opened(group, stage=1) as rt:
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            rt.step()
            with rt.units["b"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -4 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_without_gradients_leaves_nothing_behind(stage):
    def body(group):
        with opened(group, stage=stage, micro_steps=2) as rt:
            for gradients in ({}, {"w": ones(100)}):
                for name in "abcabc":
                    rt.units[name].reduce(gradients)
                assert rt.step().updated is bool(gradients)
            with rt.units["a"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -8 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("verb", ["step", "discard"])
@pytest.mark.parametrize(
    "lacking",
    [{2: "b", 3: "b"}, {0: "bc", 1: "bc"}, {1: "b"}, {0: "a", 3: "c"}, {1: "abc"}],
    ids=["a copy", "most of a copy", "a rank", "two ranks", "all of a rank"],
)
def test_ranks_that_reduced_other_units_are_told_and_go_on(lacking, verb):
    def body(group):
        with opened(group, buckets=3) as rt:  # so many that no reduction waits for the one before
            for name in "abc":
                if name not in lacking.get(rt.rank, ""):
                    rt.units[name].reduce({"w": 100 * ones(100)})
            if verb == "step":
                with pytest.raises(UnitStateError, match=r"on every rank or on none|Expected gradients before step"):
                    rt.step()
            else:
                rt.discard_gradients()
            for name in "abc":  # nothing is left over from before
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated
            for name in "abc":
                with rt.units[name].gathered() as p:
                    np.testing.assert_array_equal(p["w"], -4 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("lacking", [{0: "a"}, {0: "a", 3: "c"}, {2: "a", 3: "a"}])
def test_ranks_that_wait_for_a_bucket_meanwhile_are_told_too(lacking):
    def train(rt):
        for name in "abc":
            if name not in lacking.get(rt.rank, ""):
                rt.units[name].reduce({"w": ones(100)})
        rt.step()

    def body(group):
        with opened(group, buckets=1) as rt, pytest.raises(UnitStateError, match="on every rank or on none"):
            train(rt)

    run_threads(4, body)


def test_copies_that_reduce_in_different_orders_are_told():
    def body(group):
        with opened(group) as rt:
            for name in "abc" if rt.mesh.copy else "acb":
                rt.units[name].reduce({"w": ones(100)})
            with pytest.raises(CollectiveError, match="all_reduce"):
                rt.step()
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated

    run_threads(4, body)


def test_a_wrong_gradient_leaves_no_copy_waiting():
    def body(group):
        with opened(group) as rt:
            rt.units["a"].reduce({"w": ones(100)})
            wrong = rt.rank == 0
            if not wrong:
                rt.units["b"].reduce({"w": ones(100)})
            with pytest.raises(CallError, match=r"shape \[100\], got \[99\]"):
                rt.units["b"].reduce({"w": ones(99)}) if wrong else rt.step()
            if wrong:
                forget_gradients(rt.context, rt.units)
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated

    run_threads(4, body)
