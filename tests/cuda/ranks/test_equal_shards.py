"""Shards of one length on GPUs: one call of NCCL's for each collective, and nothing else that padding could change."""

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy
import gpu_runs

import zerort as zr
from zerort.comm import open_group
from zerort.device import HostDevice
from zerort.engine.step.digest import digest_of
from zerort.layout import FlatLayout

pytestmark = pytest.mark.mpi

UNITS = {
    "scalar": {"x": ()},
    "ten": {"x": (10,)},
    "line": {"x": (64,)},
    "odd": {"w": (37, 29), "b": (29,), "none": (0, 3)},
    "wide": {"w": (90, 70), "b": (70,)},
    "long": {"w": (3, 1024)},
    "last": {"w": (41, 100)},
}
SEEN = {
    0: {"allReduce"},
    1: {"reduceScatter", "allGather"},
    2: {"reduceScatter", "allGather"},
    3: {"reduceScatter", "allGather"},
    "tree": {"allGather"},
}
"""What NCCL is asked for, by stage; besides, in the tree, for what each rank has for every other."""
SPECS = {unit: {name: zr.TensorSpec(shape) for name, shape in tensors.items()} for unit, tensors in UNITS.items()}


@pytest.fixture(scope="module")
def hosts(options):
    with open_group(options=options) as group:
        yield group


def train(rt, *, steps):
    """Train all units, with numbers that sum exactly unless the order is fixed; return the reports."""
    asarray = np.asarray if isinstance(rt.device, HostDevice) else cupy.asarray
    units = []
    for unit, tensors in UNITS.items():
        values = {name: np.full(shape, 0.5, np.float32) for name, shape in tensors.items()}
        units.append(rt.register(unit, values))
    reports = []
    for step in range(steps):
        for shard in rt.micro_batches:
            lot = np.random.default_rng((step, shard))
            for unit in units:
                with unit.gathered() as p:
                    noise = {name: lot.standard_normal(p[name].shape) for name in p}
                if not rt.context.options.virtual_shards:
                    noise = {name: np.round(4 * one) / 4 for name, one in noise.items()}
                unit.reduce({name: asarray(one, np.float32) for name, one in noise.items()})
        reports.append(rt.step())
    return reports


def settings_of(stage, size):
    """Return a run's settings; ``"tree"`` is the fixed one, with granules of 1,024."""
    if stage != "tree":
        return {"plan": zr.Plan.zero(stage), "optimizer": zr.AdamW(lr=0.1), "clip_norm": 1.0}
    return {**settings_of(3, size), "virtual_shards": 2 * size}


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "tree"])
def test_every_collective_of_a_step_is_one_call_of_nccls(stage, gpus, hosts, monkeypatch):
    settings = settings_of(stage, gpus.size)
    with zr.open(group=hosts, **settings) as rt:
        expected = train(rt, steps=8 if stage == "tree" else 2)
        digest = digest_of(rt.context, rt.units)
    calls = gpu_runs.NcclCalls(monkeypatch)
    with zr.open(group=gpus, **settings) as rt:
        found = train(rt, steps=8 if stage == "tree" else 2)
        forecast = zr.forecast(SPECS, size=gpus.size, rank=gpus.rank, device="cuda", **told(settings))
        held = rt.memory()
        assert digest_of(rt.context, rt.units) == digest
    apart = {"all_to_all"}  # each rank has something else for every other
    odd = [(op, names) for op, _, names in calls.made if op not in apart and len(names) != 1]
    assert not odd
    seen = {name for op, _, names in calls.made for name in names if op not in apart}
    assert seen == (SEEN[stage] if gpus.size > 1 else seen & SEEN[stage])
    # All is the host's to the bit: sums of quarters are exact in any order. So are bytes, without padding.
    model = sum(FlatLayout.build(tensors).nbytes for tensors in UNITS.values())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad_norm == theirs.grad_norm
        moved = dict(ours.bytes_moved)
        assert moved.pop("all_gather", 0) % model == 0  # hosts share memory, and may gather nothing
        assert moved == {op: nbytes for op, nbytes in theirs.bytes_moved.items() if op != "all_gather"}
    for part in ("parameter", "gradient", "state", "buckets", "gathered"):
        assert getattr(held, part) == getattr(forecast, part), part


@pytest.mark.parametrize("tier", [zr.Tier.HOST, zr.Tier.NVME])
def test_padding_rests_anywhere_and_is_in_no_checkpoint(tier, gpus, hosts, shared_tmp_path):
    """Some ranks hold nothing but padding of small units, on the host or on a disk; hosts have no padding at all."""
    settings = {"optimizer": zr.AdamW(lr=0.1), "clip_norm": 1.0}
    with zr.open(group=hosts, plan=zr.Plan.zero(3), **settings) as rt:
        train(rt, steps=2)
        digest = digest_of(rt.context, rt.units)
        rt.save(shared_tmp_path / "hosts")
    plan = zr.Plan.zero(3, parameter=tier, gradient=tier, state=tier)
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **settings) as rt:
        train(rt, steps=2)
        assert digest_of(rt.context, rt.units) == digest
        rt.save(shared_tmp_path / "gpus")
        rt.load(shared_tmp_path / "hosts")
        assert digest_of(rt.context, rt.units) == digest
    with zr.open(group=hosts, plan=zr.Plan.zero(2), **settings) as rt:
        for unit, tensors in SPECS.items():
            rt.register(unit, tensors)
        rt.load(shared_tmp_path / "gpus")
        assert digest_of(rt.context, rt.units) == digest


def told(settings):
    """Return what a forecast is told of a run's settings."""
    return {name: settings[name] for name in ("plan", "optimizer", "virtual_shards") if name in settings}
