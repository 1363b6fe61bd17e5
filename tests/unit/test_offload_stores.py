"""All stores hold the contract."""

from __future__ import annotations

import pytest

from zerort.offload.memory import MemoryStore
from zerort.offload.nvme import NvmeOptions, NvmeStore
from zerort.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store


class TestNvmeStore(StoreContract):
    @pytest.fixture(params=["checked", "unchecked", "one thread", "buffered"])
    def store(self, tmp_path, request):
        options = {
            "checked": NvmeOptions(),
            "unchecked": NvmeOptions(checksum=False, block_nbytes=1024**2),
            "one thread": NvmeOptions(threads=1, block_nbytes=256 * 1024),
            "buffered": NvmeOptions(direct=False),
        }[request.param]
        with NvmeStore(tmp_path, options=options) as store:
            yield store
        assert list(tmp_path.iterdir()) == []
