"""Shards cut anew while a run goes on, in processes of their own, over every transport."""

import resource
import tempfile

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.device.host import reserve
from zerort.errors import PlanError
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

MODEL = ByteModel(width=16, layers=1, context=8, heads=2)
TEXT = ByteText(rows=32, context=8, limit=20_000)
NVME = zr.Tier.NVME
STEPS = 6


@pytest.fixture(autouse=True)
def reserved(monkeypatch):
    """Give small arrays what large ones have: addresses of their own, in which values stay."""
    monkeypatch.setattr(reserve, "LEAST_NBYTES", 1)


def open_kind(kind, options):
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    return Group(best_transport(WORLD, name="hosts", options=options, kind=kind, machine=machine))


def digests(group, plan, *, changes, scratch=None):
    """Train, with a new cut before some of the steps; return every step's digest."""
    offload = zr.OffloadOptions(chunk_nbytes=16384, threads=2)
    with zr.open(
        plan, zr.AdamW(lr=1e-2), group=group, virtual_shards=8, clip_norm=0.8, scratch=scratch, offload=offload
    ) as rt:
        walk, lot = Walk(rt, MODEL, TEXT, dtype="bfloat16"), np.random.default_rng(group.size)
        for _ in range(STEPS):
            if changes and lot.random() < 0.7:
                weights = lot.integers(0, 4, rt.size)
                rt.rebalance(shard_weights=weights if weights.any() else None)
            walk.train(1)
        return [report.digest for report in walk.reports]


DISK = zr.Plan.zero(3, parameter=NVME, state=NVME)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("node", zr.Plan.zero(1)),
        ("node", DISK),
        ("mpi", zr.Plan.zero(3)),
        ("hierarchical", zr.Plan.zero(3, state=NVME)),
    ],
    ids=["node-zero1", "node-disk", "over-mpi-zero3", "hierarchical-state"],
)
def test_cuts_that_change_give_the_bits_of_one_that_never_did(options, kind, plan):
    with open_group(kind="solo") as solo:
        expected = digests(solo, zr.Plan.zero(0), changes=False)
    with tempfile.TemporaryDirectory() as mine, open_kind(kind, options) as group:
        assert digests(group, plan, changes=True, scratch=WORLD.bcast(mine)) == expected
        WORLD.Barrier()


def test_a_rank_without_memory_is_refused_on_all_before_anything_moves(options):
    """The last rank may not have as much as all of the state; the others could."""
    numel = 4 << 20
    with (
        open_group(kind="node", options=options) as group,
        zr.open(zr.Plan.zero(1), zr.Lion(lr=0.1), group=group) as rt,
    ):
        unit = rt.register("unit", {"w": zr.TensorSpec((numel,))})
        counts = unit.sections[0].partition.counts
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            if rt.rank == rt.size - 1:
                with open("/proc/self/status") as file:
                    held = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
                resource.setrlimit(resource.RLIMIT_DATA, ((held << 10) + (4 << 20), limits[1]))
            if rt.size > 1:
                with pytest.raises(PlanError, match=rf"memory that rank {rt.size - 1} may.*Nothing was moved"):
                    rt.rebalance(shard_weights=[0] * (rt.size - 1) + [1])
                assert unit.sections[0].partition.counts == counts
            else:
                assert rt.rebalance(shard_weights=[1]).nbytes == 0  # nothing moves: nothing is needed
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        done = rt.rebalance(shard_weights=[0] * (rt.size - 1) + [1])
        assert done.nbytes == 4 * sum(counts[:-1])
