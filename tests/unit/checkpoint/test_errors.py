"""What cannot be saved or loaded is said on every rank, with the cure, and changes nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import seams

from zerort.checkpoint import Value, load, read_manifest, save
from zerort.checkpoint.failure import fail_together, with_progress_watch
from zerort.checkpoint.format.manifest import encode
from zerort.config import GroupOptions
from zerort.errors import CallError, CheckpointError, StorageError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads


def value(group, shapes, *, kind="parameter", dtype="float32", fill=1):
    layout = FlatLayout.build(shapes, dtype=dtype)
    partition = Partition.build(layout.numel, group.size)
    mine = np.full(partition.counts[group.rank], fill, dtype)
    return Value(kind=kind, layout=layout, partition=partition, mine=mine)


SHAPES = {"w": (100, 3), "b": (3,)}


def store(path, ranks=2, **meta):
    run_threads(ranks, lambda group: save(path, group, [value(group, SHAPES)], meta=meta))


def refused(ranks, error, body):
    """Run a body that raises on every rank, and return the one text that all of them saw."""

    def guarded(group):
        with pytest.raises(error) as caught:
            body(group)
        assert type(caught.value) is error
        return re.sub(r" \(rank \d+\)$", "", str(caught.value))

    texts = set(run_threads(ranks, guarded))
    assert len(texts) == 1, texts
    return texts.pop()


def test_another_model_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    store(tmp_path / "c")
    kept = []

    def body(group):
        mine = value(group, {"w": (300,), "c": (3,)}, fill=7)
        kept.append(mine.mine)
        load(tmp_path / "c", group, [mine])

    text = refused(3, CheckpointError, body)
    assert "1 missing from the checkpoint: parameter 'c'" in text
    assert "1 only in the checkpoint: parameter 'b'" in text
    assert "1 of another shape (saved → asked for): parameter 'w' (100, 3) → (300)" in text
    assert "Build the model that was saved, or name the checkpoint of this one." in text
    assert f"zerort ckpt inspect --tensors {tmp_path / 'c'}" in text
    assert all((mine == 7).all() for mine in kept)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    store(tmp_path / "c")
    many = {f"layer{at}": (1,) for at in range(50)}
    text = refused(2, CheckpointError, lambda group: load(tmp_path / "c", group, [value(group, many)]))
    assert "50 missing from the checkpoint: parameter 'layer0', " in text
    assert "and 45 more" in text
    assert "strict=False" not in text  # which reads less, not more
    assert len(text) < 800


def test_less_than_the_checkpoint_holds_has_to_be_said(tmp_path: Path) -> None:
    store(tmp_path / "c")
    text = refused(2, CheckpointError, lambda group: load(tmp_path / "c", group, [value(group, {"b": (3,)})]))
    assert "strict=False" in text

    def body(group):
        mine = value(group, {"b": (3,)}, fill=7)
        load(tmp_path / "c", group, [mine], strict=False)
        return mine.mine[: max(0, 3 - mine.partition.of(group.rank).first)]

    assert all((mine == 1).all() for mine in run_threads(2, body))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_dtypes_that_do_not_convert(tmp_path: Path, dtype: str) -> None:
    store(tmp_path / "c")
    text = refused(2, CheckpointError, lambda group: load(tmp_path / "c", group, [value(group, SHAPES, dtype=dtype)]))
    assert f"parameter 'w' float32 → {dtype}" in text
    assert "float16, bfloat16, float32, float64 do" in text


def test_a_kind_that_is_not_there(tmp_path: Path) -> None:
    store(tmp_path / "c")
    body = [lambda group: load(tmp_path / "c", group, [value(group, SHAPES, kind="exp_avg")])]
    assert "missing from the checkpoint: exp_avg 'w', exp_avg 'b'" in refused(2, CheckpointError, body[0])


def test_no_checkpoint_a_file_an_unfinished_save_and_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "shard-00000.0123456789abcdef.bin").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "an app", "icons": []}')
    for name, expected in {
        "nothing": "got nothing. Name the directory",
        "file": "got a file. Name the directory",
        "empty": "got a directory of 0 entries without manifest.json",
        "torn": "got 1 files of a save that did not finish",
        "other": "It belongs to another program, or is damaged",
    }.items():
        text = refused(2, CheckpointError, lambda group, name=name: load(tmp_path / name, group, []))
        assert expected in text, text
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            read_manifest(tmp_path / name)


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    store(tmp_path / "c")
    newer = dataclasses.replace(read_manifest(tmp_path / "c"), format=4)
    (tmp_path / "c" / "manifest.json").write_bytes(encode(newer))
    with pytest.raises(CheckpointError, match="Expected a checkpoint of format 3 or older, got format 4"):
        read_manifest(tmp_path / "c")


def test_a_manifest_names_no_files_elsewhere(tmp_path: Path) -> None:
    store(tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    files = tuple(file._replace(name="../../etc/passwd") for file in manifest.files)
    (tmp_path / "c" / "manifest.json").write_bytes(encode(dataclasses.replace(manifest, files=files)))
    with pytest.raises(CheckpointError, match=r"Expected a data file at .* got '../../etc/passwd'"):
        read_manifest(tmp_path / "c")


@pytest.mark.parametrize("case", ["meta", "values", "path"])
def test_ranks_that_disagree_all_hear_of_it(tmp_path: Path, case: str) -> None:
    def body(group):
        odd = group.rank == 1
        path = tmp_path / ("other" if odd and case == "path" else "c")
        shapes = {"w": (4 if odd and case == "values" else 5,)}
        save(path, group, [value(group, shapes)], meta={"step": int(odd and case == "meta")})

    text = refused(3, CallError, body)
    assert "to be the same on every rank, got" in text
    assert os.listdir(tmp_path) == []


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    def wrong(group, **fields):
        one = value(group, SHAPES)
        fields = {"kind": one.kind, "layout": one.layout, "partition": one.partition, "mine": one.mine} | fields
        save(tmp_path / "c", group, [Value(**fields)], meta={})

    layout = FlatLayout.build(SHAPES)
    for fields, text in (
        ({"mine": np.zeros(3, np.float32)}, "elements of float32, got 3 of float32"),
        ({"mine": np.zeros(layout.numel, np.float64)[::2]}, "contiguous 1-D NumPy array, got shape"),
        ({"mine": [1.0]}, "contiguous 1-D NumPy array, got list"),
        ({"partition": Partition.build(layout.numel, 5)}, "elements for 2 ranks, got"),
        ({"partition": Partition.build(7, 2)}, "elements for 2 ranks, got 7"),
        ({"kind": ""}, "non-empty str"),
    ):
        assert text in refused(2, CallError, lambda group, fields=fields: wrong(group, **fields))
    twice = refused(2, CallError, lambda group: save(tmp_path / "c", group, [value(group, SHAPES)] * 2, meta={}))
    assert "got 'w' twice as 'parameter'" in twice
    for meta in ({"x": np.zeros(2)}, {"x": float("nan")}, {"x": {1, 2}}):
        text = refused(2, CallError, lambda group, meta=meta: save(tmp_path / "c", group, [], meta=meta))
        assert "Expected meta as JSON knows it" in text
    text = refused(2, CallError, lambda group: save(tmp_path / "c", group, [], meta={}, progress=object()))
    assert "Expected progress as JSON knows it" in text
    assert os.listdir(tmp_path) == []

    store(tmp_path / "c")

    def read_only(group):
        one = value(group, SHAPES)
        one.mine.flags.writeable = False
        load(tmp_path / "c", group, [one])

    assert "read-only" in refused(2, CallError, read_only)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    text = refused(2, StorageError, lambda group: save(tmp_path / "c", group, [value(group, SHAPES)], meta={}))
    assert "got a file. A checkpoint is a directory: name another path." in text
    text = refused(2, StorageError, lambda group: save(tmp_path / "c" / "d", group, [value(group, SHAPES)], meta={}))
    assert "A part of the path is a file" in text
    assert (tmp_path / "c").read_text() == "mine"


def test_a_directory_that_hosts_do_not_share(tmp_path: Path) -> None:
    """Rank 1 writes into a directory of its own, which rank 0 does not see."""
    from zerort.storage.files.blocks import BlockFile

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Apart(BlockFile):
        def __init__(self, path, **options):
            if "shard-00001" in path:
                path = str(elsewhere / os.path.basename(path))
            super().__init__(path, **options)

    with seams.inside(save, BlockFile=Apart):
        text = refused(3, StorageError, lambda group: save(tmp_path / "c", group, [value(group, SHAPES)], meta={}))
    assert "that rank 1 on" in text
    assert "Name a directory on a file system that all hosts have mounted." in text
    assert not (tmp_path / "c").exists()  # it was made for this save


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(
    ("call", "who"),
    [(call, who) for call in ("pwritev", "fsync", "posix_fallocate") for who in (0, 1)] + [("rename", 0)],
)
def test_what_the_file_system_refuses_leaves_the_checkpoint_of_before(
    tmp_path: Path, code: int, call: str, who: int
) -> None:
    store(tmp_path / "c", step=1)
    before = sorted(os.listdir(tmp_path / "c"))
    real = getattr(os, call)

    def refuse(first, *more, **options):
        name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if f"shard-0000{who}." in name or (who == 0 and "manifest.json" in name):
            raise OSError(code, os.strerror(code))
        return real(first, *more, **options)

    with mock.patch.object(os, call, refuse):
        text = refused(2, StorageError, lambda group: save(tmp_path / "c", group, [value(group, SHAPES)], meta={}))
    assert os.strerror(code) in text
    if code in (errno.ENOSPC, errno.EDQUOT):
        assert re.search(r"Expected .* for a checkpoint at .*, got .* free", text)
        assert "What was there before is intact." in text
    assert sorted(os.listdir(tmp_path / "c")) == before
    assert read_manifest(tmp_path / "c").meta == {"step": 1}
    store(tmp_path / "c", step=2)
    assert read_manifest(tmp_path / "c").meta == {"step": 2}


def test_too_little_room_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with seams.free(100):
        text = refused(2, StorageError, lambda group: save(tmp_path / "c", group, [value(group, SHAPES)], meta={}))
    assert re.search(r"Expected 8KiB \(8192 bytes\) for a checkpoint at .* free", text), text
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_with_much_to_do_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    real_write, real_read = os.pwritev, os.preadv
    timeout, pause = 3.0, 0.7  # a fraction of the timeout, for each of several pieces
    paused = Counter()

    def slowly(real):
        def move(descriptor, data, offset):
            if "shard-00001" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                return real(descriptor, data, offset)
            time.sleep(pause)
            paused[real] += pause
            return real(descriptor, [data[0][:4096]], offset)

        return move

    shapes = {"w": (10, 1024)}  # five pages for each rank

    def body(group):
        save(tmp_path / "c", group, [value(group, shapes)], meta={})
        found = value(group, shapes, fill=0)
        load(tmp_path / "c", group, [found])
        assert (found.mine == 1).all()

    with (
        seams.inside(with_progress_watch, _MEET_EVERY=0.2),
        mock.patch.object(os, "pwritev", slowly(real_write)),
        mock.patch.object(os, "preadv", slowly(real_read)),
    ):
        run_threads(2, body, options=GroupOptions(timeout=timeout))
    assert paused[real_write] > timeout
    assert paused[real_read] > timeout


def test_a_manifest_read_before_is_not_read_again(tmp_path: Path) -> None:
    store(tmp_path / "c", step=4)
    manifest = read_manifest(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    found = run_threads(2, lambda group: load(tmp_path / "c", group, [value(group, SHAPES)], manifest=manifest))
    assert found[0] is manifest


def test_ranks_that_read_different_manifests_all_hear_of_it(tmp_path: Path) -> None:
    store(tmp_path / "a", step=1)
    store(tmp_path / "b", step=2)

    def seen(path):
        """Each rank sees a directory of its own under the same name."""
        return read_manifest(tmp_path / ("a" if threading.current_thread().name == "rank 0" else "b"))

    def body(group):
        load(tmp_path / "a", group, [value(group, SHAPES)])

    with seams.inside(load, with_progress_watch=fail_together, read_manifest=seen):  # on the rank's own thread
        with seams.inside(load, is_replaced=lambda *_: False):
            assert "to be the same on every rank" in refused(2, CheckpointError, body)
        assert "got 100 new ones in a row" in refused(2, CheckpointError, body)


@pytest.mark.slow
def test_a_large_manifest_is_quick_and_compact(tmp_path: Path) -> None:
    """Ten thousand tensors of three kinds over eight ranks."""
    shapes = {f"block{at // 4}.part{at % 4}.weight": (3, 5) for at in range(10_000)}
    layout = FlatLayout.build(shapes)

    def body(group, verb, **options):
        partition = Partition.build(layout.numel, group.size)
        mine = np.ones(partition.counts[group.rank], np.float32)
        kinds = ("parameter", "exp_avg", "exp_avg_sq")
        values = [Value(kind=kind, layout=layout, partition=partition, mine=mine) for kind in kinds]
        return verb(tmp_path / "c", group, values, **options)

    run_threads(8, lambda group: body(group, save, meta={}))
    assert run_threads(1, lambda group: body(group, load))[0].nbytes == 3 * 10_000 * 60
    assert os.path.getsize(tmp_path / "c" / "manifest.json") < 4_000_000
    json.loads((tmp_path / "c" / "manifest.json").read_text())
