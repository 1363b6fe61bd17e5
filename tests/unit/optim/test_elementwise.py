"""AdamW, SGD and Lion: against textbook formulas, cut over ranks, and what they refuse."""

from __future__ import annotations

import itertools
import json
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.errors import CallError
from zerort.optim import SGD, AdamW, ElementwiseOptimizer, Lion, warmup_cosine
from zerort.testing.tolerance import rounding

OPTIMIZERS = [
    AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, dampening=0.3),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Lion(lr=1e-2, weight_decay=0.1),
]


def make_state(optimizer: ElementwiseOptimizer, numel: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    specs = optimizer.states_in(dtype, (numel,))
    assert all(spec.shape is None and spec.dtype == dtype for spec in specs)
    return {spec.name: np.zeros(numel, spec.dtype) for spec in specs}


def in_float64(optimizer: ElementwiseOptimizer, p: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    """Each algorithm as its paper or torch writes it, over the whole tensor."""
    p, m, v = p.astype(np.float64), np.zeros(p.size), np.zeros(p.size)
    for step, grad in enumerate(grads, start=1):
        g = grad.astype(np.float64)
        if isinstance(optimizer, AdamW):
            b1, b2 = optimizer.betas
            p *= 1 - optimizer.lr * optimizer.weight_decay
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            p -= optimizer.lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + optimizer.eps)
        elif isinstance(optimizer, SGD):
            g = g + optimizer.weight_decay * p
            if optimizer.momentum:
                m = g if step == 1 else optimizer.momentum * m + (1 - optimizer.dampening) * g
                g = g + optimizer.momentum * m if optimizer.nesterov else m
            p -= optimizer.lr * g
        else:
            b1, b2 = optimizer.betas
            p -= optimizer.lr * (np.sign(b1 * m + (1 - b1) * g) + optimizer.weight_decay * p)
            m = b2 * m + (1 - b2) * g
    return p


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize(("dtype", "steps"), [("float64", 20), ("float32", 1)])
def test_updates_follow_the_formula(optimizer: ElementwiseOptimizer, dtype: str, steps: int) -> None:
    rng = np.random.default_rng(0)
    param = rng.standard_normal(2001).astype(dtype)
    grads = [rng.standard_normal(2001).astype(dtype) for _ in range(steps)]
    want = in_float64(optimizer, param, grads)
    state = make_state(optimizer, param.size, dtype)
    for step, grad in enumerate(grads, start=1):
        optimizer.update_(param, grad * 8, state, lr=optimizer.lr_at(step), step=step, grad_scale=1 / 8, copy_out=None)
    bound = rounding(dtype, 24 * steps)  # about 12 operations and as many factors each; values of up to 5 may cancel
    np.testing.assert_allclose(param, want, rtol=bound, atol=5 * bound)


@settings(max_examples=60)
@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    numel=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=7),
    half=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cut_over_ranks_gives_the_same_bits(
    optimizer: ElementwiseOptimizer, numel: int, cuts: list[int], half: type, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ends = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    ranges = [slice(a, b) for a, b in itertools.pairwise(ends)]
    whole = rng.standard_normal(numel).astype(np.float32)
    shards = [whole[range_].copy() for range_ in ranges]
    state, states = make_state(optimizer, numel), [make_state(optimizer, shard.size) for shard in shards]
    for step in (1, 2, 3):
        grad = rng.standard_normal(numel).astype(half)
        options = {"lr": 0.01 / step, "step": step, "grad_scale": 1 / 3}
        copy = np.empty(numel, half)
        optimizer.update_(whole, grad, state, copy_out=copy, **options)
        for range_, shard, of_shard in zip(ranges, shards, states, strict=True):
            part = np.empty(shard.size, half)
            optimizer.update_(shard, grad[range_].copy(), of_shard, copy_out=part, **options)
            assert part.tobytes() == copy[range_].tobytes() == shard.astype(half).tobytes()
    assert b"".join(shard.tobytes() for shard in shards) == whole.tobytes()
    for name, array in state.items():
        assert b"".join(one[name].tobytes() for one in states) == array.tobytes()


def test_state_is_what_the_settings_need() -> None:
    assert [spec.name for spec in AdamW(lr=1.0).states((2, 2))] == ["exp_avg", "exp_avg_sq"]
    assert [spec.name for spec in SGD(lr=1.0, momentum=0.9).states((2,))] == ["momentum_buffer"]
    assert SGD(lr=1.0).states((2,)) == ()
    assert [spec.name for spec in Lion(lr=1.0).states(())] == ["exp_avg"]


def halved(update: int) -> float:
    return 0.5**update


def test_learning_rates_are_numbers_or_any_callable() -> None:
    assert AdamW(lr=3e-4).lr_at(7) == 3e-4
    assert AdamW(lr=1).lr_at(1) == 1.0
    assert AdamW(lr=halved).lr_at(3) == 0.125
    assert type(SGD(lr=lambda update: np.float32(0.5)).lr_at(1)) is float
    for bad in (math.nan, math.inf, -1.0, None, "fast", True):
        with pytest.raises(CallError, match=r"Expected the learning rate that .*<lambda> gives for update 4 to be"):
            SGD(lr=lambda update, bad=bad: bad).lr_at(4)


def test_descriptions_go_through_json() -> None:
    said = AdamW(lr=3e-4, betas=[0.8, 0.9]).describe()
    forms = {"master": "float32", "moments": "float32", "sparsity": None}
    assert said == {"kind": "AdamW", "lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.01, **forms}
    assert json.loads(json.dumps(said)) == said
    assert SGD(lr=halved).describe()["lr"] == f"{__name__}.halved"
    assert SGD(lr=warmup_cosine(1.0, warmup=1, total=2)).describe()["lr"] == repr(warmup_cosine(1.0, warmup=1, total=2))
    assert Lion(lr=0.1).kind == "Lion"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_optimizers_are_values(optimizer: ElementwiseOptimizer) -> None:
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert hash(optimizer) == hash(eval(repr(optimizer)))
    with pytest.raises(AttributeError):
        optimizer.lr = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(lr=-1e-3), r"Expected lr to be a finite number of at least 0, got -0.001"),
        (lambda: AdamW(lr=math.nan), r"Expected lr .*, got nan"),
        (lambda: AdamW(lr="1e-3"), r"Expected lr .*, got '1e-3'"),
        (lambda: AdamW(lr=0.1, betas=(0.9, 1.0)), r"Expected betas\[1\] .* of at least 0 and below 1, got 1.0"),
        (lambda: AdamW(lr=0.1, betas=0.9), r"Expected betas to be two numbers, got 0.9"),
        (lambda: AdamW(lr=0.1, eps=-1e-8), r"Expected eps .*, got -1e-08"),
        (lambda: AdamW(lr=0.1, weight_decay=math.inf), r"Expected weight_decay .*, got inf"),
        (lambda: SGD(lr=0.1, momentum=-0.1), r"Expected momentum .*, got -0.1"),
        (lambda: SGD(lr=0.1, nesterov=True), r"Expected a momentum above 0 and no dampening with nesterov, got"),
        (lambda: SGD(lr=0.1, momentum=0.9, dampening=0.1, nesterov=True), r"dampening=0.1\. Set them so, or"),
        (lambda: SGD(lr=0.1, nesterov=1), r"Expected nesterov to be True or False, got 1"),
        (lambda: Lion(lr=0.1, betas=(0.9,)), r"Expected betas to be two numbers, got \(0.9,\)"),
        (lambda: Lion(lr=0.1, weight_decay=True), r"Expected weight_decay .*, got True"),
    ],
)
def test_bad_settings_are_refused_with_the_field(make, message: str) -> None:
    with pytest.raises(CallError, match=message):
        make()
