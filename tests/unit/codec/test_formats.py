"""int8, int4 and bfloat16: native code gives NumPy's bits, and errors stay within half a step of their block."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.codec import BFLOAT16, FORMATS, INT4, INT8, Coded, Stochastic, find_format
from zerort.errors import CallError
from zerort.native import reference

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")
SIZES = [0, 1, 2, 127, 128, 129, 255, 256, 257, 1_000, 300_001]
BLOCKED = [INT8, INT4]


def numbers(numel, seed=0, spread=3.0):
    """Return numbers of all magnitudes, zeros, and blocks that hold nothing else."""
    lot = np.random.default_rng(seed)
    values = lot.standard_normal(numel) * np.exp(spread * lot.standard_normal(numel))
    values[::17] = 0
    values[300:700] = 0
    return values.astype(np.float32)


def encoded(format, source, **settings):
    payload = np.zeros(format.nbytes(source.size), np.uint8)
    format.encode(payload, source, **settings)
    return payload


def decoded(format, payload, numel):
    out = np.full(numel, np.float32(123.0))
    format.decode(out, payload)
    return out


def by_reference(format, source, *, start=0, rounding=None, base=None):
    """Return what the NumPy form writes, as a payload, and what it reads from that, or adds to a base."""
    blocks = -(-source.size // format.block)
    scales = np.zeros(blocks, np.float32 if format.bits == 8 else np.uint16)
    payload = np.zeros(format.nbytes(source.size), np.uint8)
    codes = payload[scales.nbytes :].view(np.int8 if format.bits == 8 else np.uint8)
    keys = (0, 0) if rounding is None else rounding.keys
    settings = {"stochastic": rounding is not None, "keys": keys}
    reference.encode_blocks(source, scales, codes, format.bits, start, base=base, **settings)
    payload[: scales.nbytes] = scales.view(np.uint8)
    out = np.full(source.size, np.float32(123.0)) if base is None else base.copy()
    reference.decode_blocks(out, scales, codes, format.bits, adds=base is not None)
    return payload, out


@needs_native
@pytest.mark.parametrize("rounding", [None, Stochastic(3, 4, 5)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_native_equals_numpy_to_the_bit(format, numel, rounding):
    for start in (0, 1024 * 77, (1 << 32) - 1024):
        source = numbers(numel, seed=numel)
        if numel > 400:
            source[[3, 4, 5, 399]] = np.nan, np.inf, -np.inf, np.nan
        payload, values = by_reference(format, source, start=start, rounding=rounding)
        assert encoded(format, source, start=start, rounding=rounding).tobytes() == payload.tobytes()
        assert decoded(format, payload, numel).tobytes() == values.tobytes()


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    words=st.lists(st.integers(0, 2**32 - 1), max_size=700),
    start=st.integers(0, 1 << 40),
    seed=st.none() | st.integers(0, 99),
)
def test_native_equals_numpy_for_any_bits(bits, words, start, seed):
    """Subnormals, NaN of any payload, infinities and numbers in one block."""
    format = {8: INT8, 4: INT4}[bits]
    source = np.array(words, np.uint32).view(np.float32)
    rounding = None if seed is None else Stochastic(seed)
    payload, values = by_reference(format, source, start=start * format.block, rounding=rounding)
    assert encoded(format, source, start=start * format.block, rounding=rounding).tobytes() == payload.tobytes()
    assert decoded(format, payload, source.size).tobytes() == values.tobytes()


# -- differences -------------------------------------------------------------------------------------------------------


def added(format, payload, base):
    out = base.copy()
    format.decode(out, payload, adds=True)
    return out


@needs_native
@pytest.mark.parametrize("numel", [0, 1, 129, 257, 1_000, 300_001])
@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_native_differences_equal_numpys_to_the_bit(format, numel):
    """Product and sum round one after the other: fused, int8 would have other bits."""
    source, base = numbers(numel, seed=numel), numbers(numel, seed=numel + 1, spread=1.0)
    if numel > 400:
        source[[3, 4, 5, 399]] = np.nan, np.inf, -np.inf, 3e38
        base[[5, 6, 7, 399]] = np.nan, np.inf, -np.inf, -3e38
    for rounding in (None, Stochastic(3, 4, 5)):
        payload, values = by_reference(format, source, start=1024, rounding=rounding, base=base)
        assert encoded(format, source, start=1024, rounding=rounding, base=base).tobytes() == payload.tobytes()
        assert added(format, payload, base).tobytes() == values.tobytes()


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    words=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=700),
)
def test_native_differences_equal_numpys_for_any_bits(bits, words):
    format = {8: INT8, 4: INT4}[bits]
    source, base = np.array(words, np.uint32).reshape(-1, 2).T.copy().view(np.float32)
    payload, values = by_reference(format, source, base=base)
    assert encoded(format, source, base=base).tobytes() == payload.tobytes()
    assert added(format, payload, base).tobytes() == values.tobytes()


@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_differences_of_halves_are_those_of_float32_rounded_once(format):
    source, base = (numbers(70_001, seed=seed).astype(ml_dtypes.bfloat16) for seed in (1, 2))
    source[[3, 4]], base[[5, 6]] = (np.nan, np.inf), (-np.inf, np.nan)
    payload, values = by_reference(format, source.astype(np.float32), base=base.astype(np.float32))
    assert encoded(format, source, base=base).tobytes() == payload.tobytes()
    assert added(format, payload, base).tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_differences_that_are_added_again_and_again_come_to_the_value(dtype):
    """In int4 an error is below a thirteenth of the one before, until it is that of the dtype."""
    source = np.random.default_rng(1).standard_normal(5_000).astype(dtype)
    base, errors = np.zeros_like(source), []
    for _ in range(8):
        base = added(INT4, encoded(INT4, source, base=base), base)
        errors.append(np.abs(base.astype(np.float64) - source.astype(np.float64)).max())
    assert errors[1] < errors[0] / 13
    assert errors[2] < errors[1] / (13 if dtype is np.float32 else 4)
    assert errors[-1] <= (2.0**-21 if dtype is np.float32 else 0)


@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_nan_and_infinity_arrive_and_do_not_stay(format):
    source = np.linspace(-1, 1, 700).astype(np.float32)
    odd = source.copy()
    odd[[3, 140, 141, 699]] = np.nan, np.inf, -np.inf, np.nan
    base = added(format, encoded(format, odd, base=np.zeros_like(odd)), np.zeros_like(odd))
    np.testing.assert_array_equal(base[[3, 140, 141, 699]], odd[[3, 140, 141, 699]])
    assert np.isfinite(base).sum() == 696
    again = added(format, encoded(format, odd, base=base), base)  # infinity less infinity would be NaN
    np.testing.assert_array_equal(again[[3, 140, 141, 699]], odd[[3, 140, 141, 699]])
    for _ in range(5):
        again = added(format, encoded(format, source, base=again), again)
    np.testing.assert_allclose(again, source, atol=1e-4)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [None, Stochastic(1)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_errors_stay_below_their_bound(format, rounding):
    """And the bound is half a step: largest / 127, or / 7 with the scale rounded up."""
    for spread, scale in ((0.0, 1.0), (3.0, 1.0), (0.5, 1e-38), (0.5, 1e37), (0.5, 1e-44)):
        with np.errstate(under="ignore"):
            source = (numbers(50_000, seed=5, spread=spread) * np.float64(scale)).astype(np.float32)
        values = decoded(format, encoded(format, source, rounding=rounding), source.size)
        error = np.abs(values.astype(np.float64) - source)
        bound = format.bound(source, rounding=rounding)
        assert (error <= bound).all()
        row = np.abs(source[1024 : 1024 + format.block]).max() / {8: 127, 4: 7}[format.bits]
        half = max(float(row), 2.0**-126) * (0.5 if rounding is None else 1.0)
        assert half <= bound[1024] <= half * (1 + 2.0**-7) * (1 + 2.0**-13)
        if scale > 1e-40:  # below, a step is the smallest normal number
            assert error.max() > 0.3 * bound.max()  # the bound is not generous


@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_halfway_goes_to_even(format):
    limit = {8: 127, 4: 7}[format.bits]
    source = np.array([limit, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49], np.float32)
    assert decoded(format, encoded(format, source), 8).tolist() == [limit, 0, 2, 2, 0, -2, -2, 3]


@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
@pytest.mark.parametrize("rounding", [None, Stochastic(9)], ids=["nearest", "stochastic"])
def test_nan_and_infinity_stand_where_they_stood(format, rounding):
    """No number becomes one of them, and none of them becomes a number; their neighbours keep the bound."""
    source = numbers(5_000, seed=2, spread=0.5)
    source[[0, 1_700, 4_999]] = np.nan
    source[[1, 1_701]] = np.inf
    source[[2, 2_900]] = -np.inf
    values = decoded(format, encoded(format, source, rounding=rounding), source.size)
    finite = np.isfinite(source)
    np.testing.assert_array_equal(values[~finite], source[~finite])
    error = np.abs(values[finite].astype(np.float64) - source[finite])
    assert (error <= format.bound(source, rounding=rounding)[finite]).all()
    every = np.full(300, np.nan, np.float32)
    assert np.isnan(decoded(format, encoded(format, every), 300)).all()


@pytest.mark.parametrize("rounding", [None, Stochastic(1, 2, 3)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_cuts_between_blocks_change_no_bits(format, rounding):
    """Codes depend on global indices, not on who encodes which part."""
    source = numbers(10_000, seed=3)
    whole = decoded(format, encoded(format, source, rounding=rounding), source.size)
    for cuts in ([0, 1024, 5120, 10_000], [0, 256, 512, 9_984, 10_000], [0, 0, 2048, 2048, 10_000]):
        parts = [
            decoded(format, encoded(format, source[a:b], start=a, rounding=rounding), b - a)
            for a, b in itertools.pairwise(cuts)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_stochastic_rounding_is_unbiased_and_keyed(format):
    source = np.full(20_000, np.float32(0.3))
    source[:: format.block] = {8: 127, 4: 7}[format.bits]  # a step is 1
    inner = np.arange(source.size) % format.block != 0
    seen = []
    for rounding in (Stochastic(1), Stochastic(1, 1), Stochastic(1, 0, 1), Stochastic(2)):
        values = decoded(format, encoded(format, source, rounding=rounding), source.size)
        assert set(values[inner]) == {0.0, 1.0}
        assert values[inner].mean() == pytest.approx(0.3, abs=5 * (0.21 / inner.sum()) ** 0.5)
        seen.append(values)
    assert len({one.tobytes() for one in seen}) == 4
    again = decoded(format, encoded(format, source, rounding=Stochastic(1, 1)), source.size)
    assert again.tobytes() == seen[1].tobytes()


def test_bytes_are_a_quarter_and_an_eighth():
    assert INT8.nbytes(1 << 20) / (4 << 20) == pytest.approx(0.254, rel=0.01)
    assert INT4.nbytes(1 << 20) / (4 << 20) == pytest.approx(0.129, rel=0.01)


def test_bfloat16_is_the_nearest():
    source = numbers(5_000)
    source[:2] = np.nan, -np.inf
    values = decoded(BFLOAT16, encoded(BFLOAT16, source), source.size)
    assert values.tobytes() == source.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()
    finite = np.isfinite(source)
    assert (np.abs(values[finite].astype(np.float64) - source[finite]) <= BFLOAT16.bound(source)[finite]).all()


def test_wrong_arguments_are_named():
    source = np.ones(600, np.float32)
    with pytest.raises(ValueError, match="multiple of a block, 256 elements, got 100"):
        encoded(INT8, source, start=100)
    with pytest.raises(ValueError, match="dtype float32, got float64"):
        encoded(INT8, source.astype(np.float64))
    with pytest.raises(CallError, match="payload of 612 bytes"):
        INT8.encode(np.zeros(611, np.uint8), source)
    with pytest.raises(CallError, match="formats int8, int4, bfloat16, got 'int7'"):
        find_format("int7")
    with pytest.raises(CallError, match="rounding=None with bfloat16"):
        encoded(BFLOAT16, source, rounding=Stochastic(1))
    for call in (lambda p: BFLOAT16.encode(p, source, base=source), lambda p: BFLOAT16.decode(source, p, adds=True)):
        with pytest.raises(CallError, match="format with blocks for differences, got bfloat16"):
            call(np.zeros(BFLOAT16.nbytes(source.size), np.uint8))
    with pytest.raises(ValueError, match="Expected base"):
        encoded(INT4, source, base=source[1:])
    with pytest.raises(CallError, match="seed to be a whole number"):
        Stochastic(-1)
    assert set(FORMATS) == {"int8", "int4", "bfloat16"}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 65_535, 65_536, 131_201])
@pytest.mark.parametrize("format", BLOCKED, ids=lambda one: one.name)
def test_values_of_16_bits_are_coded_as_the_same_values_of_32(format, numel, dtype):
    source = numbers(numel, spread=1.0).astype(dtype)
    payload = encoded(format, source, start=1024, rounding=Stochastic(1))
    np.testing.assert_array_equal(
        payload, encoded(format, source.astype(np.float32), start=1024, rounding=Stochastic(1))
    )
    out = np.ones(numel, dtype)
    format.decode(out, payload)
    np.testing.assert_array_equal(out, decoded(format, payload, numel).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 65_536, 131_201])
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda one: one.name)
def test_payloads_are_summed_in_their_order_and_rounded_once(format, numel, dtype):
    payloads = [encoded(format, numbers(numel, seed=seed, spread=1.0)) for seed in range(3)]
    out = np.ones(numel, dtype)
    format.decode_sum(out, [[Coded(numel, payload)] for payload in payloads])
    first, second, third = (decoded(format, payload, numel) for payload in payloads)
    np.testing.assert_array_equal(out, (first + second + third).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 131_201])
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda one: one.name)
def test_feedback_keeps_what_codes_lose(format, numel, dtype):
    source = numbers(numel, spread=1.0).astype(dtype)
    residual = numbers(numel, seed=5, spread=1.0).astype(ml_dtypes.bfloat16)
    wanted = source.astype(np.float32) + residual.astype(np.float32)
    payload = np.zeros(format.nbytes(numel), np.uint8)
    format.encode_with_feedback(payload, source, residual, start=512)
    np.testing.assert_array_equal(payload, encoded(format, wanted, start=512))
    lost = wanted - decoded(format, payload, numel)
    np.testing.assert_array_equal(residual, lost.astype(ml_dtypes.bfloat16))
