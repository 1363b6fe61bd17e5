"""Tests of the GPU path: here those of one process, in `ranks` those of several (`python -m zerort.testing`).

They run on the emulated device of `tests/cusim`, and every test fails if that saw a race, an access out of bounds or
NCCL calls that differ, also if its results were right. ``CUSIM=0`` runs them on real GPUs: a test passes there, or is
skipped with the reason. Tests that make a GPU fault do so in a child process: a real one is of no use afterwards.
"""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from zerort.testing.jobs import run_job

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cusim")]  # hardware.py, gpu_jobs.py, nvrtc.py; cusim

import hardware  # noqa: E402

hardware.start()


def pytest_collection_modifyitems(items):
    """Skip what there are not enough GPUs for: a rank needs one."""
    if hardware.EMULATED:
        return
    found = hardware.count()
    ranks = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    if found < ranks:
        why = f"{ranks} ranks need {ranks} GPUs" if ranks > 1 else "needs a GPU"
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"{why}, found {found}"))


@pytest.fixture(autouse=True)
def nothing_is_found():
    """Fail a test in which the emulated device found something wrong."""
    if not hardware.EMULATED:
        yield
        return
    hardware.clear()
    yield
    import cupy

    for number in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(number):
            cupy.cuda.runtime.deviceSynchronize()
    found = hardware.findings()
    hardware.clear()
    assert not found, found


@pytest.fixture
def job(tmp_path):
    """Run a script, in one piece or several, on some ranks, each with a GPU."""
    from gpu_jobs import PRELUDE

    def run(ranks, *code, timeout=120.0, **settings):
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + "".join(map(textwrap.dedent, code)))
        env = hardware.environment(**{"devices": ranks, **settings})
        env |= {"ZERORT_FLIGHT_DIR": str(tmp_path / "flights"), "PYTHONWARNINGS": "default"}
        return run_job(ranks, [script], timeout=timeout, env=env, cwd=tmp_path)

    return run
