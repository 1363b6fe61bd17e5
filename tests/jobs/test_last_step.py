"""Whatever ends a run, at any operation of its disk: the last completed step is there, and goes on with its bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerort.checkpoint import read_manifest, verify
from zerort.testing import run_threads

RUN = """
import os, signal, sys
import numpy as np
import zerort as zr
from zerort.engine.step.digest import digest_of
from zerort.errors import StorageError

NVME = zr.Tier.NVME
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
OPTIONS = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)

def train(where, group=None, note=lambda rank, updates: None):
    with zr.open(
        plan=EVERYTHING, group=group, optimizer=zr.AdamW(lr=0.1), scratch=f"{where}/scratch", create_scratch=True,
        offload=OPTIONS,
        last_step=f"{where}/last",
    ) as rt:
        unit = rt.register("unit", {"w": np.linspace(-1, 1, 5000, dtype=np.float32)})
        rt.resume()
        for number in range(rt.updates, 4):
            with unit.gathered() as p:
                gradient = p["w"] * np.float32(number + rt.rank)
            unit.reduce({"w": gradient})
            rt.step()
            note(rt.rank, rt.updates)
        return digest_of(rt.context, rt.units)
"""

EVERY = (
    RUN
    + """
from zerort.checkpoint import exists, read_manifest, verify
from zerort.storage.files.faults import injected
from zerort.testing import run_threads

where, ranks, stride = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SURVIVED, RAISED = 0, 3

def in_child(run, fault=""):
    \"\"\"Train in a process of its own; return how it ended, the last step that it completed, and its digest.\"\"\"
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with injected(fault):
                note = lambda rank, updates: os.write(there, f"{updates}\\n".encode())
                digests = run_threads(ranks, lambda group: train(run, group, note))
            os.write(there, f"{digests[0]}\\n".encode())
            code = SURVIVED
        except StorageError:
            code = RAISED
        finally:
            os._exit(code)
    os.close(there)
    with open(here) as told:
        lines = told.read().split()
    status = os.waitpid(child, 0)[1]
    how = "killed" if status == signal.SIGKILL else os.waitstatus_to_exitcode(status)
    digest = lines.pop() if how == SURVIVED else ""
    return how, max(map(int, lines), default=0), digest

how, _, digest = in_child(f"{where}/undisturbed")
assert how == SURVIVED
ends = []
for kind in ("kill@{}", "eio@{}:times=all", "enospc@{}:times=all"):
    number, how = stride, ""
    while how != SURVIVED:
        run = f"{where}/{len(ends)}"
        how, completed, _ = in_child(run, f"{kind.format(number)}:file=-r{ranks - 1}-")
        assert how in (SURVIVED, "killed" if "kill" in kind else RAISED), (kind, number, how)
        kept = read_manifest(f"{run}/last").meta["updates"] if exists(f"{run}/last") else 0
        assert kept == completed, (kind, number, kept, completed)
        assert not kept or verify(f"{run}/last") == []
        if how != SURVIVED:
            assert in_child(run)[::2] == (SURVIVED, digest), (kind, number)
        assert os.listdir(f"{run}/scratch") == []
        number += stride
        ends.append(how)
print(len(ends), "points")
assert ends.count("killed") >= 2 and ends.count(RAISED) >= 2
"""
)


@pytest.mark.parametrize(("ranks", "stride"), [(1, 75), (2, 35)])
def test_a_fault_at_any_operation_costs_one_step(tmp_path: Path, ranks: int, stride: int) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", EVERY, tmp_path, str(ranks), str(stride)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "points" in answer.stdout


def test_a_rank_of_a_real_job_is_killed_in_an_update(tmp_path: Path, job) -> None:
    names: dict = {}
    exec(RUN, names)
    digests = run_threads(2, lambda group: names["train"](tmp_path / "undisturbed", group))
    code = RUN + 'say("digest", train(sys.argv[1]))'
    killed = job(2, code, args=[tmp_path / "run"], env={"ZERORT_FAULT": "kill@70:file=-r1-"})
    assert killed.code not in (0, 124), killed.output
    assert 1 <= read_manifest(tmp_path / "run" / "last").meta["updates"] <= 3
    assert verify(tmp_path / "run" / "last") == []
    again = job(2, code, args=[tmp_path / "run"])
    assert [line.split()[1] for line in again.output.splitlines() if "digest" in line] == digests, again.output
    assert list((tmp_path / "run" / "scratch").iterdir()) == []
