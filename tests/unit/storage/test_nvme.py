"""Files of a store: whole, their own, checked when they come back, and gone afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerort.errors import CallError, CorruptStorageError, StorageError
from zerort.storage import NvmeOptions, NvmeStore, StripedStore
from zerort.storage.files.segments import cut

NBYTES = 1_500_000


def some(seed=0, nbytes=NBYTES):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path, rank=2) as store:
        store.create("a", NBYTES)
        store.create("b", NBYTES)
        store.write("a", some(1))
        store.write("b", some(2))
        store.flush()
        yield store


def read(store, name="a"):
    return store.read(name, np.empty(NBYTES, np.uint8)).wait()


@given(st.data())
def test_any_range_is_cut_into_pieces_that_tile_it(data):
    grain = data.draw(st.sampled_from([1, 4, 16]))
    block = grain * data.draw(st.integers(1, 5))
    nbytes = data.draw(st.integers(0, 300))
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    pieces = cut(begin, end, nbytes=nbytes, grain=grain, block=block)
    assert [byte for piece in pieces for byte in range(piece.begin, piece.end)] == list(range(begin, end))
    grains = [number for piece in pieces for number in range(piece.low // grain, -(-piece.high // grain))]
    assert len(grains) == len(set(grains))  # no two threads change one checksum
    for piece in pieces:
        assert piece.low <= piece.begin < piece.end <= piece.high <= nbytes
        assert piece.low % grain == 0
        assert piece.high % grain == 0 or piece.high == nbytes
        assert piece.low // block == (piece.high - 1) // block  # it fits into a slab
    assert sum(not piece.whole for piece in pieces) <= 2


_SIZE = 700_001
_RANGE = st.tuples(st.integers(0, _SIZE), st.integers(0, _SIZE)).map(sorted)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["read", "write"]), _RANGE, st.integers(0, 63)), max_size=8),
    st.booleans(),
)
def test_any_reads_and_writes_behave_as_an_array_does(tmp_path, verbs, checksum):
    """Nothing is waited for before the end; memory begins anywhere."""
    model = np.zeros(_SIZE, np.uint8)
    reads = []
    with NvmeStore(tmp_path, options=NvmeOptions(checksum=checksum, block_nbytes=256 * 1024)) as store:
        store.create("value", _SIZE)
        for number, (verb, (begin, end), shift) in enumerate(verbs, start=1):
            if verb == "write":
                data = np.full(end - begin + shift, number, np.uint8)[shift:]
                store.write("value", data, offset=begin)
                model[begin:end] = number
            else:
                out = np.empty(end - begin + shift, np.uint8)[shift:]
                reads.append((store.read("value", out, offset=begin), model[begin:end].copy()))
        for ticket, expected in reads:
            assert np.array_equal(ticket.wait(), expected)
        assert np.array_equal(store.read("value", np.empty(_SIZE, np.uint8)).wait(), model)


def test_one_flipped_bit_on_the_disk_is_found_and_named(store):
    path = os.path.join(store.path, "a.chunk")
    with open(path, "r+b") as file:
        file.seek(600_000)
        byte = file.read(1)
        file.seek(600_000)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CorruptStorageError, match=rf"at offset 524288 of {re.escape(path)} \('a' of rank 2\)"):
        read(store)
    part = store.read("a", np.empty(1000, np.uint8), offset=100).wait()  # what is not damaged is served
    assert np.array_equal(part, some(1)[100:1100])
    assert np.array_equal(read(store, "b"), some(2))


@pytest.mark.parametrize("checksum", [True, False])
def test_truncated_deleted_and_swapped_files_are_found_and_named(tmp_path, checksum):
    with NvmeStore(tmp_path, rank=2, options=NvmeOptions(checksum=checksum)) as store:
        for name in "abcd":
            store.create(name, NBYTES)
        paths = {name: os.path.join(store.path, f"{name}.chunk") for name in "abcd"}
        os.truncate(paths["a"], 8192)
        with pytest.raises(
            CorruptStorageError, match=rf"Expected a file of 1503232 bytes at {paths['a']}.*got one of 8192"
        ):
            read(store, "a")
        os.unlink(paths["b"])
        with pytest.raises(CorruptStorageError, match=rf"{paths['b']} \('b' of rank 2\), got none: it was deleted"):
            store.write("b", some()).wait()
        os.rename(paths["c"], paths["d"])
        with pytest.raises(CorruptStorageError, match=rf"the file that this run made at {paths['d']}.*got another"):
            read(store, "d")


def test_bytes_swapped_between_files_are_found(store):
    """The same files, with each other's contents."""
    paths = [os.path.join(store.path, f"{name}.chunk") for name in "ab"]
    contents = [Path(path).read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        with open(path, "r+b") as file:
            file.write(content)
    for name in "ab":
        with pytest.raises(CorruptStorageError, match="crc32c"):
            read(store, name)


def test_what_others_put_there_stays(tmp_path):
    store = NvmeStore(tmp_path)
    store.create("a", 10)
    Path(store.path, "notes.txt").write_text("mine")
    store.close()
    assert os.listdir(store.path) == ["notes.txt"]


def test_a_file_system_without_o_direct_is_served_without_and_it_is_said_once(tmp_path, recwarn):
    real = os.open

    def refuse(path, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *more, **options)

    with mock.patch.object(os, "open", refuse):
        with pytest.warns(RuntimeWarning, match="refuses O_DIRECT") as said:
            store = NvmeStore(tmp_path)
        with store:
            store.create("a", NBYTES)
            store.write("a", some())
            assert np.array_equal(read(store), some())
            assert not store.direct
            assert "through the page cache" in repr(store)
    assert len(said) == 1


def test_o_direct_that_is_refused_later_shows(tmp_path):
    real = os.pwritev
    with NvmeStore(tmp_path) as store:
        if not store.direct:
            pytest.skip("this file system has no O_DIRECT")
        assert "O_DIRECT" in repr(store)
        store.create("a", NBYTES)

        def refuse(descriptor, *words):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(descriptor, *words)

        with mock.patch.object(os, "pwritev", refuse):
            store.write("a", some()).wait()
        assert np.array_equal(read(store), some())
        assert "through the page cache" in repr(store)


def test_options_that_make_no_sense():
    for wrong in ({"block_nbytes": 1000}, {"threads": 0}, {"retries": -1}):
        with pytest.raises(CallError, match="Expected"):
            NvmeOptions(**wrong)


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="rank 3"):
        NvmeStore(tmp_path / "file" / "below", rank=3)


