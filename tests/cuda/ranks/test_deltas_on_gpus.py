"""Parameters that travel between GPUs as what has changed of them: the bits of a plain run, and fewer bytes."""

from dataclasses import replace

import gpu_runs
import hardware
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, PlanError
from zerort.native.dtypes import numpy_dtype

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
DELTA = zr.Wire(gather="delta", over="all")
PLAIN = zr.Plan.zero(3)


def story(group, path, wire, *, plan=PLAIN, dtype="bfloat16", lr=0.1, short=False):
    """Train, and change parameters in all other ways that there are; return the bits after each, and the reports."""
    offload = zr.OffloadOptions(chunk_nbytes=16384, threads=2)
    settings = {"wire": wire, "virtual_shards": 3, "scratch": path, "offload": offload}
    found, reports = [], []
    with zr.open(plan, zr.AdamW(lr=lr), group=group, **settings) as rt:

        def train(steps, seed):
            reports.extend(gpu_runs.train(rt, dtype, steps=steps, seed=seed))
            found.append(bits(rt))

        train(2, seed=1)
        if short:
            return found, reports
        odd = gpu_runs.first_values(dtype)[1]
        odd["w"].reshape(-1)[:3] = np.nan, -0.0, np.inf
        rt.units["unit1"].assign(odd)
        found.append(bits(rt))
        rt.units["unit1"].assign(gpu_runs.first_values(dtype)[2])
        rt.save(path / f"saved-{wire is None}")
        train(1, seed=2)
        rt.load(path / f"saved-{wire is None}")
        found.append(bits(rt))
        rt.rebalance(shard_weights=[(rank * 2 + 1) % 3 for rank in range(rt.size)])  # 1 0 2: one has none
        train(1, seed=3)
    return found, reports


def bits(rt):
    """Return the bits of all gathered tensors; of the second gather nothing is to be done."""
    found = {}
    for unit in rt.units.values():
        for _ in range(2):
            with unit.gathered() as p:
                found[unit.name] = {name: rt.device.fetch(p[name]).tobytes() for name in unit.names}
    return found


CASES = {
    "bfloat16": {},
    "state-on-host": {"plan": zr.Plan.zero(3, state=HOST, gradient=HOST), "short": True},
    "state-on-disk": {"plan": zr.Plan.zero(3, state=NVME), "dtype": "float16", "short": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_deltas_between_gpus_make_the_bits_of_a_plain_run(gpus, case, shared_tmp_path):
    """Trained, assigned, loaded and cut anew; each range of parameters crosses the wire once in a step."""
    if gpus.size != 2 and "short" in case:
        pytest.skip("two ranks show it")
    hardware.reseed(1 + gpus.size)  # streams come in another order
    found, reports = story(gpus, shared_tmp_path, DELTA, **case)
    hardware.reseed(0)
    expected, plain = story(gpus, shared_tmp_path, None, **case)
    assert found == expected
    assert [report.digest for report in reports] == [report.digest for report in plain]
    assert {report.wire for report in reports} == {"gather delta (lossless)"}
    if gpus.size > 1:
        for mine, other in zip(reports, plain, strict=True):
            assert mine.bytes_moved["all_gather"] < 0.75 * other.bytes_moved["all_gather"]  # some units of that stay


def test_the_smaller_an_update_the_fewer_bytes_travel_between_gpus(gpus, shared_tmp_path):
    if gpus.size == 1:
        pytest.skip("nothing travels")
    parts = []
    for lr in (0.1, 1e-4):
        _, reports = story(gpus, shared_tmp_path, DELTA, lr=lr, short=True)
        parts.append(reports[1].bytes_moved["all_gather"] / reports[1].bytes_uncoded["all_gather"])
    assert parts[1] < 0.3 < 0.8 < parts[0] < 1.1


def test_gpus_of_two_hosts_send_what_has_changed_and_those_of_one_do_not(gpus, gpus_of_two_hosts, shared_tmp_path):
    expected, reports = story(gpus, shared_tmp_path, replace(DELTA, over="hosts"), short=True)
    assert (reports[0].wire, reports[0].bytes_uncoded) == ("", {})
    if WORLD.size > 1:
        found, reports = story(gpus_of_two_hosts, shared_tmp_path, replace(DELTA, over="hosts"), short=True)
        assert reports[0].wire == "gather delta (lossless)"
        assert found == expected


def test_bytes_of_deltas_on_gpus_are_those_of_the_forecast(gpus, gpus_of_two_hosts, shared_tmp_path):
    shapes = {"w": TensorSpec((90, 70), "bfloat16"), "b": TensorSpec((70,), "float16"), "n": TensorSpec((9,), "int64")}
    units = {"block0": shapes, "block1": {"w": TensorSpec((2048, 3), "bfloat16")}}
    for group, over in ((gpus, "all"), (gpus, "hosts"), (gpus_of_two_hosts, "hosts")):
        settings = {"wire": replace(DELTA, over=over), "optimizer": zr.AdamW(lr=0.1)}
        with zr.open(PLAIN, group=group, **settings) as rt:
            for name, specs in units.items():
                rt.register(name, specs, frozen=("n" if "n" in specs else False))
            for unit in rt.units.values():
                with unit.gathered() as p:
                    unit.reduce({name: p[name] for name in unit.trainable})
            rt.step()
            counted = rt.memory()
        how = {"size": group.size, "rank": group.rank, "one_memory": group.one_host, "device": "cuda", "frozen": "n"}
        told = zr.forecast(units, plan=PLAIN, **settings, **how)
        for part in ("parameter", "gradient", "state", "buckets", "gathered", "host_copy", "streaming"):
            assert getattr(counted, part) == getattr(told, part), (over, part)
        codes = over == "all" or not group.one_host
        assert bool(counted.host_copy) == codes


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_deltas_of_parameters_that_are_not_on_the_gpu_are_refused(gpus, tier):
    with pytest.raises(PlanError, match=f"memory of GPUs with Wire.gather='delta'.*, got parameters on {tier.name}"):
        zr.open(zr.Plan.zero(3, parameter=tier), group=gpus, wire=DELTA)


def test_only_16_bits_travel_as_deltas_on_gpus(gpus):
    with (
        zr.open(PLAIN, group=gpus, wire=DELTA) as rt,
        pytest.raises(CallError, match="Convert it to bfloat16 or float16"),
    ):
        rt.register("unit", {"w": np.zeros(8, numpy_dtype("float32"))})
