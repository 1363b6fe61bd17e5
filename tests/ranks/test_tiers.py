"""Where parameters, gradients and state rest does not show in a single bit of what is trained."""

import dataclasses
import os
import shutil
import tempfile

import numpy as np
import pytest
from ml_dtypes import bfloat16
from mpi4py import MPI
from runs import assert_same, open_hosts, weights

import zerort as zr
from zerort.comm import open_group
from zerort.testing.contracts.ties import TiesContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]

DEVICE, HOST, NVME = zr.Tier.DEVICE, zr.Tier.HOST, zr.Tier.NVME
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2)  # chunks of 2048 elements
STEPS = 10  # in which each tensor and each unit is once without a gradient
OPTIMIZERS = {
    "adamw": {
        "optimizer": zr.AdamW(lr=1e-2, weight_decay=0.1),
        "param_groups": [zr.ParameterGroup("*.b", weight_decay=0.0)],
    },
    # Only some tensors have state.
    "sgd": {"optimizer": zr.SGD(lr=1e-2, momentum=0.9), "param_groups": [zr.ParameterGroup("*.w", momentum=0.0)]},
}


TRANSPORTS = {
    "node": lambda options: open_group(kind="node", options=options),
    "over_mpi": lambda options: open_group(kind="mpi", options=options),
    "hosts": open_hosts,
}


@pytest.fixture(scope="module")
def group(request, options):
    with TRANSPORTS[request.param](options) as group:
        yield group


@pytest.fixture
def scratch():
    """One directory for all ranks; nothing is left in it."""
    where = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield where
    WORLD.Barrier()
    left = os.listdir(where)
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(where)
    assert left == []


def parameters(dtype):
    generator = np.random.default_rng(0)
    shapes = {"w": (90, 70), "b": (70,), "c": (61, 41)}
    return [{name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()} for _ in range(2)]


def train(rt, dtype, *, steps=STEPS, seed=1):
    """Train on gradients that depend on the parameters, and return what all of them are in the end."""
    if not rt.units:
        for at, tensors in enumerate(parameters(dtype)):
            rt.register(f"unit{at}", tensors, frozen="c" if at == 1 else False)
    units = list(rt.units.values())
    generator = np.random.default_rng((seed, rt.rank))
    for step in range(steps):
        gradients = {}
        for unit in (*units, *units[::-1]):
            with unit.gathered() as p:
                for name in unit.trainable:
                    noise = generator.standard_normal(p[name].shape).astype(np.float32)
                    gradients[unit.name, name] = (noise + p[name].astype(np.float32)).astype(dtype)
        for unit in units[::-1]:
            # Once a tensor has no gradient anywhere, and once a unit has none.
            used = [] if (step, unit.name) == (5, "unit1") else unit.trainable
            used = [name for name in used if (step, name) != (3, "b")]
            unit.reduce({name: gradients[unit.name, name] for name in used})
        report = rt.step()
        assert report.updated
    return weights(rt), report


@pytest.fixture(scope="module")
def in_memory(group):
    """What every plan has to end with, by dtype and optimizer: computed once, in memory."""
    found = {}

    def run(dtype, optimizer):
        key = np.dtype(dtype).name, optimizer
        if key not in found:
            with zr.open(plan=zr.Plan.zero(3), group=group, clip_norm=2.0, **OPTIMIZERS[optimizer]) as rt:
                found[key] = train(rt, dtype)[0]
        return found[key]

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, what is trained under it, and over which transport."""

    name: str
    plan: zr.Plan
    dtype: type = np.float32
    transport: str = "node"

    @property
    def on_disk(self):
        """The parts of the plan that rest on a disk."""
        return {part for part in ("parameter", "gradient", "state") if getattr(self.plan, part).tier is NVME}

    def param(self):
        """What `pytest.mark.parametrize` takes: the transport, for the group, and the case."""
        smoke = [pytest.mark.smoke] if self == SMOKE else []
        ids = f"{self.name}-{np.dtype(self.dtype).name}-{self.transport}"
        return pytest.param(self.transport, self, id=ids, marks=smoke)


PLANS = {
    "zero1 state": zr.Plan.zero(1, state=NVME),
    "zero2 gradient state": zr.Plan.zero(2, gradient=NVME, state=NVME),
    "zero3 state": zr.Plan.zero(3, state=NVME),
    "zero3 parameter": zr.Plan.zero(3, parameter=NVME),
    "zero3 gradient": zr.Plan.zero(3, gradient=NVME),
    "zero3 parameter state": zr.Plan.zero(3, parameter=NVME, gradient=HOST, state=NVME),
    "zero3 everything": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
    "zero3 host": zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=HOST),
}
EVERYTHING = PLANS["zero3 everything"]
SMOKE = Case("zero3 everything", EVERYTHING)
CASES = [
    *(Case(name, plan, dtype) for name, plan in PLANS.items() for dtype in (np.float32, bfloat16)),
    # float64 differs by chunks of twice the bytes and no master weights: three plans show that.
    *(Case(name, PLANS[name], np.float64) for name in ("zero3 everything", "zero3 state", "zero3 host")),
    # Only gathers differ between transports: one plan shows that.
    *(
        Case("zero3 everything", EVERYTHING, dtype, transport)
        for transport in ("over_mpi", "hosts")
        for dtype in (bfloat16, np.float64)
    ),
]


@pytest.mark.parametrize(("group", "case"), [case.param() for case in CASES], indirect=["group"])
def test_every_plan_gives_the_same_bits(group, scratch, in_memory, case):
    expected = in_memory(case.dtype, "adamw")
    with zr.open(
        plan=case.plan, group=group, clip_norm=2.0, scratch=scratch, offload=SMALL, **OPTIMIZERS["adamw"]
    ) as rt:
        found, report = train(rt, case.dtype)
        memory = rt.memory()
    assert_same(found, expected)
    assert bool(memory.nvme) == bool(report.bytes_tiered) == ("nvme" in report.stalls) == bool(case.on_disk)
    for part in ("parameter", "gradient", "state"):
        assert (getattr(memory, part) == 0) == (part in case.on_disk), part
    if case.plan == PLANS["zero3 state"]:
        assert report.bytes_tiered == {"nvme read": memory.nvme, "nvme write": memory.nvme}


@pytest.mark.parametrize("group", ["node"], indirect=True)
def test_state_that_some_tensors_have(group, scratch, in_memory):
    expected = in_memory(bfloat16, "sgd")
    plan = zr.Plan.zero(3, state=NVME)
    with zr.open(plan=plan, group=group, clip_norm=2.0, scratch=scratch, offload=SMALL, **OPTIMIZERS["sgd"]) as rt:
        assert_same(train(rt, bfloat16)[0], expected)


@pytest.mark.skipif(WORLD.size != 3, reason="threads and GPUs run it at other numbers of ranks")
@pytest.mark.parametrize("group", TRANSPORTS, indirect=True)
class TestTies(TiesContract):
    """Units that share a parameter."""

    orders = TiesContract.orders[::5]  # the first and the last
