"""Saving and loading a runtime: any plan, any number of ranks, nothing forgotten, wrong ones refused."""

import json

import numpy as np
import pytest

import zerort as zr
from zerort import checkpoint
from zerort.checkpoint import read_manifest
from zerort.comm import open_group
from zerort.errors import CheckpointError, CorruptCheckpointError
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

F4 = np.float32
RNG = np.random.default_rng(0)
SHAPES = {"a": {"w": (13, 7), "b": (7,)}, "c": {"w": (70,), "none": (0, 3)}}
START = {unit: {name: RNG.standard_normal(shape).astype(F4) for name, shape in SHAPES[unit].items()} for unit in SHAPES}
STEPS = [
    {unit: {name: RNG.standard_normal(shape).astype(F4) for name, shape in SHAPES[unit].items()} for unit in SHAPES}
    for _ in range(6)
]


def register(rt, *, dtype=F4):
    return {
        unit: rt.register(unit, {name: value.astype(dtype) for name, value in values.items()})
        for unit, values in START.items()
    }


def train(rt, units, steps):
    for gradients in steps:
        for name, unit in units.items():
            dtype = unit.sections[0].parameters.dtype
            unit.reduce({local: value.astype(dtype) for local, value in gradients[name].items()})
        rt.step()


def parameters(units):
    found = {}
    for name, unit in units.items():
        with unit.gathered() as p:
            found.update({f"{name}.{local}": np.array(p[local]) for local in p})
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


OPTIMIZERS = {
    "adamw": zr.AdamW(lr=0.1),
    "sgd": zr.SGD(lr=0.1, momentum=0.9),
    "lion": zr.Lion(lr=0.01),
    "adafactor": zr.Adafactor(lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [((3, 0), (1, 3)), ((1, 1), (4, 3)), ((3, 3), (2, 2)), ((4, 2), (3, 0))])
def test_a_run_goes_on_on_other_ranks_with_another_plan(optimizer, before, after, tmp_path):
    """Every rank has the same gradients, whose mean is exact for 1, 2 and 4 ranks, so the bits must agree."""
    settings = {"optimizer": OPTIMIZERS[optimizer]}
    exact = optimizer != "adafactor" and 3 not in (before[0], after[0])
    dtype = "float32" if exact else "float64"

    def straight(group):
        with zr.open(group=group, plan=zr.Plan.zero(0), **settings) as rt:
            units = register(rt, dtype=dtype)
            train(rt, units, STEPS)
            return parameters(units)

    def first(group):
        with zr.open(group=group, plan=zr.Plan.zero(before[1]), **settings) as rt:
            units = register(rt, dtype=dtype)
            train(rt, units, STEPS[:3])
            rt.save(tmp_path / "ckpt", progress={"rank": rt.rank})
            return parameters(units)

    def second(group):
        with zr.open(group=group, plan=zr.Plan.zero(after[1]), **settings) as rt:
            units = {
                unit: rt.register(unit, {name: zr.TensorSpec(shape, dtype) for name, shape in shapes.items()})
                for unit, shapes in SHAPES.items()
            }
            restored = rt.load(tmp_path / "ckpt")
            assert rt.updates == restored.updates == 3
            assert restored.every_progress == tuple({"rank": rank} for rank in range(before[0]))
            assert restored.progress["rank"] == (rt.rank if rt.rank < before[0] else 0)
            then = parameters(units)
            train(rt, units, STEPS[3:])
            return then, parameters(units)

    with open_group(kind="solo") as solo:
        expected = straight(solo)
    saved = run_threads(before[0], first)
    for then, end in run_threads(after[0], second):
        same(then, saved[0])
        bound = 0 if exact else OVER_STEPS
        for name, value in expected.items():
            np.testing.assert_allclose(end[name], value, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_and_the_loss_scale_come_back(dtype, tmp_path):
    kind = numpy_dtype(dtype)
    scale = zr.LossScale(initial=8.0, interval=2) if dtype == "float16" else None

    def body(group):
        settings = {"group": group, "optimizer": zr.AdamW(lr=0.01), "loss_scale": scale}
        with zr.open(plan=zr.Plan.zero(3), **settings) as rt:
            units = register(rt, dtype=kind)
            train(rt, units, STEPS[:3])
            rt.save(tmp_path / "ckpt")
            scale_then = rt.loss_scale
            train(rt, units, STEPS[3:])
            expected = parameters(units)
        with zr.open(plan=zr.Plan.zero(1), **settings) as rt:
            units = register(rt, dtype=kind)
            rt.load(tmp_path / "ckpt")
            assert rt.loss_scale == scale_then
            train(rt, units, STEPS[3:])
            same(parameters(units), expected)
        with zr.open(plan=zr.Plan.zero(2), group=group, optimizer=zr.AdamW(lr=0.01)) as rt:
            units = register(rt)  # the same model in float32 takes the master weights as they are
            rt.load(tmp_path / "ckpt")

    run_threads(2, body)


def test_tensors_without_gradients_keep_their_own_count(tmp_path):
    with open_group(kind="solo") as group:
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            unit = rt.register("a", {"x": np.ones(3, F4), "y": np.ones(3, F4)})
            for names in (("x",), ("x", "y")):
                unit.reduce({name: np.ones(3, F4) for name in names})
                rt.step()
            rt.save(tmp_path / "ckpt")
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            unit = rt.register("a", {"x": np.ones(3, F4), "y": np.ones(3, F4)})
            rt.load(tmp_path / "ckpt")
            assert unit.sections[0].state.steps == {"a.x": 2, "a.y": 1}


def test_the_parameters_alone_start_a_new_training(tmp_path):
    def body(group):
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            units = register(rt)
            train(rt, units, STEPS[:2])
            rt.save(tmp_path / "ckpt")
            expected = parameters(units)
        with zr.open(group=group, optimizer=zr.SGD(lr=0.1)) as rt:
            units = register(rt)
            with pytest.raises(CheckpointError, match=r"state of SGD, got one of AdamW.*optimizer=False"):
                rt.load(tmp_path / "ckpt")
            rt.load(tmp_path / "ckpt", optimizer=False)
            same(parameters(units), expected)
            assert rt.updates == 0

    run_threads(3, body)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": {"w": (13, 7), "b": (7,)}}, "c.w"),
        ({**SHAPES, "d": {"w": (3,)}}, "d.w"),
        ({**SHAPES, "c": {"w": (71,), "none": (0, 3)}}, "c.w"),
    ],
    ids=["more", "less", "reshaped"],
)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(other, text, tmp_path):
    def body(group):
        with zr.open(group=group) as rt:
            register(rt)
            rt.save(tmp_path / "ckpt")
        with zr.open(group=group) as rt:
            units = {
                unit: rt.register(unit, {name: np.full(shape, 5, F4) for name, shape in shapes.items()})
                for unit, shapes in other.items()
            }
            before = parameters(units)
            with pytest.raises(CheckpointError, match=text):
                rt.load(tmp_path / "ckpt")
            same(parameters(units), before)

    run_threads(2, body)


