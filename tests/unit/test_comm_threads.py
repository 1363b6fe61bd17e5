"""The contract of groups, kept by ranks that are threads and by a group of one."""

import pytest

from zerort.comm import open_group
from zerort.testing import run_threads
from zerort.testing.group_contract import GroupContract


class TestSolo(GroupContract):
    @pytest.fixture()
    def on_ranks(self):
        def run(body):
            with open_group(kind="solo") as group:
                body(group)

        return run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8], scope="class")
class TestThreads(GroupContract):
    @pytest.fixture()
    def on_ranks(self, size):
        return lambda body: run_threads(size, body)
