"""Copies of the model on GPUs: sums over them follow each unit's own reduction, and nobody waits for one in vain."""

import time

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import cupy
import gpu_runs

import zerort as zr
from zerort.errors import UnitStateError

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="one rank holds one copy")]

SHARD = 2 if MPI.COMM_WORLD.size == 4 else 1
DEADLINE = 120.0
"""Seconds, for what happens by itself: nothing here takes as long, on any machine."""


def opened(gpus, *, stage=3, **options):
    """Open a runtime over copies of a model of three units."""
    ranks = zr.mesh(shard=SHARD, replicate=gpus.size // SHARD, group=gpus)
    rt = zr.open(mesh=ranks, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=1.0), reduction="sum", **options)
    for name in "abc":
        rt.register(name, {"w": np.zeros(100, np.float32)})
    return rt


def reduce(rt, name):
    """Reduce one unit with this rank's number, from 1 on."""
    rt.units[name].reduce({"w": cupy.full(100, rt.rank + 1, np.float32)})


def expect_sums(rt, *, updates):
    """Expect every parameter to be what so many updates with all ranks' numbers make it."""
    total = sum(range(1, rt.size + 1))
    for name in "abc":
        with rt.units[name].gathered() as p:
            np.testing.assert_array_equal(rt.device.fetch(p["w"]), np.full(100, -updates * total, np.float32))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_each_units_sum_over_copies_follows_its_own_before_the_step(micro_steps, gpus, monkeypatch):
    with opened(gpus, micro_steps=micro_steps) as rt:
        calls = gpu_runs.NcclCalls(monkeypatch)
        expected = []
        for _ in range(micro_steps - 1):  # summed over a copy; over all copies with the last
            for name in "abc":
                reduce(rt, name)
                expected += [("reduce_scatter", name)]
        for name in "cab":  # in the order of reductions, not of registration
            reduce(rt, name)
            expected += [("reduce_scatter", name), ("all_reduce", name)]
            give_up = time.monotonic() + DEADLINE
            while len(calls.made) < len(expected) and time.monotonic() < give_up:
                time.sleep(0.01)
            assert [(op, title.split()[0]) for op, title, _ in calls.made] == expected
        report = rt.step()
        assert [(op, title.split()[0]) for op, title, _ in calls.made] == expected
        assert all(len(names) == 1 for _, _, names in calls.made)
        whole, mine = 128 * 4, max(min(64, 128 - 64 * rt.mesh.shard.rank), 0) * 4 if SHARD == 2 else 128 * 4
        assert report.bytes_moved["all_reduce"] == 3 * mine
        assert report.bytes_moved.get("reduce_scatter", 0) == micro_steps * 3 * whole * (SHARD > 1)
        expect_sums(rt, updates=micro_steps)


def test_gradients_that_rest_partial_are_summed_over_copies_in_the_step(gpus):
    with opened(gpus, stage=1) as rt:
        for name in "abc":
            reduce(rt, name)
        rt.step()
        expect_sums(rt, updates=1)


@pytest.mark.parametrize("lacking", ["b", "bc", "abc"])
def test_copies_that_reduced_other_units_are_told_and_go_on(lacking, gpus):
    with opened(gpus, buckets=3) as rt:
        for name in "abc":
            if rt.mesh.copy or name not in lacking:
                reduce(rt, name)
        with pytest.raises(UnitStateError, match=r"on every rank or on none|Expected gradients before step"):
            rt.step()
        for _ in range(2):  # nothing is left over from before
            for name in "abc":
                reduce(rt, name)
            assert rt.step().updated
        expect_sums(rt, updates=2)
