"""Under a budget, what the ranks hold of the machine's memory stays within it: measured, not computed."""

import contextlib
import ctypes
import gc
import os
import threading

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.config.budget import BESIDES_NBYTES

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

MIB = 2**20
UNITS, NUMEL = 24, 2**19  # per rank, whatever their number
NBYTES = 16 * UNITS * NUMEL  # of parameters, gradients, master weights and moments per rank


def resident_nbytes():
    """Return what this process holds; a page that ranks share counts in parts."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


@contextlib.contextmanager
def watched():
    """Yield a list whose one entry is the most that this process has held in the block."""
    most, ended = [resident_nbytes()], threading.Event()

    def watch():
        while not ended.wait(0.01):
            most[0] = max(most[0], resident_nbytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def scratch(tmp_path):
    where = WORLD.bcast(str(tmp_path))
    yield where
    WORLD.Barrier()
    assert os.listdir(where) == []


@pytest.mark.parametrize("share", [0.75, 0.25])
def test_peak_memory_stays_within_the_budget(options, scratch, share):
    if WORLD.size > 4:
        pytest.skip("1 to 4 ranks")
    specs = {f"unit{at}": {"w": zr.TensorSpec((WORLD.size, NUMEL), "bfloat16")} for at in range(UNITS)}
    gradient = np.full((WORLD.size, NUMEL), 0.5, zr.native.BFLOAT16)
    budget = zr.Plan.fit(host=int(share * NBYTES), nvme=2 * NBYTES)
    with open_group(kind="node", options=options) as group:
        gc.collect()  # what a test before this one has used is not ours
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_nbytes()
        with watched() as most, zr.open(plan=budget, group=group, scratch=scratch) as rt:
            rt.expect(specs)
            units = [rt.register(name, tensors) for name, tensors in specs.items()]
            for _ in range(2):
                for unit in units:
                    with unit.gathered() as p:
                        assert p["w"].shape == gradient.shape
                for unit in reversed(units):
                    unit.reduce({"w": gradient})
                assert rt.step().updated
            memory = rt.memory()
        mine = memory.resting + memory.buckets + memory.gathered + memory.streaming
        assert mine <= budget.memory
        assert memory.resting + memory.nvme == NBYTES
        grown = WORLD.allreduce(most[0] - before)
    assert grown <= WORLD.size * (budget.memory + BESIDES_NBYTES), f"{grown / MIB:.0f} MiB, {memory}"
    assert grown >= 0.5 * WORLD.size * budget.memory  # else nothing was measured
