"""Walks under many random interleavings of streams: each is the same training, and none has a race.

13 seeds at each of 1, 2, 3 and 4 ranks, others at each number; ``ZERORT_SEEDS=200`` tries more (`make soak`).
"""

import os

import gpu_runs
import hardware
import numpy as np
import pytest

pytest.importorskip("cupy")

import zerort as zr

pytestmark = [pytest.mark.mpi, hardware.only_emulated("real ones have no seeds")]

HOST = zr.Tier.HOST
SEEDS = int(os.environ.get("ZERORT_SEEDS", "13"))
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
PLANS = [
    zr.Plan.zero(3),
    zr.Plan.zero(3, state=HOST),
    zr.Plan.zero(1),
    zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=HOST),
    zr.Plan.zero(2, gradient=HOST),
    zr.Plan.zero(3, parameter=zr.Tier.NVME, gradient=HOST, state=zr.Tier.NVME),
]


@pytest.fixture
def seeded():
    """Set a seed; afterwards there is none."""
    yield hardware.reseed
    hardware.reseed(0)


@pytest.fixture(scope="module")
def expected(gpus):
    return [train(gpus, plan, at) for at, plan in enumerate(PLANS)]


def train(gpus, plan, at):
    micro_steps = 2 if at % 2 and plan.gradient.tier is zr.Tier.DEVICE else 1
    with zr.open(group=gpus, plan=plan, offload=SMALL, clip_norm=1.0, micro_steps=micro_steps) as rt:
        gpu_runs.train(rt, ("float32", "bfloat16")[at % 2], steps=2)
        return gpu_runs.weights(rt)


@pytest.mark.parametrize("number", range(SEEDS))
def test_no_order_of_streams_changes_a_walk(number, gpus, expected, seeded):
    seeded(1 + number * 4 + gpus.size % 4)
    at = number % len(PLANS)
    for name, value in train(gpus, PLANS[at], at).items():
        np.testing.assert_array_equal(value, expected[at][name], err_msg=name)
