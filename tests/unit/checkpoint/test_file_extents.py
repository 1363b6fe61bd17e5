"""A save of values over several disks links what lies on the checkpoint's and writes the rest; any ranks load it."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np
import pytest
import seams

from zerort import trace
from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import FlatLayout, Partition
from zerort.storage import NvmeOptions, NvmeStore, StripedStore
from zerort.testing.memory_store import MemoryStore
from zerort.testing.threads import run_threads

LAYOUT = FlatLayout.build({"a": (400, 500), "b": (13,), "c": (301, 151), "d": (1,), "e": (400_001,)}, dtype="float32")
UNIT = 256 * 1024
OPTIONS = NvmeOptions(threads=2, direct=False)


class OneStore:
    """What a column asks of a runtime's tiers, over any store."""

    def __init__(self, store):
        self.store = store
        self.read, self.write = store.read, store.write

    def file_extents(self, name, directory):
        return self.store.file_extents(name, directory)


@pytest.fixture
def elsewhere():
    """A directory on another file system than the tests' own."""
    where = tempfile.mkdtemp(dir="/dev/shm")
    yield where
    shutil.rmtree(where)


def store_over(directories):
    members = [NvmeStore(one, name=str(at), options=OPTIONS) for at, one in enumerate(directories)]
    return StripedStore(members, unit_nbytes=UNIT)


def column_of(store, numel, *, resident):
    """Return a column of three chunks, each over several units, of which the first may be in memory."""
    cuts = (0, numel // 4096 * 1024, numel // 4096 * 3072, numel)
    column = ChunkedArray("v", cuts, np.zeros(cuts[resident], np.float32), resident=resident, storage=OneStore(store))
    column.create()
    return column


def content(numel, seed):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def loaded(path, ranks):
    """Return the flat values as other ranks read them."""

    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        mine = np.zeros(partition.counts[group.rank], np.float32)
        load(path, group, [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)])
        return mine

    return np.concatenate(run_threads(ranks, body))


def expected_of(flat):
    """Return what a load gives of flat values: tensors, and zeros between them."""
    out = np.zeros_like(flat)
    for extent in LAYOUT.extents:
        out[extent.slice] = flat[extent.slice]
    return out


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_files_on_the_checkpoints_disk_are_linked_and_the_others_written(tmp_path, elsewhere, ranks, resident):
    path = tmp_path / "checkpoint"

    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        own = partition.of(group.rank)
        with store_over([tmp_path / "a", elsewhere, tmp_path / "b"]) as store:
            column = column_of(store, own.numel, resident=resident)
            column.write(0, content(LAYOUT.numel, 0)[own.slice]).wait()
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=column)
            saved = save(path, group, [value], meta={})
            held = column.linkable_files(str(path))
            assert {one.extent.store for one in held} == {"0", "2"}
            group.barrier().wait()
            column.write(0, content(LAYOUT.numel, 1)[own.slice]).wait()  # to new files
            return saved, sum(one.extent.nbytes for one in held)

    found = run_threads(ranks, body)
    saved, here = found[0][0], sum(nbytes for _, nbytes in found)
    pages = 4096 * len(read_manifest(path).files)
    assert 0 < here <= saved.linked_nbytes < here + pages
    assert saved.nbytes - saved.linked_nbytes < LAYOUT.nbytes - here + pages  # nothing twice
    assert verify(path) == []
    np.testing.assert_array_equal(loaded(path, 3), expected_of(content(LAYOUT.numel, 0)))


def test_several_directories_on_one_disk_cost_no_copy(tmp_path):
    path = tmp_path / "checkpoint"

    def body(group):
        partition = Partition.build(LAYOUT.numel, 1)
        with store_over([tmp_path / "a", tmp_path / "b"]) as store:
            column = column_of(store, LAYOUT.numel, resident=0)
            column.write(0, content(LAYOUT.numel, 0)).wait()
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=column)
            before = trace.counters()
            saved = save(path, group, [value], meta={})
            assert saved.nbytes == saved.linked_nbytes
            moved = {name: count - before.get(name, 0) for name, count in trace.counters().items()}
            assert moved["checkpoint.linked_nbytes"] == LAYOUT.nbytes
            assert moved["checkpoint.written_nbytes"] == moved["offload.written_bytes"] == 0
            assert moved["offload.read_bytes"] <= 2 * len(LAYOUT.extents) * UNIT  # where tensors begin and end
            inodes = {os.stat(file).st_ino for one in store.members for file in os.scandir(one.path)}
            assert {os.stat(path / file.name).st_ino for file in read_manifest(path).files} == inodes
            assert len(inodes) == 6

    run_threads(1, body)
    assert verify(path) == []
    np.testing.assert_array_equal(loaded(path, 2), expected_of(content(LAYOUT.numel, 0)))


def test_what_is_in_no_file_has_no_shares(tmp_path):
    with StripedStore([MemoryStore(), NvmeStore(tmp_path, options=OPTIONS)], unit_nbytes=UNIT) as store:
        store.create("v", 4 * UNIT + 5)
        (extent,) = store.file_extents("v", str(tmp_path))
        assert extent.stretches == ((UNIT, 2 * UNIT, 0), (3 * UNIT, 4 * UNIT, UNIT))
        assert store.file_extents("v", "/dev/shm") == []
    with MemoryStore() as store:
        assert store.file_extents("v", str(tmp_path)) == []


def test_what_cannot_be_linked_is_known_by_member(tmp_path, elsewhere):
    members = [NvmeStore(one, options=OPTIONS) for one in (tmp_path / "a", elsewhere)]
    with StripedStore(members, weights=[1, 3]) as store:
        assert store.copied_parts(str(tmp_path)) == [0, 0.75]
        assert store.copied_parts(elsewhere) == [0.25, 0]
        assert members[0].copied_parts(str(tmp_path)) == [0]
    with MemoryStore() as store:
        assert store.copied_parts(str(tmp_path)) == [1]


def test_where_the_next_step_needs_its_room_the_checkpoint_before_is_gone_when_a_save_returns(tmp_path):
    path, numel = tmp_path / "checkpoint", 9 * 2**20  # more than is deleted at once otherwise

    def body(group):
        layout, partition = FlatLayout.build({"w": (numel,)}), Partition.build(numel, 1)
        with NvmeStore(tmp_path / "scratch", options=OPTIONS) as store:
            column = ChunkedArray("v", (0, numel), np.zeros(0, np.float32), resident=0, storage=OneStore(store))
            column.create()
            value = Value(kind="parameter", layout=layout, partition=partition, mine=column)
            save(path, group, [value], meta={})
            column.write(0, np.ones(numel, np.float32)).wait()
            with seams.free(4 * numel - 1):
                saved = save(path, group, [value], meta={})
            assert len(saved.removed) == 1
            assert sorted(os.listdir(path)) == ["manifest.json", read_manifest(path).files[0].name]

    run_threads(1, body)
