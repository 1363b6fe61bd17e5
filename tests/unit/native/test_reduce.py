"""reduce_into: the compiled form against the NumPy form, bit by bit, and against plain sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.native import reference
from zerort.native.dtypes import DTYPE_CODES

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")

FORMS = [
    pytest.param(native.reduce_into, id="native", marks=needs_native),
    pytest.param(reference.reduce_into, id="numpy"),
]
DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPE_CODES}
FLOATS = ("float32", "float64", "float16", "bfloat16")
REDUCTIONS = ("sum", "max", "min")
# Nothing, one, odd, a strip and its neighbours, a tile and its neighbours, more than a NumPy block.
SIZES = (0, 1, 2, 3, 63, 64, 65, 1023, 2047, 2048, 2049, 4096, 8193, 20001)


def random_array(rng: np.random.Generator, dtype: np.dtype, numel: int) -> np.ndarray:
    if dtype.name in FLOATS:
        return (rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 4, numel)).astype(dtype)
    return np.frombuffer(rng.bytes(numel * dtype.itemsize), dtype).copy()


def bits(array: np.ndarray) -> np.ndarray:
    """Bits with every NaN made equal and -0 made +0: neither payloads nor the zero that wins max are promised."""
    array = array.copy()
    if array.dtype.name in FLOATS:
        with np.errstate(invalid="ignore"):
            array[np.isnan(array)] = np.nan
            array[array == 0] = 0
    return array.view(f"u{array.itemsize}")


@needs_native
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", DTYPES)
def test_native_equals_numpy_bitwise(name: str, reduction: str) -> None:
    rng = np.random.default_rng(7)
    for numel in SIZES:
        for count in (1, 2, 3, 4, 9):
            sources = [random_array(rng, DTYPES[name], numel) for _ in range(count)]
            got, want = (np.empty(numel, DTYPES[name]) for _ in range(2))
            native.reduce_into(got, sources, reduction)
            reference.reduce_into(want, sources, reduction)
            np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"{numel=} {count=}")


@needs_native
@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(DTYPES)),
    reduction=st.sampled_from(REDUCTIONS),
    numel=st.integers(0, 5000),
    count=st.integers(1, 9),
    starts=st.lists(st.integers(0, 40), min_size=10, max_size=10),
    in_place=st.integers(-1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_any_start_in_place_or_not(
    name: str, reduction: str, numel: int, count: int, starts: list[int], in_place: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[name]
    wholes = [random_array(rng, dtype, numel + 48) for _ in range(count)]
    sources = [whole[start : start + numel] for whole, start in zip(wholes, starts, strict=False)]
    want = np.empty(numel, dtype)
    reference.reduce_into(want, [source.copy() for source in sources], reduction)
    target, start = random_array(rng, dtype, numel + 48), starts[-1]
    if 0 <= in_place < count:
        target, start = wholes[in_place], starts[in_place]
    before = target.copy()
    out = target[start : start + numel]
    native.reduce_into(out, sources, reduction)
    np.testing.assert_array_equal(bits(out), bits(want))
    # And not a byte beside it.
    np.testing.assert_array_equal(target[:start].view(np.uint8), before[:start].view(np.uint8))
    np.testing.assert_array_equal(target[start + numel :].view(np.uint8), before[start + numel :].view(np.uint8))


@needs_native
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_half_with_specials(name: str, reduction: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    rng = np.random.default_rng(3)
    for _ in range(4):
        sources = [every, rng.permutation(every), rng.permutation(every)]
        got, want = np.empty_like(every), np.empty_like(every)
        native.reduce_into(got, sources, reduction)
        reference.reduce_into(want, sources, reduction)
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("form", FORMS)
def test_sums_in_rank_order(form) -> None:
    # (1e8 + 1) - 1e8 is 0 in float32, any other order gives 1.
    out = np.empty(3000, np.float32)
    form(out, [np.full(3000, value, np.float32) for value in (1e8, 1.0, -1e8)])
    assert not out.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_round_once(form, name: str) -> None:
    # Each addend is below half a unit of 1.0 in the last place: rounding every time would lose them all.
    dtype = DTYPES[name]
    tiny = float(ml_dtypes.finfo(dtype).eps) / 4
    out = np.empty(77, dtype)
    form(out, [np.ones(77, dtype)] + [np.full(77, tiny, dtype)] * 8)
    np.testing.assert_array_equal(out.astype(np.float64), 1 + 8 * tiny)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in DTYPES if name not in FLOATS])
def test_integers_wrap_around(form, name: str) -> None:
    dtype = DTYPES[name]
    largest = np.iinfo(dtype).max
    out = np.empty(100, dtype)
    form(out, [np.full(100, largest, dtype), np.ones(100, dtype)])
    assert (out == np.iinfo(dtype).min).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("name", FLOATS)
def test_nan_wins_from_every_rank(form, reduction: str, name: str) -> None:
    for rank in range(3):
        sources = [np.arange(100).astype(DTYPES[name]) for _ in range(3)]
        sources[rank][40:60] = np.nan
        out = np.empty(100, DTYPES[name])
        form(out, sources, reduction)
        assert np.isnan(out[40:60]).all()
        assert not np.isnan(out[:40]).any()
