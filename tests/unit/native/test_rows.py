"""Rows of a table: both forms of `take_rows`, `put_rows` and `late_adamw_` have the same bits, and refuse the same."""

import ml_dtypes
import numpy as np
import pytest

from zerort import native
from zerort.native import reference
from zerort.optim import AdamW
from zerort.optim.late import MOST_MISSED, late_updates

pytestmark = pytest.mark.filterwarnings("ignore:zerort's native kernels are missing:RuntimeWarning")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.int32])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_rows_are_taken_and_put_as_numpy_does(dtype, width):
    lot = np.random.default_rng(width)
    table = lot.integers(-99, 99, 50 * width + width - 1).astype(dtype)  # with an end that is no row
    rows = lot.integers(0, 50, 70)
    found, expected = np.empty(70 * width, dtype), np.empty(70 * width, dtype)
    native.take_rows(found, table, rows, width)
    reference.take_rows(expected, table, rows, width)
    np.testing.assert_array_equal(found, expected)
    once, other = lot.permutation(50)[:20], table.copy()
    native.put_rows(table, found[: 20 * width], once, width)
    reference.put_rows(other, found[: 20 * width], once, width)
    np.testing.assert_array_equal(table, other)
    native.take_rows(np.empty(0, dtype), table, np.zeros(0, np.int64), width)


@pytest.mark.parametrize(
    ("rows", "width", "text"),
    [
        ([5], 2, "rows from 0 to 4, got 5"),
        ([-1], 2, "rows from 0 to 4, got -1"),
        ([0], 0, "a width of 1 or more"),
        ([0, 1], 2, "of 4 elements, got 2"),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows, width, text):
    table, some = np.zeros(10, np.float32), np.zeros(2, np.float32)
    for call in (
        lambda: native.take_rows(some, table, np.array(rows), width),
        lambda: native.put_rows(table, some, np.array(rows), width),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="int64"):
        native.take_rows(some, table, np.array([0], np.int32), 2)
    with pytest.raises(ValueError, match="memory"):
        native.take_rows(table[:2], table, np.array([1]), 2)


def rows_of(dtype, width):
    """Return rows with roots from well above eps to nothing, without moments, and with what is no number."""
    lot = np.random.default_rng(width)
    param, mean = (lot.standard_normal((90, width)).astype(dtype) for _ in range(2))
    square = np.square(lot.standard_normal((90, width)) * 10.0 ** lot.integers(-7, 1, (90, 1))).astype(dtype) + dtype(
        1e-30
    )
    mean[3], square[4, 0], square[5, 0], mean[6, 0], square[7, 0] = 0.0, 0.0, np.nan, np.inf, np.inf
    return param, mean, square


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_missed_updates_have_the_same_bits_in_both_forms(dtype, width):
    late = late_updates(AdamW(lr=0.1, weight_decay=0.1), np.dtype(dtype).name)
    for step in range(1, 70):
        late.advance(lr=0.1 / step, step=step)
    numbers = {"decays": late._decay, "means": late._mean, "squares": late._square, "terms": late._terms}
    ages = np.random.default_rng(1).integers(0, 70, 90)
    found = [one.reshape(-1) for one in rows_of(dtype, width)]
    left = native.late_adamw_(*found, ages, **numbers, eps=late._eps, error=late._error)
    expected = [one.reshape(-1) for one in rows_of(dtype, width)]
    marks = np.zeros(90, np.uint8)
    flat = {**numbers, "terms": late._terms.reshape(-1)}
    reference.late_adamw_(*expected, ages, marks, *flat.values(), eps=late._eps, error=late._error)
    np.testing.assert_array_equal(left, marks)
    assert {0, 1} <= set(left.tolist())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    before = rows_of(dtype, width)[0][left == 1]
    np.testing.assert_array_equal(found[0].reshape(-1, width)[left == 1], before)
    with pytest.raises(ValueError, match="ages from 0"):
        native.late_adamw_(*found, ages + MOST_MISSED, **numbers, eps=late._eps, error=late._error)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_rows_are_updated_where_they_lie_as_others_are(dtype, width):
    lot = np.random.default_rng(width)
    before = [np.abs(lot.standard_normal(50 * width)).astype(dtype) for _ in range(3)]
    rows, gradient = lot.permutation(50)[:30], lot.standard_normal(30 * width).astype(dtype)
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "grad_scale": 0.5}
    found, expected = ([one.copy() for one in before] for _ in range(2))
    native.adamw_rows_(found[0], gradient, *found[1:], rows, width=width, **settings)
    reference.adamw_rows_(expected[0], gradient, *expected[1:], rows, width=width, **settings)
    for one, other, old in zip(found, expected, before, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one.reshape(-1, width) != old.reshape(-1, width)).all(axis=1).nonzero()[0].tolist() == sorted(rows)
    with pytest.raises(ValueError, match="rows from 0 to 49"):
        native.adamw_rows_(found[0], gradient, *found[1:], rows + 30, width=width, **settings)
