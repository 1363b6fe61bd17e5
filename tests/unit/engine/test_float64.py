"""float64 parameters: no master weights, and moments, norms and sums in float64, alone and beside others."""

import math

import numpy as np
import pytest

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS, rounding

DTYPES = {"wide": "float64", "plain": "float32", "half": "bfloat16"}
NUMEL = 1000


def values(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {unit: (scale * rng.standard_normal(NUMEL)).astype(numpy_dtype(dtype)) for unit, dtype in DTYPES.items()}


def register(rt, given):
    return {name: rt.register(name, {"w": value}) for name, value in given.items()}


def gathered(units):
    found = {}
    for name, unit in units.items():
        with unit.gathered() as p:
            found[name] = np.array(p["w"])
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_the_norm_of_a_mixed_model_is_that_of_all_its_elements(stage, size):
    """A clipped step moves each dtype by its share; the float64 part to float64's precision."""
    start, gradients = values(0), values(1, scale=3.0)
    norm = math.sqrt(math.fsum(float(x) ** 2 for one in gradients.values() for x in one.astype(np.float64)))

    def body(group):
        plan = zr.Plan.zero(stage)
        with zr.open(plan=plan, group=group, optimizer=zr.SGD(lr=0.5), clip_norm=1.0, gradient_dtype="float32") as rt:
            units = register(rt, start)
            for name, unit in units.items():
                unit.reduce({"w": gradients[name]})
            return rt.step().grad_norm, gathered(units)

    for found, after in run_threads(size, body):
        # Only the mean over 3 ranks of float32 gradients is rounded.
        assert found == pytest.approx(norm, rel=rounding("float32", 4) if size == 3 else rounding("float64", NUMEL))
        for name, dtype in DTYPES.items():
            wanted = start[name].astype(np.float64) - 0.5 / found * gradients[name].astype(np.float64)
            bound = rounding(dtype, 8)
            np.testing.assert_allclose(after[name].astype(np.float64), wanted, rtol=bound, atol=bound, err_msg=name)


@pytest.mark.parametrize("optimizer", [zr.AdamW(lr=0.1), zr.Lion(lr=0.1), zr.SGD(lr=0.1, momentum=0.9)])
def test_state_is_float64_and_there_are_no_master_weights(optimizer):
    with open_group(kind="solo") as group, zr.open(group=group, optimizer=optimizer) as rt:
        units = register(rt, values(0))
        dtypes = {name: {k: c.dtype.name for k, c in u.sections[0].state.columns.items()} for name, u in units.items()}
        assert set(dtypes["wide"].values()) == {"float64"}
        assert "master" not in dtypes["wide"]
        assert dtypes["half"]["master"] == "float32"
        assert set(dtypes["plain"].values()) == {"float32"}


def test_a_difference_that_float32_would_lose_arrives():
    """Of 1e-12: gradients, sums, moments, parameters, their checkpoint and their digest all keep it."""

    def body(group, change):
        options = {"optimizer": zr.SGD(lr=1.0, momentum=0.5), "virtual_shards": 2}
        with zr.open(group=group, **options) as rt:
            unit = rt.register("u", {"w": np.ones(5000)})
            for _ in rt.micro_batches:
                unit.reduce({"w": np.full(5000, 0.25 + change)})
            report = rt.step()
            with unit.gathered() as p:
                return np.array(p["w"]), report

    (plain, one), (changed, other) = (run_threads(2, lambda group, c=c: body(group, c))[0] for c in (0.0, 2.0**-40))
    np.testing.assert_array_equal(plain - changed, np.full(5000, 2.0**-40))
    assert one.digest != other.digest
    assert one.grad_norm != other.grad_norm


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_checkpoints_go_between_precisions_and_numbers_of_ranks(dtype, tmp_path):
    """Saved on 3 ranks in float64, loaded on 2 in each; and what these save can be loaded in float64."""
    start, gradients = values(0), values(1)
    kind = numpy_dtype(dtype)

    def first(group):
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            units = register(rt, {"u": start["wide"]})
            units["u"].reduce({"w": gradients["wide"]})
            rt.step()
            rt.save(tmp_path / "one")
            return gathered(units)["u"]

    def second(group):
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            units = {"u": rt.register("u", {"w": zr.TensorSpec((NUMEL,), dtype)})}
            rt.load(tmp_path / "one")
            loaded = gathered(units)["u"]
            rt.save(tmp_path / "two")
            return loaded

    def third(group):
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            units = {"u": rt.register("u", {"w": zr.TensorSpec((NUMEL,), "float64")})}
            rt.load(tmp_path / "two")
            return gathered(units)["u"]

    saved = run_threads(3, first)[0]
    narrowed = saved.astype(np.float32) if dtype != "float64" else saved
    for loaded in run_threads(2, second):
        np.testing.assert_array_equal(loaded, narrowed.astype(kind))
    for loaded in run_threads(1, third):  # 16-bit parameters are saved as their master weights
        np.testing.assert_array_equal(loaded, narrowed.astype(np.float64))


def test_an_adafactor_of_float64_parameters_is_the_same_on_any_number_of_ranks():
    rng = np.random.default_rng(0)
    start = {"w": rng.standard_normal((30, 7)), "b": rng.standard_normal(11)}
    steps = [{name: rng.standard_normal(value.shape) for name, value in start.items()} for _ in range(20)]

    def body(group):
        with zr.open(group=group, optimizer=zr.Adafactor(lr=0.1)) as rt:
            unit = rt.register("u", start)
            for gradients in steps:
                unit.reduce(gradients)
                rt.step()
            assert {kept.column.dtype.name for kept in unit.sections[0].state.entries.values()} == {"float64"}
            with unit.gathered() as p:
                return {name: np.array(p[name]) for name in p}

    [alone] = run_threads(1, body)
    for found in run_threads(3, body):
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, rtol=OVER_STEPS, atol=OVER_STEPS, err_msg=name)


