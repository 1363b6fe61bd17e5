"""Tied parameters on GPUs: gradients rest there, on the host, or on a disk."""

import pytest

pytest.importorskip("cupy")

from mpi4py import MPI

from zerort.comm import open_group
from zerort.testing.contracts.ties import TiesContract

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="at most 3 ranks")]


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture
def scratch(shared_tmp_path):
    return shared_tmp_path


class TestOnGpus(TiesContract):
    orders = TiesContract.orders[::5]  # the first and the last