@pytest.fixture
def disk(tmp_path: Path):
    """A file system of 8 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


@pytest.mark.filterwarnings("ignore:.*refuses O_DIRECT")
def test_a_full_disk_is_refused_with_the_numbers_and_what_is_there_stays(disk):
    with NvmeStore(disk, rank=4) as store:
        store.create("a", 5 * 2**20)
        store.write("a", some(1, 5 * 2**20))
        with pytest.raises(StorageError, match=r"Expected 5MiB \(5242880 bytes\) for 'b' at .* on rank 4, got .* free"):
            store.create("b", 5 * 2**20)
        store.flush()
        assert np.array_equal(store.read("a", np.empty(5 * 2**20, np.uint8)).wait(), some(1, 5 * 2**20))
        store.create("b", 2**20)
    assert os.listdir(disk) == []


@pytest.mark.filterwarnings("ignore:.*refuses O_DIRECT")
def test_a_full_member_of_a_striped_store_is_left_out(disk, tmp_path):
    large = NvmeStore(tmp_path / "large", name="large")
    small = NvmeStore(disk, name="small")
    with StripedStore([large, small], unit_nbytes=256 * 1024) as store:
        store.create("a", 8 * 2**20)
        assert small.nbytes == 4 * 2**20
        with pytest.warns(RuntimeWarning, match="Member 'small' of store 'striped' cannot take its share"):
            store.create("b", 12 * 2**20)
        store.create("c", 40 * 2**20)  # said once
        assert "(full)" in repr(store)
        assert small.nbytes == 4 * 2**20
        for name in "abc":
            store.write(name, some(ord(name), 8 * 2**20))
        for name in "abc":
            assert np.array_equal(store.read(name, np.empty(8 * 2**20, np.uint8)).wait(), some(ord(name), 8 * 2**20))


def test_memory_that_was_moved_is_let_go(tmp_path):
    """A store keeps nothing of an array once its ticket is done."""
    import weakref

    class Mine(np.ndarray):
        """An array that can be watched."""

    with NvmeStore(tmp_path) as store:
        store.create("a", 4000)
        array = np.zeros(1000, np.float32).view(Mine)
        gone = weakref.ref(array)
        ticket = store.write("a", array)
        del array
        ticket.wait()
        del ticket
        assert gone() is None
