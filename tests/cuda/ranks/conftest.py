"""Ranks with a GPU each under pytest; see `zerort.testing.pytest_ranks`."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent))  # gpu_runs.py


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
