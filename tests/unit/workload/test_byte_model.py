"""The byte model: its gradients against finite differences in float64, and what sharded loops rely on."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from zerort import native
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText

SMALL = ByteModel(width=8, layers=2, context=7, heads=2)
KINDS = [(unit, name) for unit in SMALL.units for name in SMALL.shapes(unit)]


def random_params(model, *, dtype=np.float64, seed=1):
    """Parameters of which none is zero or one, so that every term of a gradient counts."""
    rng = np.random.default_rng(seed)
    params = {}
    for unit in model.units:
        first = model.init(unit, seed=seed)
        params[unit] = {n: (v + 0.3 * rng.standard_normal(v.shape)).astype(dtype) for n, v in first.items()}
    return params


def random_rows(batch, tokens, *, seed=2):
    return np.random.default_rng(seed).integers(0, 256, (2, batch, tokens), dtype=np.uint8)


def walk(model, params, x, y, **options):
    """One forward and backward over all units: loss, gradients."""
    saved, grads = {}, {}
    for unit in model.units:
        x, saved[unit] = model.forward(unit, params[unit], x)
    loss, slope = model.loss(x, y, **options)
    for unit in reversed(model.units):
        slope, grads[unit] = model.backward(unit, params[unit], saved[unit], slope)
    return loss, grads


@pytest.mark.parametrize("tokens", [SMALL.context, 5, 2, 1])
@pytest.mark.parametrize(("unit", "name"), KINDS)
def test_gradients_are_the_slopes_of_the_loss(unit, name, tokens):
    params, (x, y) = random_params(SMALL), random_rows(3, tokens)
    grads = walk(SMALL, params, x, y)[1]
    value, grad = params[unit][name], grads[unit][name]
    assert grad.shape == value.shape
    rng = np.random.default_rng(3)
    strong = np.zeros(value.shape)
    strong.flat[np.abs(grad).argmax()] = 1  # one element alone, and all of them in random directions
    for direction in (strong, rng.standard_normal(value.shape), rng.standard_normal(value.shape)):
        losses = []
        for sign in (1, -1):
            moved = {**params, unit: {**params[unit], name: value + sign * 1e-5 * direction}}
            losses.append(walk(SMALL, moved, x, y)[0])
        np.testing.assert_allclose((losses[0] - losses[1]) / 2e-5, (grad * direction).sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_everything_is_computed_in_float32(dtype):
    params, (x, y) = random_params(SMALL, dtype=dtype), random_rows(3, 7)
    wide = {unit: {n: v.astype(np.float32) for n, v in p.items()} for unit, p in params.items()}
    for p in params.values():
        for value in p.values():
            value.setflags(write=False)
    for unit in SMALL.units:
        x, saved = SMALL.forward(unit, params[unit], x)
        assert x.dtype == np.float32
        arrays = [a for part in saved for a in (part if isinstance(part, tuple) else (part,))]
        assert not any(np.shares_memory(a, v) for a in arrays for v in params[unit].values())
        slope, grads = SMALL.backward(unit, params[unit], saved, np.ones_like(x))
        assert slope.dtype == np.float32
        assert {n: (g.shape, g.dtype) for n, g in grads.items()} == {
            n: (shape, np.dtype(np.float32)) for n, shape in SMALL.shapes(unit).items()
        }
    x = random_rows(3, 7)[0]
    loss, grads = walk(SMALL, params, x, y)
    assert loss == walk(SMALL, wide, x, y)[0]  # and the same arguments give the same bits
    again = walk(SMALL, wide, x, y)[1]
    assert all((grads[unit][name] == again[unit][name]).all() for unit, name in KINDS)


def test_a_byte_is_not_seen_before_it_comes():
    params, (x, other) = random_params(SMALL), random_rows(4, 7)
    for at in range(7):
        changed = np.concatenate([x[:, :at], other[:, at:]], axis=1)
        a, b = x, changed
        for unit in SMALL.units:
            a, b = SMALL.forward(unit, params[unit], a)[0], SMALL.forward(unit, params[unit], b)[0]
        np.testing.assert_array_equal(a[:, :at], b[:, :at])
        assert (a[:, at] != b[:, at]).any()


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_weighted_shards_average_to_the_whole_batch(shards):
    params, text = random_params(SMALL), ByteText(rows=5, context=7, limit=10_000)
    whole = walk(SMALL, params, *text.batch(0))
    parts = []
    for shard in range(shards):  # with 8 shards, three of them have no rows
        x, y = text.batch(0, shard, of=shards)
        parts.append(walk(SMALL, params, x, y, weight=shards * len(x) / text.rows))
    np.testing.assert_allclose(sum(loss for loss, _ in parts) / shards, whole[0], rtol=1e-12)
    for unit, name in KINDS:
        mean = sum(grads[unit][name] for _, grads in parts) / shards
        np.testing.assert_allclose(mean, whole[1][unit][name], rtol=1e-9, atol=1e-14)


def test_init_depends_on_seed_and_unit_alone():
    deep = ByteModel(width=8, layers=3, context=7, heads=2)
    first = SMALL.init("block1")
    np.testing.assert_array_equal(first["w_qkv"], deep.init("block1")["w_qkv"])
    assert (first["w_qkv"] != SMALL.init("block0")["w_qkv"]).any()
    assert (first["w_qkv"] != SMALL.init("block1", seed=1)["w_qkv"]).any()
    assert {name: value.shape for name, value in first.items()} == SMALL.shapes("block1")


def test_a_plain_loop_learns():
    model = ByteModel(width=32, layers=1, context=32, heads=2)
    text = ByteText(rows=16, context=32, limit=200_000)
    params = {unit: model.init(unit) for unit in model.units}
    state = {unit: {n: np.zeros((2, v.size), np.float32) for n, v in p.items()} for unit, p in params.items()}
    losses = []
    for step in range(1, 81):
        loss, grads = walk(model, params, *text.batch(step))
        losses.append(loss / math.log(2))
        for unit, p in params.items():
            for name, value in p.items():
                grad = np.ascontiguousarray(grads[unit][name]).reshape(-1)
                settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.0, "step": step}
                native.adamw_(value.reshape(-1), grad, *state[unit][name], **settings)
    assert 7.5 < losses[0] < 8.5
    assert np.mean(losses[-5:]) < 4.0


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="heads can share"):
        ByteModel(width=10, heads=4)
    with pytest.raises(ValueError, match="layers=0"):
        ByteModel(layers=0)
    with pytest.raises(KeyError, match="block9"):
        SMALL.shapes("block9")
