"""Shards cut anew on GPUs: the bits of a run that was never cut, wherever parameters and state rest."""

import tempfile

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import gpu_runs

import zerort as zr

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
PLANS = {
    "zero1": zr.Plan.zero(1),
    "zero3": zr.Plan.zero(3),
    "host": zr.Plan.zero(3, parameter=HOST, state=HOST),
    "disk": zr.Plan.zero(3, parameter=NVME, state=NVME),
}


def digests(group, plan, scratch, *, changes):
    offload = zr.OffloadOptions(chunk_nbytes=16384, threads=2)
    with zr.open(
        plan, zr.AdamW(lr=0.1), group=group, virtual_shards=3, clip_norm=1.0, scratch=scratch, offload=offload
    ) as rt:
        lot, found = np.random.default_rng(group.size), []
        for seed in range(3):
            found += [report.digest for report in gpu_runs.train(rt, "bfloat16", steps=1, seed=seed)]
            if changes:
                weights = lot.integers(0, 4, rt.size)
                rt.rebalance(shard_weights=weights if weights.any() else None)
        return found


@pytest.fixture(scope="module")
def expected(gpus):
    found = digests(gpus, zr.Plan.zero(3), None, changes=False)
    assert len(set(found)) == 3
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_cuts_that_change(plan, gpus, expected):
    with tempfile.TemporaryDirectory() as mine:
        assert digests(gpus, PLANS[plan], WORLD.bcast(mine), changes=True) == expected
        WORLD.Barrier()
