"""Tests of the GPU path: here those of one process, in `ranks` those of several (`python -m zerort.testing`).

They run on the emulated device of `tests/cusim`, and every test fails if that saw a race, an access out of bounds or
NCCL calls that differ, also if its results were right. ``CUSIM=0`` runs them on real GPUs.
"""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from zerort.testing.jobs import run_job

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # gpu_jobs.py, nvrtc.py; cusim

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


@pytest.fixture
def job(tmp_path):
    """Run a script, in one piece or several, on some ranks, each with an emulated GPU."""
    from gpu_jobs import PRELUDE

    def run(ranks, *code, timeout=60.0, **settings):
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + "".join(map(textwrap.dedent, code)))
        env = cusim.environment(**{"devices": ranks, "mem_mb": 256, **settings})
        env |= {"ZERORT_FLIGHT_DIR": str(tmp_path / "flights"), "PYTHONWARNINGS": "default"}
        return run_job(ranks, [script], timeout=timeout, env=env, cwd=tmp_path)

    return run
