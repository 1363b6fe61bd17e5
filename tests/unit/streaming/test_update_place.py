"""Where an update is faster: a pure choice, and what is measured for it."""

from __future__ import annotations

import numpy as np
import pytest

from zerort.device import HostDevice
from zerort.errors import CallError
from zerort.streaming.transfers import ArrayTransfer
from zerort.streaming.update_place import Speeds, Traffic, choose_place, measure

FAST = Speeds(copy_in=1e12, copy_out=1e12, host=1e12, device=1e12)


@pytest.mark.parametrize(
    ("slow", "host", "device"),
    [
        ({"copy_in": 1.0}, 8.0, 100.0),
        ({"copy_out": 1.0}, 4.0, 50.0),
        ({"host": 1.0}, 162.0, 0.0),
        ({"device": 1.0}, 0.0, 162.0),
    ],
)
def test_the_slowest_of_copies_and_computing_counts(slow, host, device):
    """Each speed slows down what uses it, and nothing else."""
    traffic = Traffic(host_read=100, host_written=50, device_read=4, device_written=8)
    speeds = {name: getattr(FAST, name) for name in ("copy_in", "copy_out", "host", "device")}
    found = choose_place(traffic, Speeds(**{**speeds, **slow}))
    assert (found.host, found.device) == pytest.approx((host, device), abs=1e-6)
    assert found.place == ("device" if device < host else "host")


def test_equal_is_the_device():
    assert choose_place(Traffic(host_read=0, host_written=0, device_read=0, device_written=0), FAST).place == "device"


def test_traffic_is_what_hops_say():
    values = np.zeros(10, np.float32)
    chunks = [[ArrayTransfer(values), ArrayTransfer(values, read=False)], [ArrayTransfer(values, write=False)]]
    assert Traffic.of(chunks) == Traffic(host_read=80, host_written=80, device_read=0, device_written=0)
    assert Traffic.of(chunks).total == 160


def test_a_device_is_measured_once():
    with HostDevice("measured") as device:
        with pytest.raises(CallError, match=r"uint8, got float32\[2\]"):
            measure(device, pinned=np.zeros(2, np.float32))
        speeds = measure(device, pinned=np.zeros(100_000, np.uint8))
        assert min(speeds.copy_in, speeds.copy_out, speeds.host, speeds.device) > 0
        assert measure(device) is speeds
