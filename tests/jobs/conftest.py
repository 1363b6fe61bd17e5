"""Jobs: scripts that tests start under mpirun in child processes, because they end, hang or break on purpose."""

import os
import signal
import tempfile
import textwrap

import pytest

from zerort.comm.bootstrap.leftovers import abandoned, sees_every_process
from zerort.testing import run_job

# Started in the background of a script, this process ignores Ctrl-C, and so would the jobs that are to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as under nohup

PRELUDE = """
import json, os, signal, sys, time
import numpy as np
import zerort as zr
from zerort.errors import *

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def open_gate(name):
    open(f"{__file__}-gate-{name}", "w").close()

def wait_for_gates(*names):
    while not all(os.path.exists(f"{__file__}-gate-{name}") for name in names):
        time.sleep(0.01)
"""


def expect_nothing_of_mpi(result):
    """No job leaves MPI's own shared memory behind. A killed one cannot help it: that is what the next one sweeps."""
    if result.code in (0, 1, 3, 130):  # ended by itself, or by us
        assert not result.left, result.output
    elif result.left and sees_every_process():
        assert set(result.left) <= set(abandoned("/dev/shm", settled=-1.0)), result.left
        for path in result.left:
            os.unlink(path)


@pytest.fixture
def shared_memory():
    """A directory in memory for the ranks' windows. However a job ends, nothing of ours stays in it."""
    with tempfile.TemporaryDirectory(prefix="zerort-jobs-", dir="/dev/shm") as directory:
        yield directory
        assert not os.listdir(directory)


@pytest.fixture
def script(tmp_path):
    """Write a script, with the usual imports before it, and return its path."""

    def write(code):
        path = tmp_path / "job.py"
        path.write_text(PRELUDE + textwrap.dedent(code))
        return path

    return write


@pytest.fixture
def job(tmp_path, script, shared_memory):
    """Run a script on some ranks: ``job(4, '''group = zr.open_group() …''')``."""

    def run(ranks, code, *, timeout=120.0, env=None, args=()):
        flights = str(tmp_path / "flights")
        environment = {"ZERORT_FLIGHT_DIR": flights, "ZERORT_SHM_DIR": shared_memory, **(env or {})}
        result = run_job(ranks, [script(code), *args], timeout=timeout, env=environment, cwd=tmp_path)
        expect_nothing_of_mpi(result)
        return result

    return run
