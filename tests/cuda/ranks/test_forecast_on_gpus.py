"""What is told before a run on GPUs is what is there in it: on the GPU, on its host, on a disk."""

import pytest

pytest.importorskip("cupy")

from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.testing.contracts.forecast import ForecastContract

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="2 ranks")]


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture
def scratch(shared_tmp_path):
    return shared_tmp_path


class TestOnGpus(ForecastContract):
    device = "cuda"


def test_updates_on_the_host_are_told_too(group, scratch):
    class OnTheHost(TestOnGpus):
        offload = zr.OffloadOptions(chunk_nbytes=8192, threads=1, update_on="host")

    expect_counted = OnTheHost().test_a_runtime_counts_what_was_told
    expect_counted(group, scratch, 2)
