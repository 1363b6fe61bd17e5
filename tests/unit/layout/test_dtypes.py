"""Item sizes agree with NumPy and ml_dtypes; unknown names are refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from zerort.errors import CallError
from zerort.layout import ITEMSIZES, itemsize


@pytest.mark.parametrize("name", ITEMSIZES)
def test_sizes_are_those_of_numpy_and_ml_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert itemsize(name) == dtype.itemsize
    assert str(dtype) == name


@pytest.mark.parametrize("bad", ["float31", "", None, np.dtype("float32"), np.float32, ["float32"]])
def test_anything_else_is_refused_with_the_known_names(bad: object) -> None:
    with pytest.raises(
        CallError, match=r"^Expected the name of a dtype out of .*bfloat16.*; got .*str\(array\.dtype\)"
    ):
        itemsize(bad)  # type: ignore[arg-type]
