"""cast_into, copy_into and touch: against NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.native import reference

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FORMS = [pytest.param(native, id="native", marks=needs_native), pytest.param(reference, id="numpy")]
HALVES = [pytest.param(BFLOAT16, id="bfloat16"), pytest.param(FLOAT16, id="float16")]

SPECIAL_BITS = [
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000),  # zeros and infinities
    *(0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF, 0x7F801000),  # NaN of every kind
    *(0x00000001, 0x007FFFFF, 0x80000001, 0x00800000, 0x00008000, 0x00018000),  # float32 subnormals, ties of bfloat16
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3F801000, 0x3F803000, 0x3F801001),  # ties and their neighbours
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000),  # the edge of bfloat16's range
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x47800000, 0xC77FF000),  # 65504, 65519.99, 65520: of float16's
    *(0x38800000, 0x387FFFFF, 0x387FE000, 0x387FF000, 0x38000000),  # around 2^-14, float16's smallest normal
    *(0x33800000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x33C00000, 0x34200000, 0xB3000001),  # around 2^-24 and 2^-25
]


def is_nan(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN raises the flag even when it is only looked at
        return np.isnan(array)


def bits(array: np.ndarray) -> np.ndarray:
    """Bits with every NaN made equal: payloads are not promised."""
    array = array.copy()
    array[is_nan(array)] = np.nan
    return array.view(f"u{array.itemsize}")


def expected(source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return source.astype(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
def test_special_values_round_as_ieee(form, half: np.dtype) -> None:
    for copies in (1, 5):  # on their own, and in the middle of whole vectors
        source = np.repeat(np.array(SPECIAL_BITS, np.uint32), copies).view(np.float32)
        out = np.empty(source.size, half)
        form.cast_into(out, source)
        np.testing.assert_array_equal(bits(out), bits(expected(source, half)))
        np.testing.assert_array_equal(is_nan(out), is_nan(source))
        np.testing.assert_array_equal(np.signbit(out.astype(np.float32)), np.signbit(source))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
def test_every_half_survives_the_round_trip(form, half: np.dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    wide, back = np.empty(every.size, np.float32), np.empty_like(every)
    form.cast_into(wide, every)
    np.testing.assert_array_equal(bits(wide), bits(expected(every, np.dtype(np.float32))))
    form.cast_into(back, wide)
    finite = ~is_nan(every)
    np.testing.assert_array_equal(back[finite].view(np.uint16), every[finite].view(np.uint16))
    assert is_nan(back[~finite]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
def test_every_tie_between_halves_goes_to_even(form, half: np.dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    every = expected(every, np.dtype(np.float32))
    ascending = np.sort(every[np.isfinite(every)])
    middle = ((ascending[:-1].astype(np.float64) + ascending[1:]) / 2).astype(np.float32)
    for source in (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))):
        out = np.empty(source.size, half)
        form.cast_into(out, source)
        np.testing.assert_array_equal(bits(out), bits(expected(source, half)))


@needs_native
@settings(max_examples=100)
@given(
    half=st.sampled_from([BFLOAT16, FLOAT16]),
    numel=st.integers(0, 3000),
    start=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_native_equals_numpy_for_random_bits(half: np.dtype, numel: int, start: int, seed: int) -> None:
    source = np.frombuffer(np.random.default_rng(seed).bytes(4 * (numel + start)), np.float32)[start:]
    got, want = np.zeros(numel + 40, half), np.zeros(numel + 40, half)
    native.cast_into(got[start : start + numel], source)
    reference.cast_into(want[start : start + numel], source)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))  # NaN too: quiet, sign kept
    wide, other = np.empty(numel, np.float32), np.empty(numel, np.float32)
    native.cast_into(wide, got[start : start + numel])
    reference.cast_into(other, want[start : start + numel])
    np.testing.assert_array_equal(bits(wide), bits(other))


@pytest.mark.parametrize("form", FORMS)
def test_float64_both_ways(form) -> None:
    source = np.array([0.1, -0.0, 1e300, -1e300, 1e-46, 1e-40, np.inf, np.nan, 1 + 2**-24, 1 + 3 * 2**-24] * 30)
    out, back = np.empty(source.size, np.float32), np.empty(source.size)
    form.cast_into(out, source)
    np.testing.assert_array_equal(bits(out), bits(expected(source, out.dtype)))
    form.cast_into(back, out)
    np.testing.assert_array_equal(back, out.astype(np.float64))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["int8", "int64", "float32", "float64", "float16", "bfloat16"])
def test_the_same_dtype_is_a_copy_of_the_bits(form, name: str) -> None:
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    source = np.frombuffer(np.random.default_rng(0).bytes(1000 * dtype.itemsize), dtype)
    for kernel in (form.cast_into, form.copy_into):
        out = np.zeros(1000, dtype)
        kernel(out, source)
        assert out.tobytes() == source.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_copy_into_may_overlap(form) -> None:
    memory = np.arange(100_000, dtype=np.int32)
    want = memory[:-7].copy()
    form.copy_into(memory[7:], memory[:-7])
    np.testing.assert_array_equal(memory[7:], want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numel", [0, 1, 5, 4096, 100_001])
def test_touch_changes_nothing(form, numel: int) -> None:
    array = np.frombuffer(bytearray(np.random.default_rng(1).bytes(numel * 2)), BFLOAT16) if numel else np.empty(0)
    before = array.tobytes()
    form.touch(array[numel // 3 :])
    form.touch(np.ones((3, 4)))
    assert array.tobytes() == before
