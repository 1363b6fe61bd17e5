"""The largest elements of each block, and where they are: against a plain sort; in C++ and NumPy alike."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from zerort import native
from zerort.codec import Coded, LargestFormat
from zerort.errors import CallError
from zerort.native import reference
from zerort.native.reference.largest import largest_count

SIZES = [0, 1, 10, 11, 12, 1023, 1024, 1025, 65_536, 131_201]


def by_sorting(source, fraction):
    """Return what is left of an array: of each 1,024 elements the largest, in bfloat16; the first of equal ones."""
    keep = max(1, int(np.ceil(fraction * 1024)))
    left = np.zeros(source.size, np.float32)
    for first in range(0, source.size, 1024):
        block = source[first : first + 1024]
        magnitude = np.where(np.isnan(block), np.inf, np.abs(block))
        order = sorted(range(block.size), key=lambda at: (not np.isnan(block[at]), -magnitude[at], at))
        for at in order[:keep]:
            left[first + at] = block[at].astype(ml_dtypes.bfloat16)
    return left


def numbers(numel, seed=0):
    return np.random.default_rng(seed).normal(size=numel).astype(np.float32)


def decoded(format, source, dtype=np.float32):
    payload, out = np.zeros(format.nbytes(source.size), np.uint8), np.ones(source.size, dtype)
    format.encode(payload, source)
    format.decode(out, payload)
    return out


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("fraction", [0.0001, 0.01, 1.0])
def test_the_largest_of_each_block_are_left(numel, fraction):
    source = numbers(numel)
    np.testing.assert_array_equal(decoded(LargestFormat(fraction), source), by_sorting(source, fraction))


@given(
    source=nps.arrays(np.float32, st.integers(0, 2100), elements=st.sampled_from([0, -0.0, 1, -1, 2, np.inf, np.nan])),
    keep=st.integers(1, 1024),
)
def test_compiled_and_numpy_forms_agree_also_on_ties(source, keep):
    numel = largest_count(source.size, block=1024, keep=keep)
    compiled, plain = np.zeros(numel, np.uint16), np.ones(numel, np.uint16)
    native.find_largest(source, compiled, block=1024, keep=keep)
    reference.find_largest(source, plain, 1024, keep)
    np.testing.assert_array_equal(compiled, plain)


def test_of_equal_magnitudes_the_first_are_left():
    source = np.full(2048, 3.0, np.float32)
    source[1::2] = -3.0
    left = decoded(LargestFormat(0.01), source)
    assert np.flatnonzero(left).tolist() == [*range(11), *range(1024, 1035)]


def test_nan_and_infinity_are_left_in_their_places():
    source = numbers(3000)
    source[[5, 1500, 2999]] = np.nan, -np.inf, np.inf
    left = decoded(LargestFormat(0.001), source)
    np.testing.assert_array_equal(np.isnan(left), np.isnan(source))
    np.testing.assert_array_equal(np.isinf(left), np.isinf(source))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_shards_give_what_the_whole_gives_and_sums_are_rounded_once(dtype):
    format, whole, cut = LargestFormat(0.05), numbers(70_000), 65_536 - 1024
    parts = []
    for part in (whole[:cut], whole[cut:]):
        payload = np.zeros(format.nbytes(part.size), np.uint8)
        format.encode(payload, part, start=cut if part.size != cut else 0)
        parts.append(Coded(part.size, payload))
    other = np.zeros(format.nbytes(whole.size), np.uint8)
    format.encode(other, numbers(70_000, seed=1))
    out = np.ones(whole.size, dtype)
    format.decode_sum(out, [parts, [Coded(whole.size, other)]])
    expected = by_sorting(whole, 0.05) + by_sorting(numbers(70_000, seed=1), 0.05)
    np.testing.assert_array_equal(out, expected.astype(dtype))


def test_feedback_sends_everything_in_the_end():
    format, gradient = LargestFormat(0.01), numbers(2048)
    residual, sent = np.zeros(2048, format.residual_dtype), np.zeros(2048, np.float64)
    payload, out = np.zeros(format.nbytes(2048), np.uint8), np.zeros(2048, np.float32)
    for _ in range(300):
        format.encode_with_feedback(payload, gradient, residual)
        format.decode(out, payload)
        assert np.count_nonzero(out) <= 22
        sent += out
    assert np.count_nonzero(sent) > 1500  # in a few hundred steps, all but the smallest have had their turn
    np.testing.assert_allclose(sent + residual, 300 * gradient.astype(np.float64), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    format = LargestFormat(0.01)
    with pytest.raises(CallError, match=r"Expected a payload of 44 bytes \(uint8, 1-D\) for 1024 elements in top 0.01"):
        format.encode(np.zeros(40, np.uint8), numbers(1024))
    with pytest.raises(CallError, match=r"Expected an array that starts a block of 1024 elements, got start="):
        format.encode(np.zeros(44, np.uint8), numbers(1024), start=512)
    with pytest.raises(ValueError, match=r"Expected keep from 1 to block, .*, got keep=0 and block=1024"):
        native.find_largest(numbers(8), np.zeros(0, np.uint16), block=1024, keep=0)
    with pytest.raises(ValueError, match=r"Expected positions of 11 elements, got 3"):
        native.find_largest(numbers(1024), np.zeros(3, np.uint16), block=1024, keep=11)