def test_a_flipped_byte_is_found_and_named_on_every_rank(tmp_path):
    def body(group):
        with zr.open(group=group) as rt:
            register(rt)
            rt.save(tmp_path / "ckpt")
            if group.rank == 0:
                data = max(
                    (file for file in (tmp_path / "ckpt").iterdir() if file.name != "manifest.json"),
                    key=lambda file: file.stat().st_size,
                )
                raw = bytearray(data.read_bytes())
                raw[5] ^= 1
                data.write_bytes(raw)
            group.barrier().wait()
            with pytest.raises(CorruptCheckpointError) as caught:
                rt.load(tmp_path / "ckpt")
            return str(caught.value)

    for story in run_threads(2, body):
        assert "parameter 'a." in story or "parameter 'c." in story


def test_no_checkpoint_at_all_is_refused_on_every_rank(tmp_path):
    def body(group):
        with zr.open(group=group) as rt:
            register(rt)
            with pytest.raises(CheckpointError, match="nothing"):
                rt.load(tmp_path / "nothing")
            assert not checkpoint.exists(tmp_path / "nothing")
            rt.save(tmp_path / "something")
            assert checkpoint.exists(tmp_path / "something")

    run_threads(2, body)


def test_saving_again_replaces_and_the_manifest_tells_what_it_is(tmp_path):
    def body(group):
        with zr.open(group=group, plan=zr.Plan.zero(2), optimizer=zr.AdamW(lr=0.1)) as rt:
            units = register(rt)
            for _ in range(2):
                train(rt, units, STEPS[:1])
                rt.save(tmp_path / "ckpt", progress=rt.updates)

    run_threads(3, body)
    manifest = read_manifest(tmp_path / "ckpt")
    meta = manifest.meta
    assert meta["updates"] == 2
    assert meta["optimizer"]["kind"] == "AdamW"
    assert "SHARDED" in meta["plan"]
    assert tuple(manifest.progress) == (2, 2, 2)
    json.dumps(meta)


def test_progress_that_json_cannot_carry_is_refused(tmp_path):
    with open_group(kind="solo") as group, zr.open(group=group) as rt:
        register(rt)
        with pytest.raises(zr.errors.CallError, match="progress"):
            rt.save(tmp_path / "ckpt", progress=object())


def test_random_numbers_go_on_where_they_were(tmp_path):
    def body(group):
        with zr.open(group=group) as rt:
            register(rt)
            rng = np.random.default_rng(rt.rank)
            rng.standard_normal(5)
            rt.save(tmp_path / "ckpt", progress={"rng": rng.bit_generator.state})
            expected = rng.standard_normal(5)
            other = np.random.default_rng()
            other.bit_generator.state = rt.load(tmp_path / "ckpt").progress["rng"]
            np.testing.assert_array_equal(other.standard_normal(5), expected)

    run_threads(3, body)
