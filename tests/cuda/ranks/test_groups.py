"""The contract of groups, kept by NCCL with arrays on GPUs."""

import pytest

cupy = pytest.importorskip("cupy")

from zerort.comm import open_group  # noqa: E402
from zerort.testing.group_contract import GroupContract  # noqa: E402

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
        return cupy.asarray(array)
