"""A part of the tests that fails does not stop the others, and the end says which it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest
from mpi4py import MPI

@pytest.mark.mpi
def test_one():
    assert MPI.COMM_WORLD.size == 3
"""


def test_every_size_runs_and_all_that_failed_are_listed(tmp_path):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    words = [sys.executable, "-m", "zerort.testing", "1", "2", "3", "--", "-p", "no:hypothesispytest", str(suite)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("== 1 ranks", "== 2 ranks", "== 3 ranks")] == [
        "== 1 ranks",
        "== 2 ranks",
        "== 3 ranks",
    ]
    assert lines[-1] == "== failed: 1 ranks (exit code 1), 2 ranks (exit code 1); of sizes 1 2 3"


FAKE = """#!/bin/sh
for word; do part=$word; done
echo "part $part"
case " $BROKEN " in *" $part "*) exit 1 ;; esac
"""


@pytest.mark.parametrize("broken", ["", "lint", "types test-ranks test-cpu"])
def test_every_part_of_make_test_runs_and_all_that_failed_are_listed(broken, tmp_path):
    """With a make in make's place that only says what it was asked for."""
    fake = tmp_path / "make"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    makefile = tmp_path / "Makefile"
    makefile.write_text((ROOT / "Makefile").read_text())
    words = ["make", "test", f"MAKE={fake}", "VENV=env", "CUDA=", "-o", "env/.torch"]
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / ".torch").touch()
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"BROKEN": broken},
    )
    lines = done.stdout.splitlines()
    parts = {line.removeprefix("part ") for line in lines if line.startswith("part ")}
    assert parts == {
        *("lint", "contracts", "types", "test-unit", "test-cuda-alone", "test-jobs"),
        *("test-ranks", "test-torch", "test-cuda-ranks", "test-cpu"),
    }
    assert bool(done.returncode) == bool(broken), done.stdout + done.stderr
    assert lines[-1] == (f"*** FAILED with mpich: {broken}" if broken else "All of make test passed with mpich.")
