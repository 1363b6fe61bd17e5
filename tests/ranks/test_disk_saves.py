"""Saves of what rests on disks, by real ranks: linked over several directories, after every step, whole again."""

import os
import shutil
import tempfile

import numpy as np
import pytest
from mpi4py import MPI
from runs import assert_same, weights

import zerort as zr
from zerort import trace
from zerort.checkpoint import read_manifest, verify
from zerort.comm import open_group
from zerort.errors import StorageError
from zerort.storage.files.faults import injected

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]

NVME = zr.Tier.NVME
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
NUMEL = 1_100_000  # alone, two units of a striped store


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="node", options=options) as group:
        yield group


@pytest.fixture
def where():
    """One directory for all ranks."""
    path = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield path
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(path)


def open_with_unit(group, plan=EVERYTHING, *, numel=NUMEL, **options):
    rt = zr.open(plan=plan, group=group, optimizer=zr.AdamW(lr=0.1), create_scratch=True, **options)
    rt.register("unit", {"w": np.linspace(-1, 1, numel, dtype=np.float32), "b": np.ones(7, np.float32)})
    return rt


def train(rt, numbers):
    unit = rt.units["unit"]
    for number in numbers:
        with unit.gathered() as p:
            gradients = {name: value * np.float32(number + rt.rank) for name, value in p.items()}
        unit.reduce(gradients)
        rt.step()


@pytest.mark.filterwarnings("ignore:.*leaves out")  # one of the directories, if the disk was slow for a moment
def test_a_striped_run_is_saved_without_a_copy_and_loads_anywhere(group, where):
    path = os.path.join(where, "checkpoint")
    with open_with_unit(group, scratch=[os.path.join(where, "a"), os.path.join(where, "b")]) as rt:
        train(rt, range(2))
        rt.context.update_stream.wait_written()  # the last update is written
        before = trace.counters()
        rt.save(path)
        moved = {name: count - before.get(name, 0) for name, count in trace.counters().items()}
        assert moved["checkpoint.written_nbytes"] == moved["offload.written_bytes"] == 0
        own = rt.units["unit"].sections[0].partition.of(rt.rank)
        assert moved["checkpoint.linked_nbytes"] == 3 * 4 * own.numel  # parameters and two moments
        group.barrier().wait()
        names = [file.name for file in read_manifest(path).files]
        assert all(os.stat(os.path.join(path, name)).st_nlink == 2 for name in names)
        group.barrier().wait()
        at_save = weights(rt)
        train(rt, [2])
        later = weights(rt)
        assert verify(path) == []
        rt.load(path)
        assert_same(weights(rt), at_save)
        train(rt, [2])
        assert_same(weights(rt), later)
    with open_with_unit(group, zr.Plan.zero(1)) as rt:
        rt.load(path)
        assert_same(weights(rt), at_save)
        train(rt, [2])
        assert_same(weights(rt), later)
    assert sorted(os.listdir(where)) == ["a", "b", "checkpoint"]
    assert os.listdir(os.path.join(where, "a")) == os.listdir(os.path.join(where, "b")) == []


@pytest.mark.parametrize(
    ("plan", "at"),
    [(EVERYTHING, 8), (zr.Plan.zero(1, state=NVME), 2)],  # each rank writes 8 and 4 chunks in a step, or more
    ids=["everything", "state"],
)
def test_a_disk_that_fails_under_one_rank_costs_all_of_them_one_step(group, where, plan, at):
    settings = {"numel": 9000, "scratch": os.path.join(where, "a"), "last_step": os.path.join(where, "last")}
    options = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)
    with open_with_unit(group, plan, offload=options, **settings) as rt:
        train(rt, range(2))
        group.barrier().wait()
        with injected(f"eio@{at}:op=write:times=all:file=-r{WORLD.size - 1}-"), pytest.raises(StorageError):
            train(rt, [2])
        assert rt.resume().updates == rt.updates == 2
        train(rt, range(2, 4))
        found = weights(rt)
    with open_with_unit(group, zr.Plan.zero(3), numel=9000) as rt:
        train(rt, range(4))
        assert_same(found, weights(rt))
    assert verify(settings["last_step"]) == []
