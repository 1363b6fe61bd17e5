"""A save of what rests on the checkpoint's own disk gives files a second name, and no step touches them again."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest
from runs import assert_same, weights

import zerort as zr
from zerort.checkpoint import read_manifest, verify
from zerort.errors import CorruptStorageError, StorageError
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files.faults import injected
from zerort.testing.threads import run_threads

NVME = zr.Tier.NVME
EVERYTHING = zr.Plan.zero(3, parameter=NVME, state=NVME)
SMALL = zr.OffloadOptions(chunk_nbytes=320 * 1024, threads=2)
SHAPES = {"a": (400, 500), "b": (13,), "c": (301, 151), "d": (1,), "e": (70_001,)}


# -- the store ---------------------------------------------------------------------------------------------------------


def values_of(path, nbytes):
    return np.fromfile(path, np.uint8)[:nbytes]


@pytest.mark.parametrize("numel", [5, 1024, 70_000, 300_001])
def test_a_linked_file_stays_as_it_was(tmp_path, numel):
    with NvmeStore(tmp_path / "scratch", options=NvmeOptions(threads=2)) as store:
        assert store.can_link(str(tmp_path))
        assert not store.can_link("/dev/shm")
        assert not store.can_link(str(tmp_path / "nowhere"))
        store.create("v", 4 * numel)
        before = np.arange(numel, dtype=np.float32)
        store.write("v", before)
        found = store.link("v", str(tmp_path / "linked"))
        assert found.nbytes == os.stat(tmp_path / "linked").st_size
        store.write("v", np.full(1, -1, np.float32), offset=4 * (numel // 2))  # in part: the rest is copied
        after = before.copy()
        after[numel // 2] = -1
        np.testing.assert_array_equal(store.read("v", np.empty(numel, np.float32)).wait(), after)
        np.testing.assert_array_equal(values_of(tmp_path / "linked", 4 * numel), before.view(np.uint8))
        store.link("v", str(tmp_path / "again"))
        store.write("v", before)  # the whole
        np.testing.assert_array_equal(store.read("v", np.empty(numel, np.float32)).wait(), before)
        np.testing.assert_array_equal(values_of(tmp_path / "again", 4 * numel), after.view(np.uint8))
        assert len(os.listdir(store.path)) == 1


def test_a_file_whose_other_name_is_gone_is_written_in_place(tmp_path):
    with NvmeStore(tmp_path / "scratch") as store:
        store.create("v", 4096)
        store.link("v", str(tmp_path / "linked"))
        (file,) = os.scandir(store.path)
        inode = os.stat(file.path).st_ino
        os.unlink(tmp_path / "linked")
        store.write("v", np.ones(1024, np.float32)).wait()
        assert os.stat(file.path).st_ino == inode


def test_no_room_for_a_file_of_its_own_is_said_and_harms_nothing(tmp_path):
    with NvmeStore(tmp_path / "scratch", rank=2) as store:
        store.create("v", 40_000)
        store.write("v", np.ones(10_000, np.float32))
        store.link("v", str(tmp_path / "linked"))
        with (
            injected("enospc@1:op=reserve"),
            pytest.raises(StorageError, match=r"Expected 40KiB .* for 'v' .*rank 2"),
        ):
            store.write("v", np.zeros(10_000, np.float32)).wait()
        assert (store.read("v", np.empty(10_000, np.float32)).wait() == 1).all()
        store.write("v", np.zeros(10_000, np.float32)).wait()
        assert (store.read("v", np.empty(10_000, np.float32)).wait() == 0).all()
        assert values_of(tmp_path / "linked", 40_000).view(np.float32).all()


def test_a_linked_file_that_was_deleted_is_told_as_such(tmp_path):
    with NvmeStore(tmp_path / "scratch", rank=2) as store:
        store.create("v", 4096)
        store.link("v", str(tmp_path / "linked"))
        os.unlink(os.path.join(store.path, "v.chunk"))
        with pytest.raises(CorruptStorageError, match=r"'v' of rank 2\), got none: it was deleted"):
            store.write("v", np.ones(1024, np.float32)).wait()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_copying_a_linked_file_is_tried_again(tmp_path, operation):
    with NvmeStore(tmp_path / "scratch", options=NvmeOptions(retries=1)) as store:
        store.create("v", 40_000)
        store.write("v", np.ones(10_000, np.float32))
        store.link("v", str(tmp_path / "linked"))
        with injected(f"eio@1:op={operation}"):
            store.write("v", np.zeros(1, np.float32)).wait()
        assert store.read("v", np.empty(10_000, np.float32)).wait().sum() == 9_999


def test_another_file_in_a_linked_ones_place_is_found_and_no_draft_is_left(tmp_path):
    with NvmeStore(tmp_path / "scratch") as store:
        store.create("v", 4096)
        store.link("v", str(tmp_path / "linked"))
        (tmp_path / "other").write_bytes(bytes(4096))
        os.unlink(os.path.join(store.path, "v.chunk"))
        os.link(tmp_path / "other", os.path.join(store.path, "v.chunk"))
        with pytest.raises(CorruptStorageError, match="another in its place"):
            store.write("v", np.zeros(1, np.float32)).wait()
        assert os.listdir(store.path) == ["v.chunk"]


def test_a_directory_is_tried_once_and_again_after_what_may_pass(tmp_path):
    with NvmeStore(tmp_path / "scratch") as store:
        with mock.patch.object(os, "link", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            assert not store.can_link(str(tmp_path))
        assert store.can_link(str(tmp_path))
        with mock.patch.object(os, "link") as link:
            assert store.can_link(str(tmp_path))
        link.assert_not_called()
        assert os.listdir(store.path) == []
    assert os.listdir(tmp_path) == ["scratch"]


@pytest.fixture
def another_mount(tmp_path):
    """Yield a directory of the tests' own disk that is a mount of its own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a directory needs root, and mount")
    where = tmp_path / "mounted"
    where.mkdir()
    mounted = subprocess.run(["mount", "--bind", where, where], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount a directory")
    yield where
    subprocess.run(["umount", where], check=True)


def test_another_mount_of_the_same_disk_takes_no_links(tmp_path, another_mount):
    with NvmeStore(tmp_path / "scratch") as store:
        assert os.stat(another_mount).st_dev == os.stat(store.path).st_dev
        with pytest.warns(RuntimeWarning, match="got Invalid cross-device link: a checkpoint there is written instead"):
            assert not store.can_link(str(another_mount))
        assert store.can_link(str(tmp_path))


# -- a runtime ---------------------------------------------------------------------------------------------------------


def opened(group, scratch, plan=EVERYTHING, options=SMALL):
    rt = zr.open(
        plan=plan, group=group, optimizer=zr.AdamW(lr=0.1), scratch=scratch, create_scratch=True, offload=options
    )
    generator = np.random.default_rng(0)
    rt.register("unit", {name: generator.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()})
    return rt


def train(rt, numbers):
    for number in numbers:
        generator = np.random.default_rng((number, rt.rank))
        rt.units["unit"].reduce(
            {name: generator.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
        )
        rt.step()


def linked_names(path):
    return [name for name in os.listdir(path) if name.count("-") == 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*leaves out")  # one of two directories, if the disk was slow for a moment
@pytest.mark.parametrize(("ranks", "directories"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_save_links_and_later_steps_do_not_touch_it(tmp_path, ranks, directories):
    scratch, path = [tmp_path / f"scratch{at}" for at in range(directories)], tmp_path / "checkpoint"

    def body(group):
        with opened(group, scratch) as rt:
            train(rt, range(2))
            written = rt.context.ledger.tiered.copy()
            rt.save(path)
            assert rt.context.ledger.tiered["nvme write"] == written["nvme write"]
            group.barrier().wait()
            assert len(linked_names(path)) == len(os.listdir(path)) - 1 >= 3 * group.size
            assert all(os.stat(path / name).st_nlink == 2 for name in linked_names(path))
            group.barrier().wait()
            at_save = weights(rt)
            train(rt, range(2, 4))
            later = weights(rt)
            rt.context.update_stream.wait_written()
            group.barrier().wait()
            assert all(os.stat(path / name).st_nlink == 1 for name in linked_names(path))
            assert verify(path) == []
            rt.load(path)  # over files that are nobody else's any more
            assert_same(weights(rt), at_save)
            train(rt, range(2, 4))
            assert_same(weights(rt), later)
            rt.save(path)
            rt.load(path)  # over files that the checkpoint shares
            assert_same(weights(rt), later)
            train(rt, range(4, 6))
            group.barrier().wait()
            assert verify(path) == []
            return later

    (later, *_) = run_threads(ranks, body)
    assert read_manifest(path).meta["updates"] == 4
    assert [os.listdir(one) for one in scratch] == [[]] * directories
    assert verify(path) == []

    def in_memory(group):
        with opened(group, scratch, zr.Plan.zero(2)) as rt:
            rt.load(path)
            return weights(rt)

    assert_same(run_threads(2, in_memory)[0], later)


def test_without_checksums_of_what_is_there_it_is_written(tmp_path):
    def body(group):
        path = tmp_path / "checkpoint"
        with opened(group, tmp_path / "scratch", options=dataclasses.replace(SMALL, checksum=False)) as rt:
            train(rt, range(2))
            rt.save(path)
            assert linked_names(path) == []
            assert verify(path) == []

    run_threads(1, body)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_where_links_are_refused_a_save_writes_and_it_is_said_once(tmp_path, code):
    def body(group):
        one, two = tmp_path / "one", tmp_path / "two"
        with opened(group, tmp_path / "scratch") as rt:
            train(rt, range(1))
            with pytest.warns(
                RuntimeWarning, match=f"Expected links from .* got {os.strerror(code)}: a check"
            ) as found:
                rt.save(one)
            assert len(found) == 1
            rt.save(two)
        assert linked_names(one) == linked_names(two) == []
        assert verify(one) == verify(two) == []

    with mock.patch.object(os, "link", side_effect=OSError(code, os.strerror(code))):
        run_threads(1, body)


def test_of_state_that_is_partly_in_memory_the_rest_is_linked(tmp_path):
    """A budget leaves the first chunks in memory: they are written, and those on the disk are linked."""
    path = tmp_path / "checkpoint"

    def body(group):
        plan = zr.Plan.fit(host="6MiB", nvme="1GiB")
        with opened(group, tmp_path / "scratch", plan) as rt:
            train(rt, range(2))
            memory = rt.memory()
            assert memory.state > 0
            assert memory.nvme > 0
            rt.save(path)
            linked = sum(os.stat(path / name).st_size for name in linked_names(path))
            assert memory.nvme <= linked < memory.nvme + 4096 * len(linked_names(path))
            at_save = weights(rt)
            train(rt, range(2, 4))
            assert verify(path) == []
            rt.load(path)
            assert_same(weights(rt), at_save)

    run_threads(1, body)


def test_a_save_that_fails_leaves_no_links(tmp_path):
    path = tmp_path / "checkpoint"

    def body(group):
        with opened(group, tmp_path / "scratch") as rt:
            train(rt, range(2))
            rt.save(path)
            before = sorted(os.listdir(path))
            group.barrier().wait()
            if group.rank == 0:
                fault = injected("eio@2:op=sync:times=all:file=-r0-")
                fault.__enter__()
            group.barrier().wait()
            with pytest.raises(StorageError, match="rank 0"):
                rt.save(path)
            group.barrier().wait()
            if group.rank == 0:
                fault.__exit__(None, None, None)
            assert sorted(os.listdir(path)) == before
            assert verify(path) == []
            group.barrier().wait()
            train(rt, range(2, 3))
            rt.save(path)
            assert verify(path) == []

    run_threads(2, body)
