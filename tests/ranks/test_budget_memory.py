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
        mine = memory.at_rest + memory.buckets + memory.gathered + memory.streaming
        assert mine <= budget.memory
        assert memory.at_rest + memory.nvme == NBYTES
        grown = WORLD.allreduce(most[0] - before)
    assert grown <= WORLD.size * (budget.memory + BESIDES_NBYTES), f"{grown / MIB:.0f} MiB, {memory}"
    assert grown >= 0.5 * WORLD.size * budget.memory  # else nothing was measured


def test_bytes_are_those_of_the_forecast_where_ranks_share_no_memory(options, scratch):
    specs = {f"unit{at}": {"w": zr.TensorSpec((9_000,), "bfloat16")} for at in range(12)}
    gradient = np.full(9_000, 0.5, zr.native.BFLOAT16)
    offload = zr.OffloadOptions(chunk_nbytes=8192, threads=1)
    settings = {"optimizer": zr.AdamW(lr=0.1), "offload": offload}
    whole = zr.forecast(specs, plan=zr.Plan.zero(3), size=WORLD.size, one_memory=WORLD.size == 1, **settings)
    for share in (1.0, 0.8):
        held = share * (whole.at_rest + whole.buckets + whole.gathered) + whole.streaming
        budget = zr.Plan.fit(host=int(held) + 80_000, nvme="1GiB")
        with open_group(kind="mpi", options=options) as group:
            with zr.open(plan=budget, group=group, scratch=scratch, **settings) as rt:
                rt.expect(specs)
                for name, tensors in specs.items():
                    rt.register(name, tensors).reduce({"w": gradient})
                assert rt.step().updated
                found = rt.memory()
            sharing = {"size": group.size, "rank": group.rank, "one_memory": group.one_memory}
        expected = zr.forecast(specs, plan=budget, **sharing, **settings)
        for part in ("parameter", "gradient", "state", "buckets", "gathered", "nvme"):
            assert getattr(found, part) == getattr(expected, part), (part, share)
