"""Rows of codes: those of `Format`, block by block, and cut between any two blocks."""

import ml_dtypes
import numpy as np
import pytest

from zerort.codec import ROWS
from zerort.errors import CallError

SIZES = [0, 1, 127, 128, 129, 255, 256, 257, 70_001]


def numbers(numel, dtype=np.float32):
    return (3 * np.random.default_rng(numel).standard_normal(numel)).astype(dtype)


def rows_of(rows, source):
    out = np.full(rows.nbytes_of(source.size), 77, np.uint8)
    rows.encode(out, source)
    return out


def values_of(rows, octets, numel, dtype=np.float32):
    out = np.full(numel, 123, dtype)
    rows.decode(out, octets)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_hold_the_values_of_their_format(rows, numel, dtype):
    source = numbers(numel, dtype)
    payload = np.empty(rows.format.nbytes(numel), np.uint8)
    rows.format.encode(payload, source)
    expected = np.empty(numel, dtype)
    rows.format.decode(expected, payload)
    octets = rows_of(rows, source)
    assert octets.size == -(-numel // rows.numel) * rows.nbytes
    np.testing.assert_array_equal(values_of(rows, octets, numel, dtype), expected)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_are_cut_between_any_two_blocks(rows):
    source = numbers(10 * rows.numel + 5)
    octets = rows_of(rows, source)
    whole = values_of(rows, octets, source.size)
    for first, last in ((0, 3), (3, 4), (4, 11)):
        elements = slice(first * rows.numel, min(last * rows.numel, source.size))
        np.testing.assert_array_equal(rows_of(rows, source[elements]), octets[rows.bytes_of(elements)])
        found = values_of(rows, octets[rows.bytes_of(elements)], elements.stop - elements.start)
        np.testing.assert_array_equal(found, whole[elements])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_is_not_finite_stays_what_it_is(rows):
    source = numbers(3 * rows.numel)
    source[[1, rows.numel, 2 * rows.numel + 3]] = np.nan, np.inf, -np.inf
    found = values_of(rows, rows_of(rows, source), source.size)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(source))
    np.testing.assert_array_equal(found[np.isinf(source)], source[np.isinf(source)])
    assert np.isfinite(found[np.isfinite(source)]).all()


def test_bytes_of_another_length_are_refused():
    with pytest.raises(CallError, match=r"Expected 520 bytes \(uint8, 1-D\) for 257 elements in rows of int8, got"):
        ROWS["int8"].decode(np.empty(257, np.float32), np.empty(260, np.uint8))
