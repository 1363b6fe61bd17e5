"""The contract of groups, kept by NCCL with arrays on GPUs."""

import pytest

pytest.importorskip("cupy")

from arrays import put

from zerort.comm import open_group
from zerort.testing.contracts.group import GroupContract

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="class")
def group(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


class TestNccl(GroupContract):
    @pytest.fixture
    def on_ranks(self, group):
        return lambda body: body(group)

    def put(self, array):
        return put(array)
