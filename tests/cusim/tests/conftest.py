"""Tests of the emulated device: CuPy is imported here, on it. Programs that end in a crash run in child processes."""

import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cusim

cusim.start()


@pytest.fixture(autouse=True)
def clean():
    """Each test starts without findings, and ends with all that it was to find taken: `found`."""
    cusim.clear()
    yield
    left = cusim.findings()
    cusim.clear()
    assert not left, left


@pytest.fixture
def found():
    """Wait for the devices and take the findings: ``[line] = found()``."""
    import cupy

    def take():
        for device in range(cupy.cuda.runtime.getDeviceCount()):
            # A finding may have left a fault behind.
            with cupy.cuda.Device(device), suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.deviceSynchronize()
        lines = cusim.findings()
        cusim.clear()
        return lines

    return take


@pytest.fixture
def program(tmp_path):
    """Run a program in a process of its own, or on some ranks: ``program('''…''', ranks=2, seed=3)``."""

    def run(code, *, ranks=None, timeout=120, **settings):
        script = tmp_path / "program.py"
        script.write_text("import cupy, numpy as np\nfrom cupy.cuda import runtime\n" + textwrap.dedent(code))
        command = [sys.executable, "-W", "ignore", str(script)]
        if ranks is not None:
            command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), *command]
        reports = tmp_path / "reports"
        reports.mkdir(exist_ok=True)
        env = cusim.environment(report=reports, devices=ranks or 2, **settings)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        done.findings = cusim.findings_in(reports)
        return done

    return run


@pytest.fixture
def pinned():
    """Make a pinned array: ``pinned(1000, "f")``."""
    import cupy
    import numpy as np

    def make(count, dtype):
        memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count)

    return make
