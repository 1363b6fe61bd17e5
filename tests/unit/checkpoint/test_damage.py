"""A flipped byte, a short or a missing file is found, by verify and by load, and named by file, tensor and offset."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.errors import CheckpointError, CorruptCheckpointError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (700, 1000), "b": (1000,), "scale": ()})


def values_of(group, buffer):
    partition = Partition.build(LAYOUT.numel, group.size)
    mine = buffer[partition.of(group.rank).slice]
    return [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    buffer = np.random.default_rng(0).standard_normal(LAYOUT.numel).astype(np.float32)
    run_threads(2, lambda group: save(tmp_path / "c", group, values_of(group, buffer), meta={"step": 3}))
    return tmp_path / "c"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def load_all(path: Path, ranks: int) -> list[str]:
    """Return what each of the ranks raised."""
    buffer = np.zeros(LAYOUT.numel, np.float32)

    def body(group):
        with pytest.raises(CorruptCheckpointError) as caught:
            load(path, group, values_of(group, buffer))
        return str(caught.value)

    return run_threads(ranks, body)


def test_a_flipped_byte_anywhere_is_found_and_named(path: Path) -> None:
    manifest = read_manifest(path)
    places = [
        (manifest.files[one.file].name, name, one.offset, one.offset + at)
        for name, tensor in manifest.tensors["parameter"].items()
        for one in tensor.extents
        for at in {0, 1, 4095, 4096, one.numel * 2, one.numel * 4 - 1}
        if at < one.numel * 4
    ]
    assert len(places) > 15
    for name, tensor, begin, offset in places:
        flip(path / name, offset)
        [damage] = verify(path)
        assert (damage.file, damage.kind, damage.tensor, damage.offset) == (name, "parameter", tensor, begin)
        for ranks in (1, 3):
            texts = load_all(path, ranks)
            assert len({text.split(" (rank")[0] for text in texts}) == 1
            assert str(path / name) in texts[0]
            assert f"parameter {tensor!r} is damaged" in texts[0]
            assert f"from offset {begin} of" in texts[0]
            assert "not usable: load another checkpoint" in texts[0]
        flip(path / name, offset)
    assert verify(path) == []


def test_every_byte_of_the_manifest_counts(path: Path) -> None:
    size = os.path.getsize(path / "manifest.json")
    for offset in {*range(120), *range(0, size, 17), size - 1}:
        flip(path / "manifest.json", offset)
        with pytest.raises(CheckpointError, match=r"Expected .* got .*checkpoint"):
            verify(path)
        flip(path / "manifest.json", offset)
    assert verify(path) == []


@pytest.mark.parametrize("cut", [0, 1, 5000, None])
def test_a_short_or_missing_file_is_found_before_anything_is_changed(path: Path, cut: int | None) -> None:
    file = read_manifest(path).files[1]
    if cut is None:
        (path / file.name).unlink()
    else:
        os.truncate(path / file.name, cut)
    damages = verify(path)
    assert {(damage.file, damage.kind) for damage in damages} == {(file.name, "parameter")}
    assert {damage.tensor for damage in damages} == {"w", "b", "scale"}
    buffer = np.full(LAYOUT.numel, 7, np.float32)

    def body(group):
        got = "none" if cut is None else f"one of {cut}"
        text = f"Expected a file of {file.nbytes} bytes, got {got}.*{re.escape(str(path / file.name))}.*"
        with pytest.raises(CorruptCheckpointError, match=text + "Nothing was changed"):
            load(path, group, values_of(group, buffer))

    run_threads(3, body)
    assert (buffer == 7).all()


def test_a_file_with_a_tail_is_not_the_one_that_was_written(path: Path) -> None:
    file = read_manifest(path).files[0]
    with (path / file.name).open("ab") as stream:
        stream.write(b"more")
    assert "got one of" in verify(path)[0].reason


def test_verify_tells_how_far_it_is(path: Path) -> None:
    steps: list[int] = []
    assert verify(path, progress=steps.append) == []
    assert sum(steps) == read_manifest(path).nbytes
