"""All stores hold the contract."""

from __future__ import annotations

import pytest

from zerort.storage.stores.nvme import NvmeOptions, NvmeStore
from zerort.storage.stores.striped import StripedStore
from zerort.testing.contracts.store import StoreContract
from zerort.testing.memory_store import MemoryStore


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


class TestStripedStore(StoreContract):
    @pytest.fixture(params=["even", "uneven", "one"])
    def store(self, tmp_path, request):
        weights = {"even": [1, 1], "uneven": [3, 1, 0.5], "one": [1]}[request.param]
        members = [NvmeStore(tmp_path / str(at), name=f"disk{at}") for at in range(len(weights))]
        with StripedStore(members, weights=weights, unit_nbytes=512 * 1024) as store:
            yield store
        assert [list(one.iterdir()) for one in tmp_path.iterdir()] == [[]] * len(weights)


class TestStripedMemory(StoreContract):
    """Units that fall on no boundary of anything."""

    @pytest.fixture
    def store(self):
        with StripedStore([MemoryStore(name="a"), MemoryStore(name="b")], weights=[1, 5], unit_nbytes=50_001) as store:
            yield store
