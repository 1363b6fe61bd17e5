"""Values that travel between GPUs as codes: the host's bits on every rank, wherever shards rest."""

from dataclasses import replace

import cupy
import gpu_runs
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort.codec import find_format
from zerort.comm import open_group
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
def hosts(options):
    with open_group(options=options) as group:
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
    assert coded.gathered > told.gathered


# -- gradients ---------------------------------------------------------------------------------------------------------


def reduced(group, *, wire, plan=PLANS["zero3"], dtype="float32", steps=3, load=None, save=None, weights=None, **more):
    """Take steps with another gradient on each rank; return the weights after each, and the last report."""
    found, more["shard_weights"] = [], None if weights is None else weights[: group.size]
    with zr.open(plan, zr.SGD(lr=1.0), group=group, wire=wire, reduction="sum", offload=SMALL, **more) as rt:
        units = [rt.register(f"unit{at}", values_of(dtype, seed=at)) for at in range(2)]
        if load is not None:
            rt.load(load)
        for step in range(steps):
            for micro in range(rt.micro_steps):
                for at, unit in enumerate(units):
                    gradients = values_of(dtype, seed=1000 * step + 100 * micro + 10 * at + group.rank)
                    if (step, at) == (1, 0):
                        del gradients["long"]  # what was lost of it waits for the next
                    unit.reduce({name: _there(rt, value) for name, value in gradients.items()})
            report = rt.step()
            found.append(gpu_runs.weights(rt))
        if save is not None:
            rt.save(save)
    return found, report


def _there(rt, value):
    out = rt.device.zeros(value.size, value.dtype)
    rt.device.put(value.reshape(-1), out=out)
    return out.reshape(value.shape)


REDUCED = {
    "int8": {"wire": zr.Wire(reduce="int8", over="all")},
    "int4-feedback": {"wire": zr.Wire(reduce="int4", feedback=True, over="all")},
    "bfloat16-feedback": {"wire": zr.Wire(reduce="bfloat16", feedback=True, over="all"), "plan": zr.Plan.zero(2)},
    "int8-halves": {"wire": zr.Wire(reduce="int8", feedback=True, over="all"), "dtype": "bfloat16"},
    "micro-steps": {"wire": zr.Wire(gather="int8", reduce="int4", feedback=True, over="all"), "micro_steps": 2},
    "uneven": {"wire": zr.Wire(gather="int8", reduce="int8", over="all"), "weights": [1, 3, 2]},
    "skipping": {"wire": zr.Wire(reduce="int4", feedback=True, over="all"), "nonfinite": "skip"},
    "host": {
        "wire": zr.Wire(reduce="int4", feedback=True, over="all"),
        "plan": zr.Plan.zero(3, gradient=HOST, state=HOST),
        "micro_steps": 2,
    },
    "largest": {"wire": zr.Wire(gather="int8", reduce=zr.TopK(0.05), over="all"), "micro_steps": 2},
    "largest-halves": {"wire": zr.Wire(reduce=zr.TopK(0.01), over="all"), "dtype": "bfloat16", "weights": [1, 3, 2]},
    "largest-skipping": {
        "wire": zr.Wire(reduce=zr.TopK(0.3), over="all"),
        "plan": zr.Plan.zero(2),
        "nonfinite": "skip",
    },
}


@pytest.mark.parametrize("case", REDUCED.values(), ids=REDUCED)
def test_gradients_are_summed_as_the_host_sums_codes(gpus, hosts, case, shared_tmp_path):
    """To the bit, what was lost and is made up for included: codes are not added on the way, but decoded in order."""
    found, report = reduced(gpus, **case)
    expected, told = reduced(hosts, **case)
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
    assert report.wire == told.wire
    if gpus.size > 1:
        assert report.bytes_moved["reduce_scatter"] < 0.6 * report.bytes_uncoded["reduce_scatter"]


@pytest.mark.parametrize("reduce", ["int4", zr.TopK(0.1)], ids=["int4", "largest"])
def test_the_same_bits_come_from_virtual_shards_on_gpus_and_hosts(gpus, hosts, reduce):
    case = {"wire": zr.Wire(gather="int8", reduce=reduce, feedback=True), "virtual_shards": 4, "steps": 2}
    found, report = reduced(gpus, **case)
    expected, told = reduced(hosts, **case)
    assert report.digest == told.digest
    for name, value in expected[-1].items():
        np.testing.assert_array_equal(found[-1][name], value, err_msg=name)


@pytest.mark.parametrize("reduce", ["int4", zr.TopK(0.1)], ids=["int4", "largest"])
def test_what_gpus_have_lost_is_saved_and_loaded_on_hosts(gpus, hosts, shared_tmp_path, reduce):
    """And by another number of senders, one alone, as an equal part of the sum."""
    wire = zr.Wire(reduce=reduce, feedback=True, over="all")
    reduced(gpus, wire=wire, steps=1, save=shared_tmp_path / "saved")
    found = [reduced(group, wire=wire, steps=2, load=shared_tmp_path / "saved")[0] for group in (gpus, hosts)]
    for mine, theirs in zip(*found, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
    with open_group(kind="solo") as solo:
        reduced(solo, wire=wire, steps=1, save=shared_tmp_path / f"alone{WORLD.rank}")
    WORLD.Barrier()
    found = [reduced(group, wire=wire, steps=1, load=shared_tmp_path / "alone0")[0] for group in (gpus, hosts)]
    for name, value in found[1][0].items():
        np.testing.assert_array_equal(found[0][0][name], value, err_msg=name)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_coded_gradient_that_is_not_finite_is_reported_on_gpus(gpus, value):
    with zr.open(zr.Plan.zero(3), group=gpus, nonfinite="skip", wire=zr.Wire(reduce="int4", over="all")) as rt:
        unit = rt.register("unit", values_of())
        gradients = values_of(seed=gpus.rank)
        if gpus.rank == gpus.size - 1:
            gradients["long"][2999] = value
        unit.reduce({name: _there(rt, one) for name, one in gradients.items()})
        report = rt.step()
        assert not report.updated
        assert "'unit.long'" in report.why


def test_bytes_of_coded_reductions_on_gpus_are_those_of_the_forecast(gpus, gpus_of_two_hosts, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    wire = zr.Wire(gather="int8", reduce="int4", feedback=True, over="all")
    OnGpus().expect_as_told(gpus, shared_tmp_path, zr.Plan.zero(3), wire=zr.Wire(reduce=zr.TopK(0.01), over="all"))
    for plan in (zr.Plan.zero(2), zr.Plan.zero(3, gradient=HOST)):
        OnGpus().expect_as_told(gpus, shared_tmp_path, plan, wire=replace(wire, gather=None))
    OnGpus().expect_as_told(gpus, shared_tmp_path, zr.Plan.zero(3), wire=wire)
    OnGpus().expect_as_told(gpus_of_two_hosts, shared_tmp_path, zr.Plan.zero(3), wire=replace(wire, over="hosts"))
