"""Ranks under pytest, with torch on one thread each; see `zerort.testing.pytest_ranks`.

Run with ``python -m zerort.testing 1 2 3 4 -- tests/torch``.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))  # models.py, training.py: shared by the tests here
torch.set_num_threads(1)
WITH_MEMORY = (3,) if os.environ.get("ZERORT_EVERY") else (1, 3)
"""Numbers of ranks at which shared memory will do."""


@pytest.fixture(scope="session", params=["node", "mpi"])
def group(request, options):  # noqa: F811 (the fixture that was imported)
    """Ranks that share memory, and ranks that do not: there gathered units come and go."""
    if request.param == "mpi" and MPI.COMM_WORLD.size in WITH_MEMORY:
        pytest.skip("without shared memory at 2 and 4 ranks; at 1 in make test-torch")
    with open_group(kind=request.param, options=options) as found:
        yield found


@pytest.fixture(scope="session")
def node(options):  # noqa: F811
    """Ranks that share memory."""
    with open_group(kind="node", options=options) as found:
        yield found


@pytest.fixture
def rt(options):  # noqa: F811
    """A runtime over ranks that share no memory, unless a file has one of its own."""
    with (
        open_group(kind="mpi", options=options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as found,
    ):
        yield found


@pytest.fixture(params=["mpi", "hierarchical", "nvme", "nvme in one memory", "nvme on hosts"])
def rt_anywhere(request, options, tmp_path):  # noqa: F811
    """A runtime over ranks that share no memory, that share some, and that share all with parameters on NVMe."""
    from differing import open_place  # here: it is beside this file

    with open_place(request.param, options, tmp_path) as found:
        yield found
