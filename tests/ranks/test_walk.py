"""A sharded run is the same training as one process, under every plan and at every number of ranks.

In float64 over steps; in float32 over the first one; see `zerort.testing.tolerance`.
"""

import dataclasses
import os

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort.comm import open_group
from zerort.testing.tolerance import OVER_STEPS, rounding
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Reference, Walk

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

ROWS, STEPS = 24, 4
LR = zr.warmup_cosine(2e-2, warmup=2, total=STEPS)
DECAY = {
    "optimizer": zr.AdamW(lr=LR, weight_decay=0.1),
    "param_groups": [zr.ParameterGroup(("*.b_*", "*.norm*"), weight_decay=0)],
}


@pytest.fixture(scope="module")
def model():
    return ByteModel(width=16, layers=2, context=12, heads=2)


@pytest.fixture(scope="module")
def text():
    return ByteText(rows=ROWS, context=12, limit=50_000)


@pytest.fixture(scope="module")
def reference(model, text):
    """What one process computes in float64; each rank for itself."""
    run = Reference(
        model,
        text,
        lr=LR,
        weight_decay=0.1,
        decays=lambda name: ".b_" not in name and ".norm" not in name,
        clip_norm=1.0,
        dtype="float64",
    )
    losses = run.train(STEPS)
    return losses, run.parameters(), run.norms


TRANSPORTS = {
    "node": lambda options: open_group(kind="node", options=options),
    "queued": lambda options: open_group(kind="node", options=dataclasses.replace(options, eager_nbytes=0)),
    "over_mpi": lambda options: open_group(kind="mpi", options=options),
    "hosts": open_hosts,
}
if len(set(WORLD.allgather(os.uname().nodename))) > 1:  # tests/jobs/test_hosts_suites.py
    TRANSPORTS = {"network": lambda options: open_group(options=options)}


@pytest.fixture(scope="module", params=TRANSPORTS)
def group(request, options):
    if WORLD.size > 4 and request.param in ("queued", "over_mpi"):
        pytest.skip("1 to 4 ranks")
    with TRANSPORTS[request.param](options) as group:
        yield group


def relative(found, expected):
    """The distance of two models, as a fraction of the second's length."""
    difference = sum(float(((found[name] - expected[name]).astype(np.float64) ** 2).sum()) for name in expected)
    return np.sqrt(difference / sum(float((one.astype(np.float64) ** 2).sum()) for one in expected.values()))


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharded_run_is_the_reference(stage, group, model, text, reference):
    losses, parameters, norms = reference
    with zr.open(plan=zr.Plan.zero(stage), group=group, clip_norm=1.0, **DECAY) as rt:
        walk = Walk(rt, model, text, dtype="float64")
        found = walk.train(STEPS)
        np.testing.assert_allclose(found, losses, rtol=OVER_STEPS)
        np.testing.assert_allclose([report.grad_norm for report in walk.reports], norms, rtol=OVER_STEPS)
        assert relative(walk.parameters(), parameters) < OVER_STEPS
        assert [report.update for report in walk.reports] == list(range(1, STEPS + 1))
        assert all(report.updated and not report.why for report in walk.reports)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_step_in_float32_is_the_references(stage, group, model, text, reference):
    """Its loss and its gradients' norm, sums of one sign: over 288 tokens, of products of up to 256 in 2 layers."""
    losses, _, norms = reference
    with zr.open(plan=zr.Plan.zero(stage), group=group, clip_norm=1.0, **DECAY) as rt:
        walk = Walk(rt, model, text)
        bound = rounding("float32", 2000)
        np.testing.assert_allclose(walk.train(1), losses[:1], rtol=bound)
        np.testing.assert_allclose(walk.reports[0].grad_norm, norms[0], rtol=bound)


@pytest.mark.parametrize(
    ("stage", "micro_steps", "accumulate"), [(1, 2, "local"), (2, 3, "local"), (2, 3, "sharded"), (3, 2, "sharded")]
)
def test_micro_steps_are_the_reference(stage, micro_steps, accumulate, group, model, text, reference):
    losses, parameters, _ = reference
    options = {"clip_norm": 1.0, "micro_steps": micro_steps, "accumulate": accumulate, **DECAY}
    with zr.open(plan=zr.Plan.zero(stage), group=group, **options) as rt:
        walk = Walk(rt, model, text, dtype="float64")
        np.testing.assert_allclose(walk.train(STEPS), losses, rtol=OVER_STEPS)
        assert relative(walk.parameters(), parameters) < OVER_STEPS
        moved = walk.reports[-1].bytes_moved
        flat = sum(section.layout.nbytes for unit in walk.units.values() for section in unit.sections)
        times = 1 if accumulate == "local" else micro_steps
        assert moved.get("reduce_scatter", 0) == (times * flat if rt.size > 1 else 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_uneven_ranks_are_the_reference(stage, group, model, text, reference):
    losses, parameters, _ = reference
    weights = [float(rank % 3) for rank in range(1, group.size + 1)]  # some ranks hold nothing
    with zr.open(plan=zr.Plan.zero(stage), group=group, clip_norm=1.0, shard_weights=weights, **DECAY) as rt:
        walk = Walk(rt, model, text, dtype="float64")
        np.testing.assert_allclose(walk.train(STEPS), losses, rtol=OVER_STEPS)
        assert relative(walk.parameters(), parameters) < OVER_STEPS
        if weights[rt.rank] == 0:
            memory = rt.memory()
            assert memory.gradient == memory.state == 0
            assert stage == 2 or memory.parameter == 0


@pytest.mark.parametrize(("stage", "replicate"), [(0, 2), (1, 4), (2, 2), (3, 2), (3, 4)])
def test_hybrid_sharding_is_the_reference(stage, replicate, group, model, text, reference):
    if group.size % replicate:
        with pytest.raises(zr.errors.PlanError, match="Expected shard \\* replicate to be the number of ranks"):
            zr.mesh(shard=2, replicate=group.size, group=group) if group.size > 1 else zr.mesh(shard=3, group=group)
        return
    losses, parameters, _ = reference
    ranks = zr.mesh(shard=group.size // replicate, replicate=replicate, group=group)
    with zr.open(plan=zr.Plan.zero(stage), mesh=ranks, clip_norm=1.0, **DECAY) as rt:
        walk = Walk(rt, model, text, dtype="float64")
        np.testing.assert_allclose(walk.train(STEPS), losses, rtol=OVER_STEPS)
        assert relative(walk.parameters(), parameters) < OVER_STEPS


@pytest.mark.parametrize(
    ("stage", "dtype", "bound"),
    [(0, "float16", 0.003), (1, "bfloat16", 0.02), (2, "float16", 0.003), (3, "bfloat16", 0.02), (3, "float16", 0.003)],
)
def test_half_precision_stays_within_its_bound(stage, dtype, bound, group, model, text, reference):
    """Each of the steps rounds every parameter once: to 2⁻⁹ in bfloat16, 2⁻¹² in float16. CPUs differ by 2⁻²⁴."""
    losses, parameters, _ = reference
    scale = zr.LossScale(initial=1024.0) if dtype == "float16" else None
    with zr.open(
        plan=zr.Plan.zero(stage), group=group, clip_norm=1.0, gradient_dtype="float32", loss_scale=scale, **DECAY
    ) as rt:
        walk = Walk(rt, model, text, dtype=dtype)
        np.testing.assert_allclose(walk.train(STEPS), losses, rtol=bound)
        found = {name: value.astype(np.float64) for name, value in walk.parameters().items()}
        assert relative(found, parameters) < bound
