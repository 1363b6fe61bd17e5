"""Sums by digits are exact: no order changes a bit, and none is lost that a float32's square has."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.optim.exact import PLAIN, Digits, largest_square, mark_of, sums_of


@settings(max_examples=60)
@given(data=st.data(), numel=st.integers(0, 300), spread=st.integers(0, 30))
def test_no_order_and_no_cut_changes_a_bit(data, numel, spread):
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = generator.standard_normal(numel) * np.exp2(generator.integers(-spread, 1, numel))
    values = values.astype(np.float32)
    cut = data.draw(st.integers(0, numel))
    shuffled = generator.permutation(values)
    marks = mark_of(largest_square([values[:cut]])) + mark_of(largest_square([values[cut:]]))
    digits = Digits.of(marks, terms=numel)
    found = {
        float(digits.join(sums_of([digits.square_sums(part) for part in parts], digits)))
        for parts in ([values], [values[:cut], values[cut:]], [shuffled[cut:], shuffled[:cut]])
    }
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.fsum(float(one) ** 2 for one in values), rel=2**-50, abs=0)


def test_digits_of_many_terms_stay_whole_numbers():
    for terms in (1, 1000, 2**20, 2**31):
        digits = Digits.of(mark_of(1.0), terms=terms)
        assert digits.bits * digits.count >= 112
        assert terms * (2**digits.bits - 1) < 2**53
        assert all((part == np.floor(part)).all() for part in digits.split(np.array([1.0, 1e-9, 0.0])))


def test_sums_of_nothing_and_of_zeros_are_zero():
    digits = Digits.of(mark_of(0.0), terms=10)
    assert float(digits.join(digits.square_sums(np.zeros(3)))) == 0.0
    assert float(digits.join(sums_of([], digits))) == 0.0
    assert float(PLAIN.join(sums_of([], PLAIN))) == 0.0
