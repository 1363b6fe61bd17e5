"""A kill in the middle of a rebalance costs nothing of what `last_step` promises: the last step is there, whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = """
import contextlib, os, signal, sys
import numpy as np
import zerort as zr
from zerort.checkpoint import read_manifest, verify
from zerort.storage.files.faults import injected
from zerort.testing import run_threads

NVME = zr.Tier.NVME
EVERYTHING = zr.Plan.zero(3, parameter=NVME, state=NVME)

def train(where, group, fault):
    with zr.open(
        EVERYTHING, zr.AdamW(lr=0.1), group=group, virtual_shards=2, scratch=f"{where}/scratch", create_scratch=True,
        offload=zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0), last_step=f"{where}/last",
    ) as rt:
        units = [rt.register(f"unit{at}", {"w": np.linspace(-1, 1, 9000, dtype=np.float32)}) for at in range(2)]
        rt.resume()
        for number in range(rt.updates, 4):
            if number == 2:
                group.barrier().wait()
                with injected(fault) if rt.rank == 0 else contextlib.nullcontext():  # of the whole process
                    group.barrier().wait()
                    rt.rebalance(shard_weights=[1, 4])
                    group.barrier().wait()
            for at, unit in enumerate(units):
                with unit.gathered() as p:
                    gradient = p["w"] * np.float32(number + rt.rank + at)
                unit.reduce({"w": gradient})
            digest = rt.step().digest
        return digest

def in_child(where, fault=""):
    \"\"\"Train in a process of its own; return how it ended, and its digest.\"\"\"
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            digests = run_threads(2, lambda group: train(where, group, fault))
            os.write(there, digests[0].encode())
        finally:
            os._exit(0)
    os.close(there)
    with open(here) as told:
        digest = told.read()
    return os.waitpid(child, 0)[1], digest

where = sys.argv[1]
_, digest = in_child(f"{where}/undisturbed")
assert digest
killed = 0
for number in (5, 40):
    run = f"{where}/{number}"
    status, _ = in_child(run, f"kill@{number}")
    killed += status == signal.SIGKILL
    assert read_manifest(f"{run}/last").meta["updates"] == 2
    assert verify(f"{run}/last") == []
    assert in_child(run) == (0, digest), number
    assert os.listdir(f"{run}/scratch") == []
print(killed, "killed")
assert killed == 2
"""


def test_a_kill_in_the_middle_costs_nothing_of_the_last_step(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path], capture_output=True, text=True, check=False, timeout=280
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "killed" in answer.stdout
