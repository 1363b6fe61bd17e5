"""``kill -9`` in the middle of offloaded work: the next run cleans up what the dead ranks left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zerort.storage import NvmeStore

WORK = """
from zerort.storage import NvmeStore; from zerort.streaming import StoreTransfer, Pipeline, slot_nbytes_of

group = zr.open_group()
store = NvmeStore(sys.argv[1], rank=group.rank)
say("rank", group.rank, "cleaned", len(store.cleaned))
group.barrier().wait()
store.create("value", 4_000_000)
store.write("value", np.ones(1_000_000, "float32"))
chunks = [[StoreTransfer(store=store, name="value", numel=100_000, offset=k * 400_000)] for k in range(10)]
with Pipeline(slot_nbytes=slot_nbytes_of(chunks)) as pipeline:
    for step in range(3):
        pipeline.run(chunks, lambda number, x: x.__iadd__(1))
assert (store.read("value", np.empty(1_000_000, "float32")).wait() == 4).all()
store.close()
say("rank", group.rank, "done")
group.close()
"""


def test_a_killed_job_leaves_what_the_next_one_cleans_up(tmp_path: Path, job) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "precious.chunk").write_text("mine")
    # Somebody else's run on the same disk, alive all the while.
    neighbour = NvmeStore(scratch, rank=0)
    neighbour.create("a", 5000)
    killed = job(3, WORK, args=[scratch], env={"ZERORT_FAULT": "kill@25:rank=1"})
    assert killed.code not in (0, 124), killed.output
    assert "rank 1 done" not in killed.output
    left = set(os.listdir(scratch)) - {"precious.chunk", os.path.basename(neighbour.path)}
    assert any("-r1-" in name for name in left), left
    again = job(3, WORK, args=[scratch])
    assert again.code == 0, again.output
    assert again.output.count("done") == 3
    cleaned = sum(int(line.split()[-1]) for line in again.output.splitlines() if "cleaned" in line)
    assert cleaned == len(left)
    assert set(os.listdir(scratch)) == {"precious.chunk", os.path.basename(neighbour.path)}
    assert os.listdir(neighbour.path) == ["a.chunk"]
    neighbour.close()
    assert os.listdir(scratch) == ["precious.chunk"]


EVERY = """
import os, signal, sys
import numpy as np
from zerort.storage import NvmeStore; from zerort.streaming import StoreTransfer, Pipeline, slot_nbytes_of
from zerort.storage.files.faults import injected

def work(number):
    with injected(f"kill@{number}"), NvmeStore(sys.argv[1]) as store:
        store.create("a", 400_000)
        store.create("b", 400_000)
        chunks = [
            [StoreTransfer(store=store, name=name, numel=50_000, offset=k * 200_000) for name in "ab"] for k in range(2)
        ]
        with Pipeline(slot_nbytes=2 * 200_704) as pipeline:
            pipeline.run(chunks, lambda number, *arrays: None)
        store.flush()

number, killed = 0, True
while killed:
    number += 1
    child = os.fork()
    if child == 0:
        work(number)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    killed = status != 0
    assert len(os.listdir(sys.argv[1])) == (2 if killed else 1), os.listdir(sys.argv[1])
    with NvmeStore(sys.argv[1]) as store:
        assert len(store.cleaned) == int(killed)
    assert os.listdir(sys.argv[1]) == ["mine.txt"]
print(number, "points")
assert number > 12
"""


def test_a_kill_at_any_operation_leaves_what_the_next_run_cleans_up(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    answer = subprocess.run(
        [sys.executable, "-c", EVERY, tmp_path], capture_output=True, text=True, check=False, timeout=60
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


ENDS = """
import os, signal, sys, threading
import numpy as np
from zerort.storage import NvmeStore; from zerort.streaming import StoreTransfer, Pipeline, slot_nbytes_of

with NvmeStore(sys.argv[1]) as store:
    store.create("value", 4_000_000)
    chunks = [[StoreTransfer(store=store, name="value", numel=100_000, offset=k * 400_000)] for k in range(10)]
    def compute(number, x):
        if number == 4:
            if sys.argv[2] == "error":
                raise ZeroDivisionError
            os.kill(os.getpid(), signal.SIGINT)
    with Pipeline(slot_nbytes=slot_nbytes_of(chunks)) as pipeline:
        pipeline.run(chunks, compute)
"""


def test_ctrl_c_and_errors_leave_nothing(tmp_path: Path) -> None:
    for how, name in (("error", "ZeroDivisionError"), ("ctrl-c", "KeyboardInterrupt")):
        answer = subprocess.run(
            [sys.executable, "-c", ENDS, tmp_path, how], capture_output=True, text=True, check=False, timeout=60
        )
        assert answer.returncode != 0
        assert name in answer.stderr
        assert "Warning" not in answer.stderr
        assert os.listdir(tmp_path) == []
