"""The contracts of chunked arrays and parameters, in host memory and on a disk; ranks share memory, or do not."""

import shutil
import tempfile
from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.host_memory import HostMemory
from zerort.storage.session import StorageSession
from zerort.testing.contracts.residence import ChunkedArrayContract, ParametersContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]


@pytest.fixture(scope="module", params=["node", "mpi"])
def backings(request, options):
    where = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    small = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)  # chunks of 2048 elements
    with open_group(kind=request.param, options=options) as group:
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


@pytest.mark.parametrize("resident", [0, 1, 3], ids=["on a disk", "a chunk in memory", "in memory"])
def test_several_ranges_of_an_array_move_at_once(backings, resident):
    """Across cuts, and across the end of what is in memory: exactly their elements change."""
    cuts = (0, 2048, 4096, 5000)
    storage, memory = backings.storage, np.zeros(cuts[resident], np.float32)
    array = ChunkedArray(f"parts {resident}", cuts, memory, resident=resident, storage=storage)
    storage.prepare(array.offloaded_nbytes, what="parts")
    array.grain = 4096
    array.create()
    model = np.zeros(5000, np.float32)
    for number, parts in enumerate([[(1024, 2048), (3072, 5000)], [(0, 7), (2000, 2100), (4096, 4097)], []], 1):
        values = np.concatenate([np.arange(a, b, dtype=np.float32) + number for a, b in [*parts, (0, 0)]])
        array.write_parts(parts, values).wait()
        at = 0
        for first, last in parts:
            model[first:last] = values[at : at + last - first]
            at += last - first
        np.testing.assert_array_equal(array.read_parts(parts, np.empty_like(values)).wait(), values)
        np.testing.assert_array_equal(array.read(0, np.empty_like(model)).wait(), model)
    array.delete()


class TestParameters(ParametersContract):
    pass


class TestSecondCopies(ParametersContract):
    secondary = True
