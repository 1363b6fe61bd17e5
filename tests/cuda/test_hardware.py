"""The tests of the GPU path run on real GPUs, too: where there is none, each says so, and none fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_without_the_emulator_and_without_a_gpu_every_test_is_skipped_with_a_reason():
    env = {**os.environ, "CUSIM": "0", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(HERE)]
    done = subprocess.run(words, env=env, cwd=HERE, capture_output=True, text=True, timeout=300, check=False)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert re.fullmatch(r"\d{3,} skipped in .*", last), last
    assert "needs a GPU, found 0" in done.stdout


def test_only_one_place_knows_the_emulator():
    """A test that looks for it by itself would take a real GPU for the emulated one, and lose it."""
    known = {
        path.name
        for path in HERE.rglob("*.py")
        if re.search(r"\bimport cusim\b|[\"']cusim[\"']|environ.*[\"']CUSIM[\"']", path.read_text())
    }
    assert known == {"conftest.py", "hardware.py", "gpu_jobs.py", "test_hardware.py"}  # conftest.py: where it lies
