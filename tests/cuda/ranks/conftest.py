"""Ranks with a GPU each under pytest; see `zerort.testing.pytest_ranks`."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent))  # gpu_runs.py


@pytest.fixture(scope="module")
def gpus(options):  # noqa: F811 (pytest's way to ask for it)
    """A group with a GPU for each rank."""
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture(scope="module")
def gpus_of_two_hosts(options):  # noqa: F811
    """The same, as if every other rank were on another host."""
    from mpi4py import MPI

    from zerort.comm.transports.nccl.opening import open_on_gpus

    world = MPI.COMM_WORLD
    hosts = [rank % 2 for rank in range(world.size)]
    machine = world.Split(hosts[world.rank], world.rank)
    host = best_transport(world, name="hosts", options=options, kind="hierarchical", machine=machine)
    with Group(open_on_gpus(host, local_rank=world.rank, hosts=hosts, device=None)) as group:
        yield group


@pytest.fixture
def shared_tmp_path():
    """One directory for all ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    where = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    yield Path(where)
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(where)
