"""Values that travel between GPUs as codes: the host's bits on every rank, wherever shards rest."""

import cupy
import gpu_runs
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort.codec import find_format
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.comm.transports.nccl.opening import open_on_gpus
from zerort.errors import PlanError
from zerort.native.dtypes import numpy_dtype
from zerort.testing.contracts.forecast import ForecastContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
PLANS = {
    "zero3": zr.Plan.zero(3),
    "zero3-host": zr.Plan.zero(3, parameter=HOST, state=HOST),
    "zero3-nvme": zr.Plan.zero(3, parameter=NVME, state=NVME),
}


@pytest.fixture(scope="module")
def gpus(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture(scope="module")
def gpus_of_two_hosts(options):
    hosts = [rank % 2 for rank in range(WORLD.size)]
    machine = WORLD.Split(hosts[WORLD.rank], WORLD.rank)
    host = best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine)
    with Group(open_on_gpus(host, local_rank=WORLD.rank, hosts=hosts, device=None)) as group:
        yield group


def values_of(dtype="float32", seed=1):
    lot = np.random.default_rng(seed)
    return {name: lot.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in SHAPES.items()}


def decoded(value, format):
    """Return what is left of one tensor on the wire, on the host: it starts a block, wherever it lies."""
    flat = np.ascontiguousarray(value).reshape(-1)
    payload, out = np.empty(find_format(format).nbytes(flat.size), np.uint8), np.empty_like(flat)
    find_format(format).encode(payload, flat)
    find_format(format).decode(out, payload)
    return out.reshape(value.shape)


def expect(rt, unit, values, format):
    """Gather a unit, and compare it to the bit."""
    with unit.gathered() as p:
        found = {name: rt.device.fetch(p[name]) for name in unit.names}
    for name, value in values.items():
        assert found[name].tobytes() == decoded(value, format).tobytes(), name


CASES = [("zero3", "int8"), ("zero3", "int4"), ("zero3", "bfloat16"), ("zero3-host", "int4"), ("zero3-nvme", "int8")]


@pytest.mark.parametrize(("plan", "format"), CASES, ids=["-".join(case) for case in CASES])
def test_gathered_codes_come_from_where_the_plan_says(plan, format, gpus, shared_tmp_path):
    """Every rank computes with decoded values, and updates the exact ones: of several units, forwards and backwards."""
    settings = {"wire": zr.Wire(gather=format, over="all"), "scratch": shared_tmp_path, "offload": SMALL}
    with zr.open(PLANS[plan], zr.SGD(lr=0.25), group=gpus, **settings) as rt:
        values = [values_of(seed=at) for at in range(3)]
        units = [rt.register(f"unit{at}", tensors) for at, tensors in enumerate(values)]
        for step in range(2):
            for at in (0, 1, 2, 2, 1, 0):
                expect(rt, units[at], values[at], format)
            for unit in units:
                unit.reduce({name: cupy.full(shape, float(step + 1), cupy.float32) for name, shape in SHAPES.items()})
            report = rt.step()
            by = np.float32(0.25 * (step + 1))
            values = [{name: value - by for name, value in tensors.items()} for tensors in values]
        expect(rt, units[1], values[1], format)
        assert report.wire == f"gather {format}"
        if gpus.size > 1:
            share = {"int8": 0.254, "int4": 0.129, "bfloat16": 0.5}[format]
            assert report.bytes_moved["all_gather"] == pytest.approx(
                share * report.bytes_uncoded["all_gather"], rel=0.01
            )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_are_coded_on_gpus(gpus, dtype):
    with zr.open(zr.Plan.zero(3), group=gpus, wire=zr.Wire(gather="int8", over="all")) as rt:
        values = values_of(dtype)
        values["b"][3:6] = np.nan, np.inf, -np.inf
        unit = rt.register("unit", values)
        expect(rt, unit, values, "int8")


def test_gpus_of_one_host_code_nothing_by_default(gpus):
    """As ranks that share memory: what crosses no wire between hosts travels as it is, unless over='all'."""
    assert gpus.one_host
    with zr.open(zr.Plan.zero(3), group=gpus, wire=zr.Wire(gather="int4")) as rt:
        values = values_of()
        unit = rt.register("unit", values)
        with unit.gathered() as p:
            for name, value in values.items():
                np.testing.assert_array_equal(rt.device.fetch(p[name]), value)
        unit.reduce({})
        report = rt.step()
        assert (report.wire, report.bytes_uncoded) == ("", {})


def test_gpus_of_two_hosts_code_what_they_gather(gpus_of_two_hosts):
    if WORLD.size == 1:
        pytest.skip("two hosts have two ranks")
    assert not gpus_of_two_hosts.one_host
    with zr.open(zr.Plan.zero(3), group=gpus_of_two_hosts, wire=zr.Wire(gather="int4")) as rt:
        expect(rt, rt.register("unit", values_of()), values_of(), "int4")


def test_bytes_of_coded_gathers_on_gpus_are_those_of_the_forecast(gpus, gpus_of_two_hosts, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    for plan in PLANS.values():
        OnGpus().expect_as_told(gpus, shared_tmp_path, plan, wire=zr.Wire(gather="int8", over="all"))
    told = OnGpus().expect_as_told(gpus, shared_tmp_path, PLANS["zero3"], wire=zr.Wire(gather="int8"))
    coded = OnGpus().expect_as_told(gpus_of_two_hosts, shared_tmp_path, PLANS["zero3"], wire=zr.Wire(gather="int8"))
    assert (coded.gathered > told.gathered) == (WORLD.size > 1)


def test_codes_that_gpus_have_no_kernel_for_are_refused(gpus):
    for wire, what in (
        (zr.Wire(gather="delta"), "gather='delta'"),
        (zr.Wire(reduce=zr.TopK(0.1)), r"reduce=TopK\(0\.1\)"),
    ):
        with pytest.raises(PlanError, match=rf"compute on the host with Wire\({what}\), got GPUs"):
            zr.open(zr.Plan.zero(3), group=gpus, wire=wire)
