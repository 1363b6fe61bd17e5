"""Master weights as two halves: exact for every number, rounded half away from zero, the same bits in every form."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from zerort import native
from zerort.native import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMS = [native, reference]


def all_kinds() -> np.ndarray:
    """Every upper half of a float32 with the lower halves at which rounding turns: infinities, NaN, subnormals."""
    low = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    high = np.arange(2**16, dtype=np.uint32) << 16
    return (high[:, None] | low).reshape(-1).view(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_halves_give_the_master_back_to_the_bit(form) -> None:
    master = all_kinds()
    param, remainder, joined = np.empty(master.size, BFLOAT16), np.empty(master.size, np.uint16), np.empty_like(master)
    form.split_master(param, remainder, master)
    form.join_master(joined, param, remainder)
    number = ~np.isnan(master)
    np.testing.assert_array_equal(joined.view(np.uint32)[number], master.view(np.uint32)[number])
    assert np.isnan(joined[~number]).all()
    assert np.isnan(param[~number].astype(np.float32)).all()
    np.testing.assert_array_equal(np.signbit(joined), np.signbit(master))


def test_parameters_are_rounded_to_the_nearest_and_ties_away_from_zero() -> None:
    master = all_kinds()
    master = master[np.abs(master) < 3e38]
    param = np.empty(master.size, BFLOAT16)
    native.round_master(param, master)
    even = master.astype(BFLOAT16)
    tie = (master.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(param.view(np.uint16)[~tie], even.view(np.uint16)[~tie])
    assert (np.abs(param[tie].astype(np.float64)) > np.abs(master[tie])).all()


def test_both_forms_have_the_same_bits() -> None:
    master = all_kinds()
    found = []
    for form in FORMS:
        param, remainder = np.empty(master.size, BFLOAT16), np.empty(master.size, np.uint16)
        form.split_master(param, remainder, master)
        alone = np.empty(master.size, BFLOAT16)
        native.round_master(alone, master)
        assert alone.tobytes() == param.tobytes()
        found.append((param.tobytes(), remainder.tobytes()))
    assert found[0] == found[1]


def test_float16_is_rounded_to_nearest_even() -> None:
    master = np.array([1.00048828125, 2049.0, -7.0], np.float32)
    param = np.empty(3, np.float16)
    native.round_master(param, master)
    np.testing.assert_array_equal(param, master.astype(np.float16))


def test_wrong_arrays_are_refused_by_name() -> None:
    master, param, remainder = np.zeros(4, np.float32), np.zeros(4, BFLOAT16), np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="Expected remainder of"):
        native.split_master(param, remainder[:3], master)
    with pytest.raises(ValueError, match="Expected param of dtype bfloat16"):
        native.join_master(master, remainder, remainder)
    with pytest.raises(ValueError, match="apart"):
        native.split_master(param, param.view(np.uint16), master)
