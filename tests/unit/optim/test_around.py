"""What surrounds an update: schedules, the global norm, clipping and loss scaling."""

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
from zerort.optim import (
    LossScale,
    LossScaler,
    clip_factor,
    constant,
    norm_of,
    square_sums,
    warmup_cosine,
    warmup_linear,
)


def test_warmup_cosine_at_its_corners() -> None:
    schedule = warmup_cosine(2.0, warmup=10, total=110, floor=0.5)
    assert schedule(1) == pytest.approx(0.2)
    assert schedule(5) == pytest.approx(1.0)
    assert schedule(10) == 2.0
    assert schedule(35) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule(60) == pytest.approx(1.25)
    assert schedule(110) == pytest.approx(0.5)
    assert schedule(10**6) == pytest.approx(0.5)


def test_warmup_linear_and_constant() -> None:
    assert [warmup_linear(1.0, warmup=0, total=4)(update) for update in range(1, 7)] == [0.75, 0.5, 0.25, 0, 0, 0]
    assert warmup_linear(1.0, warmup=3, total=3, floor=0.25)(4) == 0.25
    assert [constant(0.3)(update) for update in (1, 10, 10**9)] == [0.3] * 3
    assert [constant(0.5, warmup=5)(update) for update in (1, 5, 6)] == [0.1, 0.5, 0.5]


@pytest.mark.parametrize("make", [warmup_cosine, warmup_linear])
def test_schedules_rise_then_fall_and_never_leave_their_range(make) -> None:
    schedule = make(1e-3, warmup=20, total=100, floor=1e-5)
    rates = [schedule(update) for update in range(1, 130)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert max(rates) == 1e-3
    assert min(rates[19:]) == pytest.approx(1e-5)


def test_schedules_are_values() -> None:
    schedule = warmup_cosine(1e-3, warmup=2, total=9)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule == warmup_cosine(1e-3, warmup=2, total=9)
    assert schedule != warmup_linear(1e-3, warmup=2, total=9)
    assert repr(schedule) == "WarmupDecay(peak=0.001, warmup=2, total=9, floor=0.0, decay='cosine')"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: warmup_cosine(-1, warmup=0, total=1), r"Expected peak .*, got -1"),
        (lambda: warmup_cosine(1, warmup=1.5, total=2), r"Expected warmup to be an int of at least 0, got 1.5"),
        (lambda: warmup_linear(1, warmup=0, total=0), r"Expected total to be an int of at least 1, got 0"),
        (lambda: warmup_linear(1, warmup=9, total=8), r"Expected total to be at least warmup=9, got 8"),
        (lambda: warmup_linear(1, warmup=0, total=8, floor=2), r"Expected floor to be at most peak=1, got 2"),
    ],
)
def test_bad_schedules_are_refused(make, message: str) -> None:
    with pytest.raises(CallError, match=message):
        make()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_square_sums_by_block(dtype: type) -> None:
    grad = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    exact = np.square(grad.astype(np.float64))
    np.testing.assert_allclose(square_sums(grad), [exact.sum()], rtol=1e-14)
    got = square_sums(grad, 300)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, [exact[i : i + 300].sum() for i in (0, 300, 600, 900)], rtol=1e-14)
    np.testing.assert_array_equal(square_sums(grad[:0]), [0.0])
    assert square_sums(grad[:0], 7).shape == (0,)
    with pytest.raises(CallError, match=r"Expected block to be an int of at least 1, got 0"):
        square_sums(grad, 0)


@settings(max_examples=80)
@given(blocks=st.integers(0, 40), cuts=st.lists(st.integers(0, 40), max_size=7), seed=st.integers(0, 2**32 - 1))
def test_the_norm_does_not_depend_on_how_blocks_lie_over_ranks(blocks: int, cuts: list[int], seed: int) -> None:
    block = 50
    rng = np.random.default_rng(seed)
    grad = (rng.standard_normal(blocks * block) * 10.0 ** rng.integers(-8, 8, blocks * block)).astype(np.float32)
    ends = [0, *sorted(min(cut, blocks) for cut in cuts), blocks]
    sums = [square_sums(grad[block * a : block * b].copy(), block) for a, b in itertools.pairwise(ends)]
    norm = norm_of(np.concatenate(sums))
    assert norm == norm_of(square_sums(grad, block))
    assert norm == norm_of(np.concatenate([*sums, np.zeros(5)]))
    assert norm == pytest.approx(math.sqrt(math.fsum((grad.astype(np.float64) ** 2).tolist())), rel=1e-14)


