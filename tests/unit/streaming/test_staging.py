"""Staging where nothing has to move: on the host. `tests/cuda` has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from zerort.device import HostDevice
from zerort.errors import ClosedError
from zerort.streaming import ArrayTransfer, Staging


@pytest.mark.parametrize("on", ["device", "host"])
def test_arrays_are_used_where_they_lie(on):
    values, sums = np.arange(10.0), np.zeros(2)
    chunks = [
        [ArrayTransfer(values[:5], write=False), ArrayTransfer(sums[:1])],
        [ArrayTransfer(values[5:], write=False), ArrayTransfer(sums[1:])],
    ]

    def compute(number, part, total):
        assert np.shares_memory(part, values)
        total[0] = part.sum() + number

    with HostDevice() as device, Staging(device, slot_nbytes=0) as staging:
        assert staging.run(chunks, compute, on=on).done()
        assert sums.tolist() == [10, 36]
        assert staging.nbytes == 0
        staging.finish()
    with pytest.raises(ClosedError):
        staging.run(chunks, compute, on=on)


def test_an_error_is_the_callers():
    done = []

    def compute(number, values):
        if number == 1:
            raise ZeroDivisionError
        done.append(number)

    with HostDevice() as device, Staging(device, slot_nbytes=0) as staging:
        with pytest.raises(ZeroDivisionError):
            staging.run([[ArrayTransfer(np.ones(1))] for _ in range(3)], compute, on="device")
        assert done == [0]
