"""Where parameters, gradients and state rest, on GPUs, on hosts or on disks, does not show in what is trained."""

import gpu_runs
import numpy as np
import pytest

pytest.importorskip("cupy")

import zerort as zr
from zerort.comm import open_group

pytestmark = pytest.mark.mpi

DEVICE, HOST, NVME = zr.Tier.DEVICE, zr.Tier.HOST, zr.Tier.NVME
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2)  # chunks of 2048 elements
OPTIONS = {"optimizer": zr.AdamW(lr=1e-2, weight_decay=0.1), "clip_norm": 1.0, "offload": SMALL}


@pytest.fixture(scope="module")
def gpus(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture(scope="module")
def all_on_gpus(gpus):
    """What runs with everything on the GPUs give, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        with zr.open(group=gpus, plan=zr.Plan.zero(3), **OPTIONS) as rt:
            gpu_runs.train(rt, dtype)
            found[dtype] = gpu_runs.weights(rt)
    return found


def tiers(stage, **parts):
    title = "-".join([str(stage), *(f"{part}={tier.name}" for part, tier in parts.items())])
    return pytest.param(zr.Plan.zero(stage, **parts), id=title)


PLANS = [
    tiers(1, state=HOST),
    tiers(2, gradient=HOST, state=HOST),
    tiers(3, parameter=HOST),
    tiers(3, parameter=HOST, gradient=HOST, state=HOST),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
def test_where_values_rest_does_not_show(plan, dtype, gpus, all_on_gpus, shared_tmp_path):
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **OPTIONS) as rt:
        gpu_runs.train(rt, dtype)
        for name, value in gpu_runs.weights(rt).items():
            np.testing.assert_array_equal(value, all_on_gpus[dtype][name], err_msg=name)