def test_norms_add_neighbours() -> None:
    # 2^53 + 1 is 2^53: one after the other, the ones would be lost.
    assert norm_of(np.array([2.0**53, 0.0] + [1.0] * 1024)) == math.sqrt(2.0**53 + 1024) > math.sqrt(2.0**53)
    sums = np.array([1.0, 2.0, 4.0])
    assert norm_of(sums) == math.sqrt(7)
    np.testing.assert_array_equal(sums, [1.0, 2.0, 4.0])  # untouched
    assert norm_of(np.zeros(0)) == 0.0
    assert norm_of(np.array([1.0, np.inf, 2.0])) == math.inf
    assert math.isnan(norm_of(np.array([np.nan, np.inf])))


def test_clip_factor() -> None:
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(10.0, 1.0) == 0.1
    for norm in (math.nan, math.inf, -1.0):
        with pytest.raises(CallError, match=r"Expected a finite norm of at least 0, got"):
            clip_factor(norm, 1.0)
    with pytest.raises(CallError, match=r"Expected max_norm to be a finite number above 0, got 0"):
        clip_factor(1.0, 0)


def test_the_loss_scale_backs_off_and_grows() -> None:
    scaler = LossScaler(LossScale(initial=1024.0, interval=3, minimum=256.0, maximum=2048.0))
    seen = []
    for overflow in (False, False, True, False, False, True, True, True, *([False] * 12)):
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == [1024, 1024, 512, 512, 512, 256, 256, 256, *[256] * 2, *[512] * 3, *[1024] * 3, *[2048] * 4]


def test_a_static_loss_scale_never_changes() -> None:
    scaler = LossScaler(LossScale(initial=128.0, interval=None))
    for overflow in (True, False) * 3000:
        scaler.update(overflow)
    assert scaler.scale == 128.0
    scaler.restore({"scale": 4.0, "good_updates": 7})
    assert scaler.scale == 128.0


def test_loss_scale_goes_on_after_a_restore() -> None:
    options = LossScale(initial=64.0, interval=5)
    one, other = LossScaler(options), LossScaler(options)
    for overflow in (False, True, False, False, False):
        one.update(overflow)
    other.restore(json.loads(json.dumps(one.state())))
    for _ in range(13):
        assert other.state() == one.state()
        one.update(overflow=False)
        other.update(overflow=False)
    assert one.scale == 256.0
    narrow = LossScaler(LossScale(initial=8.0, maximum=16.0))
    narrow.restore(one.state())
    assert narrow.scale == 16.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"Expected a loss scale's state with scale and good_updates, got \[\]"),
        ({"scale": 0.0, "good_updates": 1}, r"Expected scale .* above 0, got 0.0"),
        ({"scale": "8", "good_updates": 1}, r"Expected scale .*, got '8'"),
        ({"scale": 8.0, "good_updates": 1.5}, r"Expected good_updates to be an int of at least 0, got 1.5"),
    ],
)
def test_bad_loss_scale_states_are_refused(state: dict, message: str) -> None:
    scaler = LossScaler(LossScale())
    with pytest.raises(CallError, match=message):
        scaler.restore(state)
    assert scaler.scale == 65536.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": 1.0}, r"Expected growth .* above 1, got 1.0"),
        ({"backoff": 1.0}, r"Expected backoff .* above 0 and below 1, got 1.0"),
        ({"interval": 0}, r"Expected interval to be an int of at least 1, got 0"),
        ({"initial": 0.5}, r"Expected initial .* of at least 1, got 0.5"),
        ({"initial": 2.0**25}, r"Expected initial to be at most maximum=16777216.0, got 33554432.0"),
        ({"minimum": 0.0}, r"Expected minimum .* above 0, got 0.0"),
        ({"maximum": 0.5}, r"Expected maximum .* of at least 1, got 0.5"),
    ],
)
def test_bad_loss_scale_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(CallError, match=message):
        LossScale(**options)
