"""Frozen parameters as codes on GPUs: a kernel decodes the host's bits, wherever the codes rest."""

import cupy
import gpu_runs
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort import checkpoint
from zerort.codec import ROWS
from zerort.comm import open_group
from zerort.testing.contracts.forecast import ForecastContract

pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
PLANS = {
    "zero2": zr.Plan.zero(2),
    "zero3": zr.Plan.zero(3),
    "zero3-host": zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=HOST),
    "zero3-nvme": zr.Plan.zero(3, parameter=NVME, state=NVME),
}
CASES = [(plan, format) for plan in PLANS for format in ("int8", "int4")]
UNITS = ("first", "second", "third")


def tensors_of(unit, *, halves=True):
    """Return a base in several dtypes and odd shapes, values that are no numbers, and what is trained beside it."""
    lot = np.random.default_rng(UNITS.index(unit))
    found = {
        "w": lot.standard_normal((97, 53)).astype(np.float32),
        "half": lot.standard_normal((41, 13)).astype(BFLOAT16),
        "scale": np.array(3.25, np.float32),
        "nothing": np.zeros((0, 5), np.float32),
        "ids": np.arange(11),
        "a": lot.standard_normal((97, 3)),
    }
    found["w"][3, :3] = np.nan, np.inf, -np.inf
    if halves:
        found["short"] = lot.standard_normal(300).astype(np.float16)
    return found


FROZEN = ("w", "half", "scale", "nothing", "ids", "short")


def decoded(format, value):
    """Return what a tensor is once it was coded, by itself, on the host."""
    if value.dtype.kind == "i":
        return value
    rows = ROWS[format]
    octets = np.empty(rows.nbytes_of(value.size), np.uint8)
    rows.encode(octets, value.reshape(-1))
    out = np.empty(value.size, value.dtype)
    rows.decode(out, octets)
    return out.reshape(value.shape)


def open_run(group, plan, format, scratch):
    rt = zr.open(plan, zr.AdamW(lr=1e-2), frozen_format=format, group=group, scratch=scratch, offload=SMALL)
    for unit in UNITS:
        tensors = tensors_of(unit, halves=format == "int8")  # int4 cannot hold float16
        rt.register(unit, tensors, frozen=[name for name in FROZEN if name in tensors])
    return rt


def expect_frozen(rt, format):
    """Gather every unit forwards and backwards, and compare what was decoded to the bit."""
    for unit in (*UNITS, *reversed(UNITS)):
        with rt.units[unit].gathered() as p:
            found = {name: rt.device.fetch(p[name]) for name in p}
        for name, value in tensors_of(unit, halves=format == "int8").items():
            if name in FROZEN:
                expected = decoded(format, value)
                assert found[name].dtype == expected.dtype
                assert found[name].tobytes() == expected.tobytes(), f"{unit}.{name}"


def step(rt):
    """Take a step whose gradient depends on the base as it is gathered."""
    for unit in UNITS:
        with rt.units[unit].gathered() as p:
            gradient = cupy.nan_to_num(p["w"].astype(cupy.float64)).sum(axis=1, keepdims=True) * p["a"]
        rt.units[unit].reduce({"a": gradient})
    return rt.step()


@pytest.mark.parametrize(("plan", "format"), CASES, ids=["-".join(case) for case in CASES])
def test_frozen_codes_rest_where_the_plan_says(plan, format, gpus, shared_tmp_path):
    """Decoded to the host's bits before a step and after it; the report says what was decoded, and what moved."""
    with open_run(gpus, PLANS[plan], format, shared_tmp_path) as rt:
        expect_frozen(rt, format)
        report = step(rt)
        expect_frozen(rt, format)
        assert report.frozen == format
        if plan == "zero3" and gpus.size > 1:
            assert report.bytes_uncoded["all_gather"] > 2 * report.bytes_moved["all_gather"]


def test_checkpoints_of_gpus_hold_codes_and_load_on_hosts(gpus, shared_tmp_path):
    """And back: codes are the same bytes wherever they were made."""
    with open_run(gpus, PLANS["zero3"], "int8", shared_tmp_path) as rt:
        rt.save(shared_tmp_path / "gpus")
    assert "first.w" in checkpoint.read_manifest(shared_tmp_path / "gpus").tensors["parameter.int8"]
    with open_group() as hosts, zr.open(zr.Plan.zero(3), zr.AdamW(lr=1e-2), group=hosts) as rt:
        for unit in UNITS:
            rt.register(unit, tensors_of(unit), frozen=FROZEN)
        rt.load(shared_tmp_path / "gpus")
        expect_frozen(rt, "int8")
        rt.save(shared_tmp_path / "hosts")
    with open_run(gpus, PLANS["zero3-host"], "int8", shared_tmp_path) as rt:  # decoded values, coded anew
        for unit in UNITS:
            rt.units[unit].assign({"w": np.zeros((97, 53), np.float32)})
        rt.load(shared_tmp_path / "hosts")
        with rt.units["second"].gathered() as p:
            found = rt.device.fetch(p["w"])
        expected = decoded("int8", decoded("int8", tensors_of("second")["w"]))
        np.testing.assert_array_equal(found, expected)


def test_decoded_weights_are_published_from_gpus(gpus, shared_tmp_path):
    with open_run(gpus, PLANS["zero3"], "int4", shared_tmp_path) as rt:
        feed = rt.publish(shared_tmp_path / "feed", dtype=None)
        feed.push().wait()
        feed.close()
    found = zr.Reader(shared_tmp_path / "feed").update()
    np.testing.assert_array_equal(found["second.w"], decoded("int4", tensors_of("second")["w"]))
    MPI.COMM_WORLD.Barrier()


def test_bytes_of_codes_on_gpus_are_those_of_the_forecast(gpus, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    for plan, format in (("zero2", "int8"), ("zero3", "int4"), ("zero3-host", "int8"), ("zero3-nvme", "int4")):
        OnGpus().expect_as_told(gpus, shared_tmp_path, PLANS[plan], frozen_format=format)


def test_shards_of_codes_on_gpus_are_cut_anew(gpus, shared_tmp_path):
    for plan in ("zero2", "zero3", "zero3-host"):
        with open_run(gpus, PLANS[plan], "int4", shared_tmp_path) as rt:
            rt.rebalance(shard_weights=[1 + rank for rank in range(rt.size)])
            expect_frozen(rt, "int4")
            step(rt)
            expect_frozen(rt, "int4")
