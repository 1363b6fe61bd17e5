"""Frozen parameters as codes: the same values under every plan, tier and transport, on any number of ranks."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort import checkpoint
from zerort.codec import ROWS
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.errors import CallError, CheckpointError
from zerort.testing.contracts.forecast import ForecastContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]

NVME = zr.Tier.NVME
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
PLANS = {
    "zero0": zr.Plan.zero(0),
    "zero2": zr.Plan.zero(2),
    "zero3": zr.Plan.zero(3),
    "zero3-host": zr.Plan.zero(3, parameter=zr.Tier.HOST),
    "zero3-nvme": zr.Plan.zero(3, parameter=NVME, state=NVME),
}
FROZEN = ["w", "half", "bias", "scale", "nothing", "ids"]
UNITS = ("first", "second", "third")


@pytest.fixture
def scratch(tmp_path):
    return WORLD.bcast(str(tmp_path))


def lot(*numbers):
    return np.random.default_rng(numbers)


def open_kind(kind, options):
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)  # two hosts
    return Group(best_transport(WORLD, name="hosts", options=options, kind=kind, machine=machine))


def tensors_of(unit):
    """Return a base in several dtypes and odd shapes, and what is trained beside it."""
    seed = UNITS.index(unit)
    return {
        "w": lot(seed, 0).standard_normal((97, 53)).astype(np.float32),
        "half": lot(seed, 1).standard_normal((41, 13)).astype(BFLOAT16),
        "bias": lot(seed, 2).standard_normal(7).astype(np.float32),
        "scale": np.array(3.25, np.float32),
        "nothing": np.zeros((0, 5), np.float32),
        "ids": np.arange(11) + seed,
        "a": lot(seed, 3).standard_normal((97, 3)).astype(np.float64),
    }


def open_run(plan, scratch, frozen_format="int8", **settings):
    rt = zr.open(
        plan,
        zr.AdamW(lr=1e-2),
        frozen_format=frozen_format,
        scratch=scratch,
        create_scratch=True,
        offload=SMALL,
        **settings,
    )
    for unit in UNITS:
        rt.register(unit, tensors_of(unit), frozen=FROZEN)
    return rt


def decoded(name, value):
    """Return what a tensor is once it was coded, by itself."""
    if value.dtype.kind == "i":
        return value
    rows = ROWS[name]
    octets = np.empty(rows.nbytes_of(value.size), np.uint8)
    rows.encode(octets, value.reshape(-1))
    out = np.empty(value.size, value.dtype)
    rows.decode(out, octets)
    return out.reshape(value.shape)


def values_in(rt, unit):
    with rt.units[unit].gathered() as p:
        return {name: np.array(p[name]) for name in rt.units[unit].names}


def expect_frozen(rt, format):
    for unit in (*UNITS, *reversed(UNITS)):
        found = values_in(rt, unit)
        for name in FROZEN:
            expected = tensors_of(unit)[name]
            expected = expected if format is None else decoded(format, expected)
            np.testing.assert_array_equal(found[name], expected, err_msg=f"{unit}.{name}")


def train(rt, steps):
    """Take steps whose gradients depend on the base as it is gathered; return what is trained."""
    for _ in range(steps):
        for unit in UNITS:
            with rt.units[unit].gathered() as p:
                gradient = p["w"].astype(np.float64).sum(axis=1, keepdims=True) * p["a"] + float(p["scale"])
            rt.units[unit].reduce({"a": gradient})
        report = rt.step()
    return report, {unit: values_in(rt, unit)["a"] for unit in UNITS}


CASES = {
    **{f"{name}-int8-node": (plan, "int8", "node") for name, plan in PLANS.items()},
    **{f"{name}-int4-mpi": (PLANS[name], "int4", "mpi") for name in ("zero2", "zero3", "zero3-nvme")},
    **{f"{name}-int4-hosts": (PLANS[name], "int4", "hierarchical") for name in ("zero2", "zero3", "zero3-nvme")},
}


@pytest.mark.parametrize(("plan", "format", "kind"), CASES.values(), ids=CASES)
def test_a_gather_decodes_what_one_rank_would(plan, format, kind, scratch, options):
    """Each tensor by itself, to the bit; and training over it is training over a base that was decoded before."""
    with open_kind(kind, options) as group, open_run(plan, scratch, format, group=group) as rt:
        expect_frozen(rt, format)
        report, trained = train(rt, 2)
        expect_frozen(rt, format)
        assert report.frozen == format
        assert f"frozen parameters in {format}; " in str(report)
        if kind == "mpi" and plan is PLANS["zero3"] and group.size > 1:
            rows, others = 41 + 1 + 1 + 5, 64 * 8 + 320 * 8  # of 128 elements: w, bias, scale, half; ids and a
            assert report.bytes_moved["all_gather"] == len(UNITS) * (66 * rows + others)
            assert report.bytes_uncoded["all_gather"] == len(UNITS) * 128 * (4 * 43 + 2 * 5)
    with zr.open(zr.Plan.zero(0), zr.AdamW(lr=1e-2), group=(solo := open_group(kind="solo"))) as rt:
        for unit in UNITS:  # a base that was decoded before it was registered
            base = {name: decoded(format, one) if name in FROZEN else one for name, one in tensors_of(unit).items()}
            rt.register(unit, base, frozen=FROZEN)
        _, expected = train(rt, 2)
    solo.close()
    for unit in UNITS:
        np.testing.assert_allclose(trained[unit], expected[unit], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("zero2", "mpi"), ("zero3-nvme", "node")])
def test_checkpoints_hold_codes_and_load_into_any_form(name, kind, scratch, options):
    with open_kind(kind, options) as group:
        expect_forms(PLANS[name], group, scratch)


def expect_forms(plan, group, scratch):
    """Save codes, and load them as they are, decoded, and coded anew."""
    with open_run(plan, f"{scratch}/a", group=group) as rt:
        _, trained = train(rt, 2)
        rt.save(f"{scratch}/int8")
    stored = checkpoint.read_manifest(f"{scratch}/int8").tensors
    assert stored["parameter.int8"]["first.w"].shape == (-(-97 * 53 // 256), 260)
    assert "first.w" not in stored["parameter"]
    for format in ("int8", None, "int4"):
        with open_run(plan, f"{scratch}/b", format, group=group) as rt:
            for unit in UNITS:
                rt.units[unit].assign({"w": np.zeros((97, 53), np.float32), "half": np.zeros((41, 13), BFLOAT16)})
            rt.load(f"{scratch}/int8")
            for unit in UNITS:
                found, base = values_in(rt, unit), tensors_of(unit)
                for local in ("w", "half", "bias", "scale"):
                    expected = decoded("int8", base[local])
                    expected = decoded("int4", expected) if format == "int4" else expected
                    np.testing.assert_array_equal(found[local], expected, err_msg=f"{format} {unit}.{local}")
                np.testing.assert_array_equal(found["a"], trained[unit])
            if format is None:
                rt.save(f"{scratch}/plain")
    with open_run(plan, f"{scratch}/c", "int4", group=group) as rt:  # floats to codes
        rt.load(f"{scratch}/plain")
        for unit in UNITS:
            expected = decoded("int4", decoded("int8", tensors_of(unit)["w"]))
            np.testing.assert_array_equal(values_in(rt, unit)["w"], expected)


def test_a_base_of_the_host_and_one_on_a_disk_are_saved_alike(scratch):
    """Whoever wrote which part: a checkpoint of this many ranks is that of one."""
    with open_run(PLANS["zero3-nvme"], scratch) as rt:
        rt.save(f"{scratch}/many")
    with open_group(kind="solo") as solo, open_run(zr.Plan.zero(0), None, group=solo) as rt:
        rt.load(f"{scratch}/many")
        expect_frozen(rt, "int8")


def test_weights_are_published_decoded(scratch):
    with open_run(PLANS["zero3-nvme"], scratch) as rt:
        feed = rt.publish(f"{scratch}/feed", dtype=None)
        feed.push().wait()
        feed.close()
    found = zr.Reader(f"{scratch}/feed").update()
    for name in ("w", "half", "bias", "scale"):
        np.testing.assert_array_equal(found[f"second.{name}"], decoded("int8", tensors_of("second")[name]))
    WORLD.Barrier()


def test_shards_of_codes_are_cut_anew(scratch):
    for name in ("zero2", "zero3", "zero3-nvme"):
        with open_run(PLANS[name], scratch, "int4") as rt:
            rt.rebalance(shard_weights=[1 + rank for rank in range(rt.size)])
            expect_frozen(rt, "int4")
            train(rt, 1)
    with open_group(kind="mpi") as group, open_run(PLANS["zero3"], scratch, "int4", group=group) as rt:
        rt.rebalance(shard_weights=[rt.size - rank for rank in range(rt.size)])
        expect_frozen(rt, "int4")


def test_the_same_bits_come_from_any_number_of_ranks(scratch):
    with open_run(PLANS["zero3"], scratch, virtual_shards=4) as rt:
        for _ in rt.micro_batches:
            for unit in UNITS:
                rt.units[unit].reduce({"a": np.ones((97, 3))})
        digest = rt.step().digest
    with open_group(kind="solo") as solo, open_run(zr.Plan.zero(0), None, virtual_shards=4, group=solo) as rt:
        for _ in rt.micro_batches:
            for unit in UNITS:
                rt.units[unit].reduce({"a": np.ones((97, 3))})
        assert rt.step().digest == digest


@pytest.mark.parametrize("kind", ["node", "mpi"])
def test_bytes_are_those_of_the_forecast(kind, scratch):
    with open_group(kind=kind) as group:
        for plan in PLANS.values():
            for format in ("int8",) if kind == "node" else ("int4",):
                ForecastContract().expect_as_told(group, scratch, plan, frozen_format=format)


def test_what_cannot_be_coded_is_refused_everywhere(scratch):
    with zr.open(PLANS["zero3"], frozen_format="int4") as rt:
        text = (
            r"frozen_format='int4' can hold, got 'unit.w' in float64\. Convert it, array.astype\('float32'\), or leave"
        )
        with pytest.raises(CallError, match=text):
            rt.register("unit", {"w": np.zeros(8), "a": np.zeros(8)}, frozen="w")
        with pytest.raises(CallError, match=r"'unit.w' in float16\. .* or open the runtime with frozen_format='int8'"):
            rt.register("unit", {"w": np.zeros(8, np.float16), "a": np.zeros(8)}, frozen="w")
        assert not rt.units
        unit = rt.register("unit", {"w": np.zeros(8, np.float32), "a": np.zeros(8)}, frozen="w")
        with pytest.raises(CallError, match=r"got one of 'w' \(unit 'unit'\), which is frozen"):
            unit.reduce({"w": np.zeros(8, np.float32)})
    with pytest.raises(CallError, match="Expected frozen_format to be one of None, 'int8', 'int4'; got 'int2'"):
        zr.open(PLANS["zero3"], frozen_format="int2")


def test_codes_of_another_model_are_refused(scratch):
    with open_run(PLANS["zero3"], scratch) as rt:
        rt.save(f"{scratch}/saved")
    with zr.open(PLANS["zero3"], zr.AdamW(lr=0.1), frozen_format="int8") as rt:
        for unit in UNITS:
            tensors = tensors_of(unit)
            rt.register(unit, {**tensors, "w": tensors["w"].T.copy()}, frozen=FROZEN)
        with pytest.raises(CheckpointError, match=r"'first.w' of shape \(53, 97\), got its codes of shape \(97, 53\)"):
            rt.load(f"{scratch}/saved")
    with zr.open(PLANS["zero3"], zr.AdamW(lr=0.1)) as rt:
        for unit in UNITS:
            rt.register(unit, {name: one for name, one in tensors_of(unit).items() if name != "w"}, frozen=FROZEN)
        with pytest.raises(CheckpointError, match=r"3 only in the checkpoint: parameter\.int8 'first\.w'"):
            rt.load(f"{scratch}/saved")
        rt.load(f"{scratch}/saved", strict=False)
