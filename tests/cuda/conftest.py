"""Tests of the GPU path: here those of one process, in `ranks` those of several (`python -m zerort.testing`).

They run on the emulated device of `tests/cusim`, and every test fails if that saw a race, an access out of bounds or
NCCL calls that differ, also if its results were right. ``CUSIM=0`` runs them on real GPUs.
"""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # nvrtc.py; cusim

EMULATED = os.environ.get("CUSIM") != "0"
if EMULATED:
    import cusim

    os.environ.setdefault("CUSIM_DEVICES", "4")
    os.environ.setdefault("CUSIM_MEM_MB", "512")
    os.environ.setdefault("CUSIM_DELAY_US", "200")
    cusim.start()


@pytest.fixture(autouse=True)
def nothing_is_found():
    """Fail a test in which the emulated device found something wrong."""
    if not EMULATED:
        yield
        return
    cusim.clear()
    yield
    import cupy

    for number in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(number):
            cupy.cuda.runtime.deviceSynchronize()
    found = cusim.findings()
    cusim.clear()
    assert not found, found
