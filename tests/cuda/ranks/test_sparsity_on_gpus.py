"""Pruned parameters on GPUs: the masks and the bits of hosts, whatever the plan and the number of ranks."""

import gpu_runs
import hardware
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort.comm import open_group
from zerort.native.dtypes import numpy_dtype
from zerort.testing.contracts.forecast import ForecastContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3), pytest.mark.filterwarnings("ignore:.*stays in memory")]

SHAPES = {"a.weight": (75, 48), "a.bias": (24,), "b.weight": (64, 52), "ties.weight": (4100,)}  # cut between ranks
GRADUAL = zr.Sparsity(0.6, start=2, end=4)
HALVES = zr.Sparsity(0.5, pattern="2:4", start=2)
HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
STEPS = 5


def initial(name, dtype):
    values = np.random.default_rng(len(name)).standard_normal(SHAPES[name])
    if name == "ties.weight":  # magnitudes of few values: which are pruned is for their indices to say
        values = np.round(values) / 2
    return values.astype(numpy_dtype(dtype))


def gradient(name, step, shard, dtype):
    if name == "ties.weight":
        return np.zeros(SHAPES[name], numpy_dtype(dtype))
    lot = np.random.default_rng((step, shard, len(name)))
    return lot.standard_normal(SHAPES[name]).astype(numpy_dtype(dtype))


def open_run(group, plan, optimizer, dtype, sparsity, **settings):
    groups = [zr.ParameterGroup("*.weight", sparsity=sparsity)]
    rt = zr.open(plan, optimizer, param_groups=groups, group=group, virtual_shards=3, **settings)
    for unit in ("a", "b", "ties"):
        names = [name for name in SHAPES if name.startswith(f"{unit}.")]
        rt.register(unit, {name.removeprefix(f"{unit}."): initial(name, dtype) for name in names})
    return rt


def train(rt, steps, dtype):
    """Return the report of each step, and the bits of all parameters after it."""
    reports, weights = [], []
    for step in steps:
        for shard in rt.micro_batches:
            for unit in rt.units.values():
                found = {local: gradient(f"{unit.name}.{local}", step, shard, dtype) for local in unit.names}
                unit.reduce({local: there(rt, value) for local, value in found.items()})
        reports.append(rt.step())
        weights.append(bits(rt))
    return reports, weights


def there(rt, value):
    out = rt.device.zeros(value.size, value.dtype)
    rt.device.put(value.reshape(-1), out=out)
    return out.reshape(value.shape)


def bits(rt):
    found = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found |= {f"{unit.name}.{local}": rt.device.fetch(p[local]).tobytes() for local in unit.names}
    return found


def told(reports):
    return [(report.digest, report.sparsity) for report in reports]


CASES = {
    "zero3": (zr.Plan.zero(3), zr.AdamW(lr=0.05, weight_decay=0.1), "float32", GRADUAL),
    "zero1-momentum-halves": (zr.Plan.zero(1), zr.SGD(lr=0.05, momentum=0.9), "bfloat16", GRADUAL),
    "zero0-lion-of-four": (zr.Plan.zero(0), zr.Lion(lr=0.05), "float64", HALVES),
    "zero3-of-four-elsewhere": (zr.Plan.zero(3, parameter=HOST, state=HOST), zr.AdamW(lr=0.05), "bfloat16", HALVES),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gpus_prune_what_hosts_prune(gpus, case, shared_tmp_path):
    """To the bit, with master weights and without; what is pruned stays on the GPU, whatever the plan says."""
    plan, optimizer, dtype, sparsity = case
    hardware.reseed(3 + gpus.size)  # streams come in another order
    with open_run(gpus, plan, optimizer, dtype, sparsity) as rt:
        reports, found = train(rt, range(STEPS), dtype)
        sections = [one for unit in rt.units.values() for one in unit.sections if one.state.sparsities]
        assert len(sections) == 3
        assert not any(one.is_offloaded for one in sections)
    hardware.reseed(0)
    with open_group(kind="solo") as solo, open_run(solo, zr.Plan.zero(0), optimizer, dtype, sparsity) as rt:
        expected, weights = train(rt, range(STEPS), dtype)
    assert told(reports) == told(expected)
    assert found == weights
    share = 0.5 if sparsity is HALVES else 0.6
    assert reports[-1].sparsity == {name: pytest.approx(share, abs=1e-3) for name in SHAPES if "weight" in name}


def test_masks_of_gpus_are_saved_loaded_on_hosts_and_cut_anew(gpus, shared_tmp_path):
    """And new values are pruned anew."""
    case = (zr.Plan.zero(3), zr.AdamW(lr=0.05), "float32", GRADUAL)
    with open_run(gpus, *case) as rt:
        train(rt, range(3), "float32")
        rt.save(shared_tmp_path / "saved")
        rt.rebalance(shard_weights=[1 + rank for rank in range(rt.size)])
        reports, found = train(rt, range(3, 5), "float32")
        rt.load(shared_tmp_path / "saved")
        again, _ = train(rt, range(3, 5), "float32")
        rt.units["a"].assign({"weight": np.ones(SHAPES["a.weight"], np.float32)})
        (anew,), _ = train(rt, range(5, 6), "float32")
        with rt.units["a"].gathered() as p:
            zeros = float((rt.device.fetch(p["weight"]) == 0).mean())
        assert zeros == anew.sparsity["a.weight"] == round(0.6 * 3600) / 3600
    with open_group() as hosts, open_run(hosts, *case) as rt:
        rt.load(shared_tmp_path / "saved")
        expected, weights = train(rt, range(3, 5), "float32")
    assert told(reports) == told(again) == told(expected)
    assert found == weights


def test_gpus_of_two_hosts_gather_what_is_not_zero(gpus, gpus_of_two_hosts, shared_tmp_path):
    """In fewer bytes, and with the same bits, -0.0 among them; those of one host gather it as it is."""
    case = (zr.Plan.zero(3), zr.AdamW(lr=0.05), "float32", GRADUAL)
    with open_run(gpus, *case) as rt:
        plain, expected = train(rt, range(STEPS), "float32")
        assert plain[-1].bytes_uncoded == {}
    if WORLD.size == 1:
        pytest.skip("two hosts have two ranks")
    with open_run(gpus_of_two_hosts, *case) as rt:
        reports, found = train(rt, range(STEPS), "float32")
        unit = rt.units["a"]
        odd = np.where(np.arange(3600).reshape(SHAPES["a.weight"]) % 3, np.float32(0), np.float32(-0.0))
        unit.assign({"weight": odd})
        with unit.gathered() as p:
            assert rt.device.fetch(p["weight"]).tobytes() == odd.tobytes()
    assert found == expected
    assert reports[-1].bytes_moved["all_gather"] < 0.6 * plain[-1].bytes_moved["all_gather"]


def test_bytes_of_pruned_parameters_on_gpus_are_those_of_the_forecast(gpus, gpus_of_two_hosts, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    groups = (zr.ParameterGroup("block.*", sparsity=GRADUAL),)
    for plan in (zr.Plan.zero(1), zr.Plan.zero(3), zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=NVME)):
        OnGpus().expect_as_told(gpus, shared_tmp_path, plan, param_groups=groups)
    OnGpus().expect_as_told(gpus_of_two_hosts, shared_tmp_path, zr.Plan.zero(3), param_groups=groups)
