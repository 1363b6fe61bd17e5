"""A transformer learns on GPUs what it learns on hosts."""

import numpy as np
import pytest

pytest.importorskip("cupy")

import zerort as zr
from zerort.comm import open_group
from zerort.testing.tolerance import OVER_STEPS
from zerort.workload import ByteModel, ByteText, Walk

pytestmark = pytest.mark.mpi

MODEL = ByteModel(width=8, layers=1, context=12, heads=2)
TEXT = ByteText(rows=6, context=MODEL.context, limit=10_000)


def learn(group, *, stage):
    """Return what every step's loss was, and the parameters at the end."""
    with zr.open(group=group, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=0.1, momentum=0.9), clip_norm=1.0) as rt:
        walk = Walk(rt, MODEL, TEXT, dtype="float64")
        return walk.train(3), walk.parameters()


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_are_the_hosts(stage, options):
    with open_group(options=options) as hosts:
        losses, expected = learn(hosts, stage=stage)
    with open_group(kind="nccl", options=options) as gpus:
        found_losses, found = learn(gpus, stage=stage)
    np.testing.assert_allclose(found_losses, losses, rtol=OVER_STEPS)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=OVER_STEPS, err_msg=name)
