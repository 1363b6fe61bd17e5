"""Whatever stands in a manifest whose checksum fits: it is used as it says, or refused before anything changes."""

from __future__ import annotations

import functools
import json
import os
import re
import threading

import numpy as np
import pytest
from manifest_files import body_of, mutations, sealed, text_of

import zerort as zr
from zerort.checkpoint import Value, export, read_manifest, save, verify
from zerort.checkpoint.files.lease import LEASE
from zerort.cli.plan.models import read_model
from zerort.errors import CheckpointError, CorruptCheckpointError, StorageError, ZerortError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads


@pytest.fixture
def path(tmp_path):
    """A checkpoint of two kinds, two tensors and two ranks."""
    layout = FlatLayout.build({"w": (8, 9), "b": (3,)})

    def body(group):
        partition = Partition.build(layout.numel, group.size)
        values = [
            Value(kind=kind, layout=layout, partition=partition, mine=np.ones(partition.counts[group.rank], np.float32))
            for kind in ("parameter", "exp_avg")
        ]
        save(tmp_path / "c", group, values, meta={"updates": 3}, progress={"rank": group.rank})

    run_threads(2, body)
    return tmp_path / "c"


def test_every_change_of_a_manifest_is_refused_or_read_and_refused_by_the_files(path):
    refused = read = 0
    for body in mutations(body_of(path)):
        (path / "manifest.json").write_bytes(text_of(body))
        try:
            verify(path)
            read += 1
        except CorruptCheckpointError:
            refused += 1
    assert refused > 800, (refused, read)
    assert read > 50, (refused, read)


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (b'"body":' + b"[" * 200_000 + b"}\n", "RecursionError"),
        (b'"body":' + b'{"a":' * 200_000 + b"}\n", "RecursionError"),
        (b'"body":1', "JSONDecodeError"),
        (b'"body":{"ranks":NaN}}\n', "Expected finite numbers, got NaN"),
        (b'"body":\xff}\n', "UnicodeDecodeError"),
        (b'"body":' + b"9" * 5000 + b"}\n", "ValueError"),
    ],
)
def test_json_that_is_none_or_too_deep_is_a_clear_error(path, rest, text):
    (path / "manifest.json").write_bytes(sealed(rest))
    with pytest.raises(CorruptCheckpointError, match=text):
        read_manifest(path)


@pytest.mark.slow
def test_a_runtime_refuses_changed_numbers_before_it_changes_anything(tmp_path):
    """Every change of what stands beside the values, and some of the rest: refused, or loaded as a whole."""

    def step(rt):
        rt.units["unit"].reduce({"w": np.ones(70, np.float16)})
        rt.step()

    def whole(rt):
        with rt.units["unit"].gathered() as p:
            return np.array(p["w"])

    def body(group):
        settings = {"optimizer": zr.AdamW(lr=0.1), "loss_scale": zr.LossScale(initial=8.0)}
        with zr.open(group=group, plan=zr.Plan.zero(2), **settings) as rt:
            rt.register("unit", {"w": np.linspace(-1, 1, 70).astype(np.float16)})
            step(rt)
            rt.save(tmp_path / "c")
            good = body_of(tmp_path / "c")
            kept = whole(rt)
            step(rt)
            now, updates = whole(rt), rt.updates
            assert (now != kept).any()
            counts = {"refused": 0, "loaded": 0}
            changed = [{**good, "meta": meta} for meta in mutations(good["meta"])]
            changed += [one for at, one in enumerate(mutations(good)) if at % 31 == 0]
            for one in changed:
                (tmp_path / "c" / "manifest.json").write_bytes(text_of(one))
                try:
                    rt.load(tmp_path / "c")
                    np.testing.assert_array_equal(whole(rt), kept)
                    counts["loaded"] += 1
                except CheckpointError as error:
                    if "partly overwritten" not in str(error):  # checksums of extents are known when they were read
                        np.testing.assert_array_equal(whole(rt), now)
                        assert rt.updates == updates
                    counts["refused"] += 1
                (tmp_path / "c" / "manifest.json").write_bytes(text_of(good))
                rt.load(tmp_path / "c")
                step(rt)
                np.testing.assert_array_equal(whole(rt), now)
            return counts

    (counts,) = run_threads(1, body)
    assert counts["refused"] > 100, counts
    assert counts["loaded"] > 20, counts


# -- from a stranger -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "data", LEASE])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_what_is_no_file_is_refused_at_once(path, tmp_path, name, kind):
    if name == "data":
        name = read_manifest(path).files[0].name
    file = path / name
    if file.exists():
        file.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_bytes(b"")
    {
        "fifo": lambda: os.mkfifo(file),
        "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
        "directory": file.mkdir,
    }[kind]()
    layout = FlatLayout.build({"w": (8,)})
    value = Value(
        kind="parameter", layout=layout, partition=Partition.build(layout.numel, 1), mine=np.ones(layout.numel, "f4")
    )
    told = []
    saves = functools.partial(run_threads, 1, lambda group: save(path, group, [value], meta={}))
    use_it = saves if name == LEASE else functools.partial(verify, path)

    def use():
        with pytest.raises(StorageError, match=rf"{re.escape(name)}.*, got a link, a pipe, a directory or a device"):
            use_it()
        told.append(name)

    thread = threading.Thread(target=use, daemon=True)  # opening a pipe would wait for ever
    thread.start()
    thread.join(30)
    assert told == [name]


def test_a_directory_behind_a_link_is_fine(path, tmp_path):
    (tmp_path / "link").symlink_to(path, target_is_directory=True)
    assert verify(tmp_path / "link") == []
    assert export(tmp_path / "link", tmp_path / "out.safetensors") > 0
    (tmp_path / "snapshot.safetensors").symlink_to(tmp_path / "out.safetensors")
    assert read_model(str(tmp_path / "snapshot.safetensors"))


def test_extents_ask_for_no_more_memory_than_a_block(path):
    """A sparse file of 4 KiB on the disk, and extents as large as it claims to be."""
    body = body_of(path)
    numel = 64 * 1024**2
    name = body["files"][0][0]
    os.truncate(path / name, 4 * numel)
    body["files"] = [[name, 4 * numel]]
    body["kinds"] = {"parameter": {"w": ["float32", [numel], [[0, 0, 0, numel, 0]]]}}
    (path / "manifest.json").write_bytes(text_of(body))
    with pytest.raises(CorruptCheckpointError, match=f"extents of parameter 'w': one of {4 * numel} bytes"):
        verify(path)


def test_a_manifest_of_any_size_is_not_read_into_memory(path):
    os.truncate(path / "manifest.json", 2**40)
    with pytest.raises(CheckpointError, match=r"Expected a manifest of at most .* got one of 1099511627776 bytes"):
        read_manifest(path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", ".", 3, ["x"], None])
def test_an_index_names_files_beside_it_and_no_others(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ZerortError, match=r"Expected the files that .* names beside it"):
        read_model(str(index))
