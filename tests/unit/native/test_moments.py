"""Moments in 8 bits: bounded and unbiased, the same however they are cut, the same bits in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from zerort import native
from zerort.native import reference

FORMS = [native, reference]
SIZES = (0, 1, 255, 256, 257, 5003)
KEYS = (7, 11)
STEP = 1 / 8
"""Of a code, relative to the value below it, at most."""


def numbers(numel: int, seed: int = 0, *, is_signed: bool) -> np.ndarray:
    """Numbers over many octaves, zeros among them."""
    lot = np.random.default_rng(seed)
    values = np.exp(2 * lot.standard_normal(numel)) * (lot.choice([-1.0, 1.0], numel) if is_signed else 1.0)
    values[::13] = 0
    return values.astype(np.float32)


def coded(values: np.ndarray, *, is_signed: bool, form=native, start: int = 0, keys=KEYS) -> np.ndarray:
    payload = np.zeros(-(-values.size // 256) * 260, np.uint8)
    if form is native:
        native.encode_moments(payload, values, start=start, is_signed=is_signed, keys=keys)
    else:
        reference.encode_moments(payload, values, start, is_signed=is_signed, keys=keys)
    return payload


def decoded(payload: np.ndarray, numel: int, *, is_signed: bool, form=native) -> np.ndarray:
    out = np.empty(numel, np.float32)
    form.decode_moments(out, payload, is_signed=is_signed)
    return out


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("numel", SIZES)
def test_both_forms_have_the_same_bits(numel: int, is_signed: bool) -> None:
    values = numbers(numel, is_signed=is_signed)
    payloads = [coded(values, is_signed=is_signed, form=form, start=2**33 + 256) for form in FORMS]
    assert payloads[0].tobytes() == payloads[1].tobytes()
    found = [decoded(payloads[0], numel, is_signed=is_signed, form=form) for form in FORMS]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("is_signed", [True, False])
def test_values_are_within_a_step_and_the_largest_is_exact(is_signed: bool) -> None:
    values = numbers(5003, is_signed=is_signed)
    found = decoded(coded(values, is_signed=is_signed), values.size, is_signed=is_signed)
    rows = np.zeros((20, 256), np.float32)
    rows.reshape(-1)[: values.size] = np.abs(values)
    largest = np.repeat(rows.max(axis=1), 256)[: values.size]
    smallest = largest * np.float32(2.0**-15 if is_signed else 2.0**-31)
    kept = np.abs(values) > smallest
    assert (np.abs(found - values)[kept] <= STEP * np.abs(values)[kept] * (1 + 1e-6)).all()
    assert (np.abs(found - values)[~kept] <= smallest[~kept]).all()
    np.testing.assert_array_equal(found[np.abs(values) == largest], values[np.abs(values) == largest])
    np.testing.assert_array_equal(found[values == 0], 0)
    np.testing.assert_array_equal(np.sign(found)[kept], np.sign(values)[kept])


def test_a_square_that_is_not_zero_is_never_rounded_to_it() -> None:
    values = np.full(256, 1e-30, np.float32)
    values[0] = 1.0
    assert (decoded(coded(values, is_signed=False), 256, is_signed=False) > 0).all()
    assert (decoded(coded(values, is_signed=True), 256, is_signed=True)[1:] == 0).all()


def test_the_mean_of_many_roundings_is_the_value() -> None:
    values = np.linspace(0.01, 1.0, 256, dtype=np.float32)
    draws = [decoded(coded(values, is_signed=True, keys=(key, 3)), 256, is_signed=True) for key in range(1000)]
    error = np.mean(draws, axis=0, dtype=np.float64) - values
    # A draw is at most a step off: its deviation is at most half of that, and the mean's 1 / sqrt(1000) of it.
    assert (np.abs(error) <= 5 * (0.5 * STEP * values) / np.sqrt(1000)).all()


@pytest.mark.parametrize("is_signed", [True, False])
def test_cuts_between_blocks_do_not_show(is_signed: bool) -> None:
    values = numbers(2048, is_signed=is_signed)
    whole = coded(values, is_signed=is_signed)
    parts = [coded(values[at : at + 512], is_signed=is_signed, start=at) for at in range(0, 2048, 512)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert coded(values, is_signed=is_signed, start=256).tobytes() != whole.tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_turned_into_one(form, broken: float) -> None:
    values = numbers(600, is_signed=True)
    values[300] = broken
    found = decoded(coded(values, is_signed=True, form=form), 600, is_signed=True, form=form)
    assert np.isnan(found[256:512]).all()
    assert np.isfinite(found[:256]).all()
    assert np.isfinite(found[512:]).all()


def test_wrong_arrays_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Expected payload of 260 elements, got 259"):
        native.decode_moments(np.empty(10, np.float32), np.zeros(259, np.uint8), is_signed=True)
    with pytest.raises(ValueError, match="Expected start to be a multiple of a block"):
        native.encode_moments(np.zeros(260, np.uint8), np.zeros(9, np.float32), start=5, is_signed=True, keys=KEYS)
    with pytest.raises(ValueError, match="Expected payload at a multiple of 4 bytes"):
        native.decode_moments(np.empty(10, np.float32), np.zeros(264, np.uint8)[1:261], is_signed=True)
