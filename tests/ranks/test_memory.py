"""What shared memory costs a machine, measured as the sum of the ranks' proportional set sizes."""

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.errors import RankFailedError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

NBYTES = 48 * 2**20


def machine_nbytes():
    """Return the bytes that all ranks hold together; a shared page counts once."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is measured lies where malloc has kept memory of earlier tests
    WORLD.Barrier()  # a page counts in parts only once every rank has touched it
    with open("/proc/self/smaps_rollup") as rollup:
        pss = next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    total = WORLD.allreduce(pss)
    WORLD.Barrier()
    return total


@contextlib.contextmanager
def without_memory(*, here):
    """Let this process have no more memory than it has, but for a little, if it is ``here``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as pages:
        has = int(pages.read().split()[0]) * resource.getpagesize()
    if here:
        resource.setrlimit(resource.RLIMIT_AS, (has + NBYTES // 4, before[1]))
    kept = []  # all that malloc has left of tests before this one
    with contextlib.suppress(MemoryError):
        while here:
            kept.append(np.empty(NBYTES, np.uint8))
    try:
        yield
    finally:
        kept.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_reduced_gradients_that_do_not_fit_on_one_rank_fail_on_all(options):
    """Nobody waits for the rank that has no memory left, and the run goes on."""
    with (
        open_group(options=options) as group,
        zr.open(plan=zr.Plan.zero(0), optimizer=zr.SGD(lr=0.1), group=group) as rt,
    ):
        gradient = np.ones(NBYTES // 4, np.float32)
        line = rt.register("line", {"w": np.zeros_like(gradient)})
        line.reduce({"w": gradient})
        assert line.reduced_gradients()["w"][0] == 1.0  # memory that is given back in the background is, from here on
        with pytest.raises((MemoryError, RankFailedError), match="Unable to allocate"):  # noqa: SIM117
            with without_memory(here=group.rank == group.size - 1):
                line.reduced_gradients()
        assert line.reduced_gradients()["w"][-1] == 1.0
        assert rt.step().updated


def test_a_shared_gather_costs_the_machine_its_bytes_once(options):
    with open_group(kind="node", options=options) as group:
        counts = [NBYTES // 4 // group.size] * group.size
        before = machine_nbytes()
        shards = group.zeros_shared(counts, "float32")
        shards.mine[:] = group.rank
        group.all_gather(shards.mine, out=shards.full).wait()
        assert shards.full.sum() == sum(range(group.size)) * counts[0]  # every rank has read all of it
        shared = machine_nbytes() - before
        copy = group.all_gather(shards.mine).wait()
        copied = machine_nbytes() - before - shared
        own = 2**21 * group.size  # what each rank's allocator and stacks take besides
        assert 0.95 * NBYTES < shared < 1.1 * NBYTES + own
        assert 0.95 * NBYTES * group.size < copied < 1.1 * NBYTES * group.size + own
        assert copy.nbytes == shards.full.nbytes == sum(counts) * 4


def test_freed_windows_go_back_to_the_machine(options):
    with open_group(kind="node", options=options) as group:
        before = machine_nbytes()
        for _ in range(5):
            array = group.zeros(NBYTES // 4, "float32")
            array[:] = 1
            group.barrier().wait()
            group.free(array)
            del array
        assert machine_nbytes() - before < 0.2 * NBYTES


def test_a_group_holds_little(options):
    """Opening and closing groups over and over leaves nothing behind."""
    for _ in range(3):
        open_group(kind="node", options=options).close()
    before = machine_nbytes()
    for _ in range(10):
        with open_group(kind="node", options=options) as group:
            group.all_reduce(np.ones(4)).wait()
    assert machine_nbytes() - before < 2**21 * WORLD.size


def mapped_nbytes():
    """Bytes of windows that this process has mapped."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "/dev/shm/#" in line]  # without names
    return sum(int(last, 16) - int(first, 16) for first, last in spans)


def test_closed_parts_give_their_windows_back(options):
    with open_group(kind="node", options=options) as group:
        group.split(0).close()
        before = mapped_nbytes()
        for _ in range(20):
            group.split(0).close()
        assert mapped_nbytes() - before <= 2 * options.staging_nbytes * group.size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_closed_runtimes_give_their_windows_back(options, stage):
    with open_group(kind="node", options=options) as group:
        sizes = []
        for _ in range(4):
            with zr.open(plan=zr.Plan.zero(stage), group=group) as rt:
                units = [rt.register(name, {"w": zr.TensorSpec((1 << 18,))}) for name in "abc"]
                for unit in units:
                    unit.reduce({"w": np.ones(1 << 18, np.float32)})
                rt.step()
                held = mapped_nbytes()
            del unit, units, rt
            sizes.append(mapped_nbytes())
            assert held - sizes[-1] >= 3 << 20
        assert sizes == sizes[:1] * 4
