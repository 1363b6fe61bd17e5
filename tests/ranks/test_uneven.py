"""Ranks with different numbers of samples, in processes of their own: weighted steps over one order, and of batches."""

import socket
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.engine.step.facts.pace import Pace
from zerort.testing.tolerance import OVER_STEPS

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

X = np.random.default_rng(0).normal(size=(203, 6))
Y = X @ np.arange(6.0) - 1.0
ORDER = zr.data.Order(length=len(X), batch=11, seed=7)  # the last batch has 5: with 8 ranks, 3 have none


@pytest.fixture(params=["node", pytest.param("mpi", id="over-mpi"), "hierarchical"])
def group(request, options):
    if request.param == "hierarchical":
        machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        made = Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))
    else:
        made = open_group(kind=request.param, options=options)
    with made as group:
        yield group


def train(group, *, plan):
    shares = [rank % 3 + (group.size < 3) for rank in range(group.size)]  # some ranks get nothing, ever
    with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=0.1), group=group, clip_norm=1.0) as rt:
        line = rt.register("line", {"w": np.zeros(6), "b": np.zeros(1)})
        for indices in rt.take(ORDER, epochs=2, shares=shares):
            with line.gathered() as p:
                error = X[indices] @ p["w"] + p["b"] - Y[indices]
                line.reduce({"w": error @ X[indices], "b": error.sum(keepdims=True)})
            rt.step(weight=len(indices))
        with line.gathered() as p:
            return np.concatenate([p["w"], p["b"]])


@pytest.mark.smoke
@pytest.mark.parametrize("plan", [1, 3])
def test_uneven_shares_train_as_one_process_does(group, plan):
    with open_group(kind="solo") as solo:
        expected = train(solo, plan=0)
    np.testing.assert_allclose(train(group, plan=plan), expected, rtol=OVER_STEPS, atol=OVER_STEPS)


@pytest.mark.smoke
def test_ranks_with_different_numbers_of_batches_end_together(group):
    counts = [(3 * rank + 2) % 8 for rank in range(group.size)]  # 2 5 0 3 6 1 4 7
    every = [
        [np.arange(20 * rank + at, 20 * rank + at + 4) for at in range(count)] for rank, count in enumerate(counts)
    ]

    def joined(group, batches):
        with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), group=group) as rt:
            line = rt.register("line", {"w": np.zeros(6)})
            joining = rt.join(batches)
            for rows in joining:
                with line.gathered() as p:
                    error = X[rows] @ p["w"] - Y[rows]
                line.reduce({"w": error @ X[rows] * (np.nan if joining.repeating else 1.0)})
                rt.step(weight=len(rows))
            with line.gathered() as p:
                return p["w"].copy(), rt.updates

    with open_group(kind="solo") as solo:
        together = [np.concatenate([rows for one in every for rows in one[at : at + 1]]) for at in range(max(counts))]
        expected, _ = joined(solo, together)
    found, updates = joined(group, every[group.rank])
    assert updates == max(counts)
    np.testing.assert_allclose(found, expected, rtol=OVER_STEPS, atol=OVER_STEPS)


@pytest.fixture
def clock():
    """A clock of this rank's own, in hours of nanoseconds, by which its times are taken: what it waits is nothing."""
    now = [0]
    watch = SimpleNamespace(perf_counter_ns=lambda: now[0])
    with mock.patch.object(sys.modules[Pace.__module__], "time", watch):
        yield now


def test_a_rank_with_more_work_is_given_less(options, clock):
    """Rank 0 computes each of its samples three times, with a tenth of jitter."""
    jitter = np.random.default_rng(WORLD.rank)
    order = zr.data.Order(length=len(X), batch=4 * WORLD.size, seed=7)  # a rank can be given less
    with (
        open_group(options=options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), group=group) as rt,
    ):
        line = rt.register("line", {"w": np.zeros(6)})
        for indices in rt.take(order, epochs=6):
            clock[0] += int(1e13 * jitter.lognormal(0, 0.1)) * len(indices) * (3 if rt.rank == 0 else 1)
            with line.gathered() as p:
                error = X[indices] @ p["w"] - Y[indices]
            line.reduce({"w": error @ X[indices]})
            rt.step(weight=len(indices))
        done = rt.rebalance("auto")
        assert len(set(WORLD.allgather(str(done)))) == 1
        if rt.size == 1:
            assert done.why.startswith("kept")
            return
        assert done.shares is not None, done
        assert done.shares[0] < 0.5 * min(done.shares[1:])
        assert "rank 0 takes" in done.why
        taken = WORLD.allgather(len(next(rt.take(order, epochs=8))))
        assert taken[0] < max(taken[1:])


def test_a_rank_at_half_speed_is_named_within_20_steps(options, clock):
    """The last one computes for twice as long, with a tenth of jitter."""
    jitter = np.random.default_rng(WORLD.rank)
    with (
        open_group(options=options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as rt,
    ):
        line = rt.register("line", {"w": np.zeros(6)})
        slow, named = rt.size - 1, []
        for number in range(20):
            clock[0] += int(1e13 * jitter.lognormal(0, 0.1)) * (2 if rt.rank == slow else 1)
            line.reduce({"w": np.ones(6)})
            report = rt.step()
            if report.straggler:
                named.append((number, report.straggler))
        assert len(set(WORLD.allgather(str(named)))) == 1
        if rt.size == 1:
            assert not named
            return
        assert named[0][0] >= 10  # not for a few steps
        assert {who for _, who in named} == {f"rank {slow} on {socket.gethostname()} (host)"}
