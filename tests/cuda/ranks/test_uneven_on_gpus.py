"""Ranks that differ, with a GPU each: weighted steps, batches that run out, orders, shares by measured times."""

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import cupy
import gpu_runs

import zerort as zr
from zerort.comm import open_group
from zerort.engine.rebalance.deciding import LEAST_STEPS
from zerort.errors import PlanError
from zerort.testing.tolerance import OVER_STEPS

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

X = np.random.default_rng(0).normal(size=(53, 6))
Y = X @ np.arange(6.0) - 1.0
ORDER = zr.data.Order(length=len(X), batch=11, seed=7)


def opened(group, plan=3, **options):
    rt = zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=0.1), group=group, **options)
    return rt, rt.register("line", {"w": np.zeros(6)})


def step(rt, line, rows, *, spoilt=False):
    """Take a weighted step over some rows, where the parameters lie: sums over rows, element by element."""
    with line.gathered() as p:
        at = cupy if isinstance(p["w"], cupy.ndarray) else np
        x = at.asarray(X[rows])
        error = (x * p["w"]).sum(1) - at.asarray(Y[rows])
        gradient = (error[:, None] * x).sum(0) * (np.nan if spoilt else 1.0)
    line.reduce({"w": gradient})
    return rt.step(weight=len(rows))


def whole(line):
    with line.gathered() as p:
        return cupy.asnumpy(p["w"]).copy()


def taken(group, *, plan=3, between=lambda rt, number: None, shares=None):
    rt, line = opened(group, plan)
    with rt:
        counts = []
        for number, indices in enumerate(rt.take(ORDER, epochs=2, shares=shares)):
            counts.append(len(indices))
            step(rt, line, indices)
            between(rt, number)
        return whole(line), counts


@pytest.fixture(scope="module")
def expected():
    with open_group(kind="solo") as solo:
        return taken(solo, plan=0)[0]


@pytest.mark.parametrize("plan", [1, 3])
def test_uneven_shares_train_as_one_process_does(gpus, expected, plan):
    shares = [rank % 3 + (gpus.size < 3) for rank in range(gpus.size)]
    found, _ = taken(gpus, plan=plan, shares=shares)
    np.testing.assert_allclose(found, expected, rtol=OVER_STEPS, atol=OVER_STEPS)


def test_ranks_with_different_numbers_of_batches_end_together(gpus):
    counts = [(3 * rank + 2) % 8 for rank in range(gpus.size)]
    every = [[np.arange(9 * rank + at, 9 * rank + at + 4) for at in range(count)] for rank, count in enumerate(counts)]

    def joined(group, batches):
        rt, line = opened(group)
        with rt:
            joining = rt.join(batches)
            for rows in joining:
                step(rt, line, rows, spoilt=joining.repeating)
            return whole(line), rt.updates

    with open_group(kind="solo") as solo:
        together = [np.concatenate([rows for one in every for rows in one[at : at + 1]]) for at in range(max(counts))]
        alone, _ = joined(solo, together)
    found, updates = joined(gpus, every[gpus.rank])
    assert updates == max(counts)
    np.testing.assert_allclose(found, alone, rtol=OVER_STEPS, atol=OVER_STEPS)


def test_shares_and_shards_follow_measured_times(gpus, expected):
    """Rank 0 is said to take three times as long for a sample; then its updates are said to be the slow part."""
    told = []

    def between(rt, number):
        if number not in (3, 6):
            return
        slow = 3.0 if rt.rank == 0 else 1.0
        compute, update = (slow, 0.0) if number == 3 else (0.01, slow)
        rt.context.pace.times.clear()
        rt.context.pace.times.extend([(compute, update, 11 // rt.size)] * LEAST_STEPS)
        told.append(rt.rebalance("auto"))

    found, counts = taken(gpus, between=between)
    np.testing.assert_allclose(found, expected, rtol=OVER_STEPS, atol=OVER_STEPS)
    assert len(set(WORLD.allgather(str(told)))) == 1
    first, second = told
    if gpus.size == 1:
        assert (first.changed, second.changed) == (False, False)
        return
    assert first.shares[0] < min(first.shares[1:])
    assert first.nbytes == 0
    assert second.shard_weights[0] < min(second.shard_weights[1:])
    sizes = WORLD.allgather(counts)
    assert [sum(one[at] for one in sizes) for at in range(10)] == [11, 11, 11, 11, 9] * 2


def test_memory_of_a_gpu_is_predicted_and_plans_that_leave_it_are_refused(gpus, shared_tmp_path):
    rt, line = opened(gpus, history=shared_tmp_path / "peaks.jsonl")
    with rt:
        for _ in range(3):
            step(rt, line, np.arange(4))
        seen = rt.predict(batch=4)
        free, total = rt.device.memory()
        assert seen.layout == max(WORLD.allgather(rt.memory().in_memory))
        assert seen.low <= max(WORLD.allgather(total - free)) <= seen.high
        assert seen.fits
        assert rt.predict(plan=zr.Plan.zero(0)).layout > 0
        with pytest.raises(PlanError, match="keeps all in a GPU's memory"):
            rt.predict(plan=zr.Plan.zero(3, state=zr.Tier.HOST))
