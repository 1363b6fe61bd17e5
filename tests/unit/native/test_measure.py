"""square_sum, first_nonfinite, copy_checked and add_into: the two forms against each other, and against plain NumPy."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.native import reference

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")

FORMS = [pytest.param(native, id="native", marks=needs_native), pytest.param(reference, id="numpy")]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
CASTS = [(to, of) for to in DTYPES for of in DTYPES if to == of or "float32" in (to, of)]
SUMS = [(to, of) for to in ("float32", "float64") for of in DTYPES if DTYPES[of].itemsize < DTYPES[to].itemsize]
SUMS += [(name, name) for name in DTYPES]
# Nothing, one, a turn of the 32 lanes and its neighbours, a tile and its neighbours, more than a NumPy block.
SIZES = (0, 1, 2, 31, 32, 33, 63, 2047, 2048, 2049, 4100, 16384, 20003)
NONFINITE = (np.nan, -np.nan, np.inf, -np.inf)


def numbers(numel: int, name: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 4, numel)).astype(DTYPES[name])


def lane_by_lane(array: np.ndarray) -> float:
    """The order that is promised, in plain Python."""
    lanes = [0.0] * 32
    for i, value in enumerate(array.astype(np.float64).tolist()):
        lanes[i % 32] += value * value
    for width in (16, 8, 4, 2, 1):
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
    return lanes[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DTYPES)
def test_square_sum_keeps_to_the_promised_order(form, name: str) -> None:
    for numel in SIZES:
        array = numbers(numel, name, seed=numel)
        assert form.square_sum(array) == lane_by_lane(array)
        exact = math.fsum(value * value for value in array.astype(np.float64).tolist())
        assert form.square_sum(array) == pytest.approx(exact, rel=1e-14)


@needs_native
@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(DTYPES)),
    numel=st.integers(0, 5000),
    start=st.integers(0, 40),
    block=st.integers(1, 6000),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_block_does_not_depend_on_its_surroundings(name: str, numel: int, start: int, block: int, seed: int) -> None:
    array = numbers(numel + start, name, seed)[start:]
    count = -(-numel // block)
    got, want = np.full(count, np.nan), np.full(count, np.nan)
    native.square_sums_into(got, array, block)
    reference.square_sums_into(want, array, block)
    np.testing.assert_array_equal(got, want)
    for index in range(min(count, 20)):
        assert got[index] == native.square_sum(array[index * block : (index + 1) * block].copy())


@pytest.mark.parametrize("form", FORMS)
def test_square_sums_beyond_the_range_of_the_dtype(form) -> None:
    assert form.square_sum(np.full(100, 60000, np.float16)) == 100 * 60000.0**2
    assert form.square_sum(np.full(64, 2.0**127, np.float32)) == 64 * 2.0**254
    assert form.square_sum(np.full(64, 2.0**-149, np.float32)) == 64 * 2.0**-298  # a subnormal
    assert form.square_sum(np.full(64, 1e200)) == np.inf


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DTYPES)
def test_square_sum_shows_what_is_not_finite(form, name: str) -> None:
    for value in NONFINITE:
        for place in (0, 77, 999):
            array = numbers(1000, name)
            array[place] = value
            total = form.square_sum(array)
            assert math.isnan(total) if math.isnan(value) else total == np.inf


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DTYPES)
def test_first_nonfinite_names_the_first(form, name: str) -> None:
    dtype = DTYPES[name]
    largest = float(ml_dtypes.finfo(dtype).max)
    for numel in SIZES:
        array = numbers(numel, name)
        array[::3] = largest
        array[1::5] = -largest
        array[2::7] = 0
        assert form.first_nonfinite(array) == -1
        for place in sorted({0, 1, 40, numel // 2, numel - 1} & set(range(numel))):
            broken = array.copy()
            broken[place] = NONFINITE[place % 4]
            broken[place + 1 :: 2] = np.nan
            assert form.first_nonfinite(broken) == place
            assert form.first_nonfinite(broken[:place]) == -1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_is_judged_right(form, name: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(every)
    assert form.first_nonfinite(every[finite].copy()) == -1
    filled = np.zeros(1024, DTYPES[name])
    for broken in every[~finite]:
        filled[700] = broken
        assert form.first_nonfinite(filled) == 700


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("to", "of"), CASTS)
def test_copy_checked_copies_all_and_finds_the_first(form, to: str, of: str) -> None:
    for numel in SIZES:
        source = numbers(numel, of, seed=numel) / DTYPES[of].type(16)  # within the range of float16
        for places in ([], [numel - 1], [numel // 2, numel - 1], [0, 1]):
            source[[place for place in places if 0 <= place < numel]] = np.nan
            found = min((place for place in places if 0 <= place < numel), default=-1)
            memory = np.zeros(numel + 64, DTYPES[to])
            for start in (0, 3):
                out = memory[start : start + numel]
                assert form.copy_checked(out, source) == found
                want = np.empty_like(out)
                reference.cast_into(want, source)
                assert out.tobytes() == want.tobytes()
                assert not memory[start + numel :].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DTYPES)
def test_copy_checked_of_large_arrays(form, name: str) -> None:
    # From 2 MiB on, the compiled form writes past the caches.
    source = numbers(1_100_003, name)
    memory = np.zeros(source.size + 50, DTYPES[name])
    for start in (0, 1, 13, 32):
        memory[:] = 0
        out = memory[start : start + source.size]
        assert form.copy_checked(out, source) == -1
        assert out.tobytes() == source.tobytes()
        assert not memory[:start].any()
        assert not memory[start + source.size :].any()
    source[1_099_000] = np.inf
    assert form.copy_checked(out, source) == 1_099_000


@pytest.mark.parametrize("form", FORMS)
def test_copy_checked_counts_what_overflows_on_the_way(form) -> None:
    source = np.ones(5000, np.float32)
    source[4000] = 65520.0  # the first number that float16 rounds to infinity
    assert form.copy_checked(np.empty(5000, np.float16), source) == 4000
    assert form.copy_checked(np.empty(5000, ml_dtypes.bfloat16), source) == -1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("to", "of"), SUMS)
def test_add_into_adds(form, to: str, of: str) -> None:
    for numel in SIZES:
        out, source = numbers(numel, to, seed=1), numbers(numel, of, seed=2)
        work = np.float32 if DTYPES[to].itemsize == 2 else DTYPES[to]
        with np.errstate(over="ignore"):
            want = (out.astype(work) + source.astype(work)).astype(DTYPES[to])
        form.add_into(out, source)
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("form", FORMS)
def test_add_into_itself_doubles(form) -> None:
    array = numbers(3001, "float32")
    want = array * 2
    form.add_into(array, array)
    np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("form", FORMS)
def test_many_small_gradients_do_not_vanish_in_float32(form) -> None:
    # In bfloat16, 1 + 2^-9 is 1: the sum would stay where it is.
    total, small = np.ones(100, np.float32), np.full(100, 2.0**-9, ml_dtypes.bfloat16)
    for _ in range(512):
        form.add_into(total, small)
    assert (total == 2).all()
