"""A part of the tests that fails does not stop the others, and the end says which it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerort.native.rendezvous import is_alive

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
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("== 1 ranks", "== 2 ranks", "== 3 ranks")] == [
        "== 1 ranks",
        "== 2 ranks",
        "== 3 ranks",
    ]
    assert lines[-1] == "== failed: 1 ranks (exit code 1), 2 ranks (exit code 1); of sizes 1 2 3"


def test_a_suite_that_is_ended_leaves_no_rank_behind(tmp_path):
    suite, started = tmp_path / "test_suite.py", tmp_path / "started"
    suite.write_text(
        "import os, time, pathlib\n\ndef test_long():\n"
        f"    pathlib.Path({str(started)!r}, str(os.getpid())).touch()\n    time.sleep(600)\n"
    )
    started.mkdir()
    words = [sys.executable, "-m", "zerort.testing", "2", "--", "-p", "no:hypothesispytest", str(suite)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(ranks := [int(one.name) for one in started.iterdir()]) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(map(is_alive, ranks))


FAKE = """#!/bin/sh
shift
part=$(echo "$*" | tr ' ' +)
echo "part $part"
case " $STUCK " in *" $part "*) echo $$ > pid-$part; exec sleep 1000 ;; esac
case " $BROKEN " in *" $part "*) exit 1 ;; esac
"""


@pytest.fixture
def make_test(tmp_path):
    """Start `make test` with a make in make's place that only says what it was asked for."""
    fake = tmp_path / "make"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    makefile = tmp_path / "Makefile"
    makefile.write_text((ROOT / "Makefile").read_text())
    given = (f"MAKE={fake}", "MPI=mpich", "VENV=env", "CUDA=")
    words = ["make", "--no-print-directory", "test", *given, "-o", "env/.torch"]
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / ".torch").touch()
    # Of the make that runs this test; what was said to it on its command line is in the environment, too.
    outer = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MPI", "VENV", "SIZES", "LIMIT", "ONLY", "MARK")
    clean = {name: value for name, value in os.environ.items() if name not in outer}

    def start(**environment):
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=clean | environment,
            start_new_session=True,
        )

    return start


@pytest.mark.parametrize("broken", ["", "lint", "types test-jobs+ONLY=waiting test-ranks+SIZES=8 test-ranks+SIZES=1"])
def test_every_part_of_make_test_runs_and_all_that_failed_are_listed(make_test, broken):
    with make_test(BROKEN=broken) as process:
        output, _ = process.communicate(timeout=280)
    lines = [line for line in output.splitlines() if not line.startswith("make: *** ")]
    parts = [line.removeprefix("part ") for line in lines if line.startswith("part ")]
    assert sorted(parts) == sorted(  # each once, though two strands take them
        [
            *("lint", "contracts", "types", "test-unit", "test-cuda-alone", "test-torch-jobs", "test-cpu"),
            *("test-jobs+ONLY=others", "test-jobs+ONLY=waiting"),
            *(f"test-ranks+SIZES={size}" for size in (1, 2, 3, 8)),
            "test-ranks+SIZES=4+MARK=smoke",
            *(f"test-torch-ranks+SIZES={size}" for size in (1, 2, 3)),
            *(f"test-cuda-ranks+SIZES={size}" for size in (1, 2, 3, 4)),
        ]
    )
    assert bool(process.returncode) == bool(broken), output
    told = lines[-1].replace(" SIZES=", "+SIZES=").replace(" ONLY=", "+ONLY=")
    if broken:  # in the order in which they failed
        assert sorted(told.removeprefix("*** FAILED with mpich: ").split()) == sorted(broken.split())
    else:
        assert told == "All of make test passed with mpich."


def test_an_interrupt_ends_what_runs_beside_too(make_test, tmp_path):
    stuck = ["test-jobs+ONLY=others", "test-jobs+ONLY=waiting", "test-torch-ranks+SIZES=3"]  # which run first
    notes = [tmp_path / f"pid-{part}" for part in stuck]
    with make_test(STUCK=" ".join(stuck)) as process:
        while not all(note.exists() and note.read_text().strip() for note in notes):
            assert process.poll() is None
            time.sleep(0.01)
        pids = [int(note.read_text()) for note in notes]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.wait(timeout=280)
    assert process.returncode != 0
    until = time.monotonic() + 60
    while running := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > until:
            os.kill(running[0], signal.SIGKILL)
            pytest.fail("it runs on")
        time.sleep(0.01)