def test_sums_of_float64_cannot_be_asked_for_in_less_nor_those_of_others_in_float64():
    with open_group(kind="solo") as group:
        with (
            zr.open(group=group, gradient_dtype="bfloat16") as rt,
            pytest.raises(
                CallError, match="Expected gradient_dtype to be float64 or float32 for 'w' of unit 'u', got bf"
            ),
        ):
            rt.register("u", {"w": np.ones(3)})
        with (
            zr.open(group=group, gradient_dtype="float64") as rt,
            pytest.raises(
                CallError, match=r"Expected gradient_dtype to be float32 or .* for 'w' of unit 'u', got float64"
            ),
        ):
            rt.register("u", {"w": np.ones(3, np.float32)})


def test_moments_of_int8_become_float64_where_they_rest(tmp_path):
    def moments(group, dtype, *, state=zr.Tier.DEVICE, saves=False, **options):
        plan = zr.Plan.zero(3, state=state)
        scratch = {"scratch": tmp_path / "scratch", "create_scratch": True}
        with zr.open(plan, zr.AdamW(lr=0.1, **options), group=group, **scratch) as rt:
            unit = rt.register("u", {"w": np.zeros(9000, dtype)})
            if saves:
                unit.reduce({"w": values(1)["plain"].repeat(9)})
                rt.step()
                rt.save(tmp_path / "saved")
                return None
            rt.load(tmp_path / "saved")
            (section,) = unit.sections
            column = section.state.entries["exp_avg"].column
            found = np.empty(column.size, column.dtype)
            column.read(0, found).wait()
            return found[:9000]

    with open_group() as group:
        moments(group, "float32", moments="int8", saves=True)
        expected = moments(group, "float32")
        assert expected.any()
        for state in (zr.Tier.DEVICE, zr.Tier.NVME):
            np.testing.assert_array_equal(moments(group, "float64", state=state), expected.astype("float64"))
