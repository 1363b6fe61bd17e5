"""The contracts of chunked arrays and parameters, in host memory and on a disk; ranks share memory, or do not."""

import dataclasses
import shutil
import tempfile
from collections import Counter

import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.host_memory import HostMemory
from zerort.storage.session import StorageSession
from zerort.testing.contracts.residence import ChunkedArrayContract, ParametersContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]


@pytest.fixture(scope="module", params=["node", "mpi"])
def backings(request, options):
    where = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    small = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)  # chunks of 2048 elements
    with open_group(kind=request.param, options=dataclasses.replace(options, timeout=60.0)) as group:
        host = HostMemory(group)
        storage = StorageSession(group, scratch=where, options=small, traffic=Counter(), host=host)
        yield Backings(group, host, storage)
        storage.close()
        host.close()
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(where)


class TestArrays(ChunkedArrayContract):
    pass


class TestParameters(ParametersContract):
    pass


class TestSecondCopies(ParametersContract):
    secondary = True
