"""Checkpoints over real ranks: saved by all, loaded by any number of them, refused by all together."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.comm import open_group
from zerort.errors import CheckpointError, CorruptCheckpointError, StorageError
from zerort.layout import FlatLayout, Partition
from zerort.native.dtypes import numpy_dtype

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SHAPES = {"block0.w": (300, 900), "block0.b": (900,), "scale": (), "none": (0, 3), "block1.w": (300, 301)}
KINDS = {"parameter": "bfloat16", "master": "float32", "exp_avg": "float32", "count": "int64"}


@pytest.fixture
def path():
    """One directory for all ranks; not pytest's tmp_path, which each rank would have of its own."""
    directory = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield Path(directory) / "c"
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(directory)


@pytest.fixture(params=["node", pytest.param("mpi", id="over-mpi")])  # pytest-mpi takes an id "mpi" for its marker
def group(request, options):
    with open_group(kind=request.param, options=options) as group:
        yield group


def expected(kind, dtype, layout):
    """Return the whole flat buffer, padding included as zeros."""
    buffer = np.zeros(layout.numel, numpy_dtype(dtype))
    for at, extent in enumerate(layout.extents):
        numbers = np.arange(extent.numel) * (at + 1) + len(kind)
        buffer[extent.slice] = (numbers % 251).astype(buffer.dtype)
    return buffer


def values_of(group, *, filled, kinds=KINDS, weights=None, window=False):
    values = []
    for kind, dtype in kinds.items():
        layout = FlatLayout.build(SHAPES, dtype=dtype)
        partition = Partition.build(layout.numel, group.size, weights=weights, alignment=64)
        if window:
            mine = group.zeros(partition.counts[group.rank], dtype)
        else:
            mine = np.empty(partition.counts[group.rank], numpy_dtype(dtype))
        mine[:] = expected(kind, dtype, layout)[partition.of(group.rank).slice] if filled else 0
        values.append(Value(kind=kind, layout=layout, partition=partition, mine=mine))
    return values


def check(values, group):
    for value in values:
        whole = expected(value.kind, value.layout.dtype, value.layout)
        mine = whole[value.partition.of(group.rank).slice]
        assert value.mine.tobytes() == mine.tobytes(), (value.kind, group)


def sizes_up_to(size):
    return sorted({1, 2, size // 2, size - 1, size} & set(range(1, size + 1)))


@pytest.mark.smoke
def test_smaller_numbers_of_ranks_load_it(group, path):
    saved = save(path, group, values_of(group, filled=True), meta={"step": 5}, progress=[group.rank])
    assert saved.nbytes == sum(file.nbytes for file in read_manifest(path).files)
    for size in sizes_up_to(group.size):
        part = group.split(0 if group.rank < size else 1)
        for weights in (None, [rank % 3 + (rank == 0) for rank in range(part.size)]):
            values = values_of(part, filled=False, weights=weights)
            manifest = load(path, part, values)
            check(values, part)
        assert manifest.meta == {"step": 5}
        assert manifest.progress == tuple([rank] for rank in range(group.size))
        part.close()
    assert verify(path) == []
    group.barrier().wait()


def test_larger_numbers_of_ranks_load_it(group, path):
    for size in sizes_up_to(group.size):
        part = group.split(0 if group.rank < size else 1)
        if group.rank < size:
            save(path, part, values_of(part, filled=True), meta={"step": size})
        part.close()
        group.barrier().wait()
        values = values_of(group, filled=False)
        assert load(path, group, values).meta == {"step": size}
        check(values, group)
        group.barrier().wait()
        if group.rank == 0:
            assert len(os.listdir(path)) == size + 1  # data files and the manifest: older ones are gone
        group.barrier().wait()


def test_windows_are_saved_and_filled_in_place(group, path):
    save(path, group, values_of(group, filled=True, window=True), meta={})
    values = values_of(group, filled=False, window=True)
    load(path, group, values)
    check(values, group)


def test_masters_become_parameters_of_another_dtype(group, path):
    save(path, group, values_of(group, filled=True), meta={})
    for dtype in ("float16", "float32", "float64"):
        values = values_of(group, filled=False, kinds={"parameter": dtype})
        load(path, group, values)
        check(values, group)


def test_damage_another_model_and_a_full_disk_are_errors_on_every_rank(group, path):
    save(path, group, values_of(group, filled=True), meta={"step": 1})
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: momentum 'block0\.w'"):
        load(path, group, values_of(group, filled=False, kinds={"momentum": "float32"}))

    manifest = read_manifest(path)
    extent = manifest.tensors["exp_avg"]["block1.w"].extents[-1]
    file = path / manifest.files[extent.file].name
    group.barrier().wait()
    if group.rank == 0:
        with file.open("r+b") as stream:
            stream.seek(extent.offset)
            stream.write(b"spoiled")
    group.barrier().wait()
    with pytest.raises(CorruptCheckpointError, match=f"exp_avg 'block1.w' is damaged: .* of {file}"):
        load(path, group, values_of(group, filled=False))

    names = sorted(os.listdir(path))
    group.barrier().wait()
    last = group.rank == group.size - 1
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(os, "pwritev", full_disk)
        with pytest.raises(StorageError, match=r"Expected .* for a checkpoint at .* free: No space left on device"):
            save(path, group, values_of(group, filled=True), meta={"step": 2})
    group.barrier().wait()
    assert sorted(os.listdir(path)) == names
    assert read_manifest(path).meta == {"step": 1}
    group.barrier().wait()
    save(path, group, values_of(group, filled=True), meta={"step": 3})
    values = values_of(group, filled=False)
    assert load(path, group, values).meta == {"step": 3}
    check(values, group)


def full_disk(*words):
    raise OSError(28, "No space left on device")
