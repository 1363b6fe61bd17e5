"""A reader has the trainer's bits at every version; what is damaged, of another model or format is refused."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from zerort.checkpoint import Value
from zerort.checkpoint.files.sweep import wait_for_sweeps
from zerort.errors import (
    CallError,
    CheckpointError,
    CheckpointInUseError,
    ClosedError,
    CorruptCheckpointError,
    StorageError,
)
from zerort.layout import FlatLayout, Partition
from zerort.native import crc32c
from zerort.publish import Feed, Reader
from zerort.storage.files import faults
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"q": (300, 40), "k": (100, 40), "b": (7,), "scale": (), "none": (0, 3)})
COUNTS = FlatLayout.build({"steps": (5,)}, dtype="int64")


def model(seed=0):
    """Return all values of a model: floats and whole numbers."""
    lot = np.random.default_rng(seed)
    return lot.standard_normal(LAYOUT.numel).astype(np.float32), np.arange(COUNTS.numel, dtype=np.int64)


def values_of(group, floats, counts):
    """Return a rank's part, in uneven shares, of a whole model."""
    cuts = [LAYOUT.numel * part // (group.size * (group.size + 1) // 2) for part in range(1, group.size)]
    sizes = [*cuts, LAYOUT.numel - sum(cuts)]
    partition = Partition.of_counts(sizes)
    whole = Partition.of_counts([COUNTS.numel] + [0] * (group.size - 1))
    return [
        Value(kind="parameter", layout=LAYOUT, partition=partition, mine=floats[partition.of(group.rank).slice].copy()),
        Value(kind="buffer", layout=COUNTS, partition=whole, mine=counts[whole.of(group.rank).slice].copy()),
    ]


def expected(floats, counts, dtype=ml_dtypes.bfloat16):
    found = {extent.name: floats[extent.slice].astype(dtype).reshape(extent.shape) for extent in LAYOUT.extents}
    return found | {extent.name: counts[extent.slice].reshape(extent.shape) for extent in COUNTS.extents}


def assert_same(arrays, wanted):
    assert set(arrays) == set(wanted)
    for name, array in wanted.items():
        assert arrays[name].shape == array.shape, name
        assert arrays[name].dtype == array.dtype, name
        assert arrays[name].tobytes() == array.tobytes(), name


def publishing(where, work, *, ranks=2, **settings):
    """Run ``work(push, version_of)`` on all ranks over one model that it changes; only rank 0 changes anything."""

    def body(group):
        floats, counts = model()
        feed = Feed(where, group, lambda: values_of(group, floats, counts), updates=lambda: 7, **settings)
        try:
            return work(group, feed, floats, counts)
        finally:
            feed.close()

    return run_threads(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("full_every", [1, 3, 50])
def test_a_reader_has_the_trainers_bits_at_every_version(tmp_path, ranks, full_every):
    """A reader that follows, and one that begins anew each time; NaN, infinity and -0 among the values."""
    follower = Reader(tmp_path)

    def work(group, feed, floats, counts):
        lot = np.random.default_rng(1)
        for number in range(1, 8):
            done = feed.push().wait()
            assert (done.version, feed.version) == (number, number)
            assert done.is_full == (number % full_every == 1 or full_every == 1)
            group.barrier().wait()
            if group.rank == 0:
                for reader in (follower, Reader(tmp_path, map_files=number % 2 == 0)):
                    assert_same(reader.update(), expected(floats, counts))
                    assert (reader.version, reader.updates) == (number, 7)
            group.barrier().wait()
            some = lot.random(floats.size) < (0, 0.001, 0.02, 0.6)[number % 4]
            floats[some] = lot.standard_normal(int(some.sum()))
            floats[number], floats[number + 20], floats[number + 40] = np.nan, np.inf, -0.0
            counts[0] += 1

    publishing(tmp_path, work, ranks=ranks, full_every=full_every)


def test_a_version_without_changes_is_a_version(tmp_path):
    def work(group, feed, floats, counts):
        return [feed.push().wait() for _ in range(3)]

    done = publishing(tmp_path, work)[0]
    assert [(one.version, one.is_full, one.changed) for one in done][1:] == [(2, False, 0), (3, False, 0)]
    assert done[1].nbytes == 0
    reader = Reader(tmp_path)
    reader.update()
    assert reader.version == 3


def test_a_value_that_changes_and_goes_back_is_followed(tmp_path):
    """Deltas are from version to version: one from the last whole version would leave it out."""
    reader = Reader(tmp_path)

    def work(group, feed, floats, counts):
        for add in (0, 1, -1, 1, -1):
            floats[5:4000:3] += np.float32(add)
            done = feed.push().wait()
            group.barrier().wait()
            if group.rank == 0:
                assert_same(reader.update(), expected(floats, counts))
            assert done.is_full == (add == 0)
            group.barrier().wait()

    publishing(tmp_path, work)


def test_few_changes_are_few_bytes(tmp_path):
    """1 % changed: at most 1.6 % of the whole and the headers of the pieces."""

    def work(group, feed, floats, counts):
        full = feed.push().wait()
        floats[np.random.default_rng(3).random(floats.size) < 0.01] += 1
        return full, feed.push().wait()

    full, delta = publishing(tmp_path, work)[0]
    assert not delta.is_full
    assert delta.nbytes <= 0.016 * full.nbytes + 32 * 12


def test_a_reader_that_missed_versions_catches_up(tmp_path):
    """Within the chain of deltas, and over a newer whole version whose predecessors are deleted."""
    late, later = Reader(tmp_path), Reader(tmp_path)

    def work(group, feed, floats, counts):
        for number in range(1, 12):
            floats[number * 3 :: 97] += 0.5
            feed.push().wait()
            group.barrier().wait()
            if group.rank == 0 and number in (1, 4, 11):
                assert_same(late.update(), expected(floats, counts))
            if group.rank == 0 and number in (2, 11):
                assert_same(later.update(), expected(floats, counts))
            group.barrier().wait()
        wait_for_sweeps()

    publishing(tmp_path, work, full_every=5)
    names = {name.split("-")[0] for name in os.listdir(tmp_path)}
    assert names == {"feed.json", "full", "version"}  # version 11 is whole
    assert late.version == later.version == 11


def test_the_next_run_goes_on_with_the_numbers(tmp_path):
    reader = Reader(tmp_path)
    for run in range(3):
        publishing(tmp_path, lambda group, feed, floats, counts: [feed.push().wait() for _ in range(2)], ranks=run + 1)
        assert_same(reader.update(), expected(*model()))
        assert reader.version == 2 * run + 2


def test_tensors_are_renamed_and_joined(tmp_path):
    mapping = {"qk": ("q", "k"), "bias": "b"}
    reader = Reader(tmp_path, mapping=mapping)

    def work(group, feed, floats, counts):
        for _ in range(4):
            feed.push().wait()
            group.barrier().wait()
            if group.rank == 0:
                wanted = expected(floats, counts)
                wanted["qk"] = np.concatenate([wanted.pop("q"), wanted.pop("k")])
                wanted["bias"] = wanted.pop("b")
                assert_same(reader.update(), wanted)
            group.barrier().wait()
            floats[::11] *= 2

    publishing(tmp_path, work)
    for wrong, text in (
        ({"x": "y"}, "got 'y', which is none of them"),
        ({"x": "q", "y": "q"}, "got 'q' twice"),
        ({"k": "q"}, "got 'k', which another tensor has"),
        ({"x": ("q", "b")}, r"q bfloat16\[300, 40\], b bfloat16\[7\]"),
        ({"x": ("scale", "b")}, "differ in their first axis"),
    ):
        with pytest.raises(CheckpointError, match=text):
            Reader(tmp_path, mapping=wrong).update()


def test_a_version_is_written_as_safetensors(tmp_path):
    from safetensors.numpy import load_file

    where = tmp_path / "feed"

    def work(group, feed, floats, counts):
        feed.push().wait()
        floats[::5] += 1
        feed.push().wait()
        return expected(floats, counts, np.float32)

    wanted = publishing(where, work, dtype="float32")[0]
    reader = Reader(where)
    with pytest.raises(CallError, match="Call update"):
        reader.save(tmp_path / "out")
    reader.update()
    reader.save(tmp_path / "out")
    assert_same(load_file(tmp_path / "out"), wanted)
    assert os.listdir(tmp_path) in (["feed", "out"], ["out", "feed"])


def test_arrays_cannot_be_written_to_and_the_files_do_not_change(tmp_path):
    def work(group, feed, floats, counts):
        feed.push().wait()
        [full] = tmp_path.glob("full-*")
        before = full.read_bytes()
        arrays = Reader(tmp_path).update() if group.rank == 0 else None
        group.barrier().wait()
        floats[:] += 1
        feed.push().wait()
        if arrays is not None:
            with pytest.raises(ValueError, match="read-only"):
                arrays["q"][0] = 1
            reader = Reader(tmp_path)
            reader.update()
            assert full.read_bytes() == before
        group.barrier().wait()

    publishing(tmp_path, work)


# -- what is refused -----------------------------------------------------------------------------------------------


def pushed(where, times=3):
    """Publish a whole version and deltas; return the last one's values."""

    def work(group, feed, floats, counts):
        for _ in range(times):
            feed.push().wait()
            floats[::7] += 1
        return

    publishing(where, work)


@pytest.mark.parametrize("kind", ["full", "delta", "version", "feed"])
def test_every_damaged_file_is_named(tmp_path, kind):
    pushed(tmp_path)
    for path in sorted(tmp_path.glob(f"{kind}*")):
        content = path.read_bytes()
        for damaged in (content[:-9], bytes([*content[:-9], content[-9] ^ 4, *content[-8:]])):
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match="damaged") as caught:
                Reader(tmp_path).update()
            assert path.name in str(caught.value)
        path.unlink()
        with pytest.raises(CheckpointError, match="got no feed.json" if kind == "feed" else "it was deleted"):
            Reader(tmp_path).update()
        path.write_bytes(content)
    Reader(tmp_path).update()


def test_after_a_damaged_delta_the_arrays_are_those_of_the_version_before(tmp_path):
    def work(group, feed, floats, counts):
        feed.push().wait()
        if group.rank == 0:
            reader.update()
        group.barrier().wait()
        before = expected(floats, counts)
        floats[::7] += 1
        feed.push().wait()
        if group.rank == 0:
            path = sorted(tmp_path.glob("delta-*-00001.*"))[0]
            content = path.read_bytes()
            path.write_bytes(bytes([*content[:-9], content[-9] ^ 4, *content[-8:]]))
            with pytest.raises(CorruptCheckpointError):
                reader.update()
            assert reader.version == 1
            assert_same(reader._arrays, before)
            path.write_bytes(content)
            assert_same(reader.update(), expected(floats, counts))
        group.barrier().wait()

    reader = Reader(tmp_path)
    publishing(tmp_path, work)


def test_another_format_is_refused(tmp_path):
    pushed(tmp_path, times=1)
    path = tmp_path / "feed.json"
    found = json.loads(path.read_bytes().split(b"\n", 1)[1])
    for number, cure in ((0, "Publish again"), (3, "Update zerort"), ("x", "Publish again")):
        body = json.dumps(found | {"format": number}).encode()
        path.write_bytes(b"%08x\n" % crc32c(body) + body)
        with pytest.raises(CheckpointError, match=f"feed of format 2 or older at .*, got format {number!r}. {cure}"):
            Reader(tmp_path).update()


def test_another_model_is_refused_on_both_sides(tmp_path):
    pushed(tmp_path, times=1)
    reader = Reader(tmp_path)
    reader.update()

    def push(group, dtype="bfloat16"):
        floats, counts = model()
        feed = Feed(tmp_path, group, lambda: values_of(group, floats, counts), updates=lambda: 0, dtype=dtype)
        try:
            feed.push()
        finally:
            feed.close()

    def body(group):
        with pytest.raises(CheckpointError, match=r"Expected the model that .* they differ in 'b' \(bfloat16"):
            push(group, dtype="float32")

    run_threads(2, body)
    for path in tmp_path.iterdir():
        path.unlink()
    run_threads(1, lambda group: push(group, dtype="float32"))
    with pytest.raises(CheckpointError, match=r"got another model in .* they differ in 'b'"):
        reader.update()
    assert_same(reader._arrays, expected(*model()))


def test_wrong_arguments_are_refused_on_every_rank(tmp_path):
    def body(group):
        for settings, text in (
            ({"dtype": "int8"}, "dtype to be one of"),
            ({"full_every": 0}, "full_every to be a whole number above 0"),
            ({"full_every": 5 + group.rank}, "directory and settings"),
        ):
            with pytest.raises(CallError, match=text):
                Feed(tmp_path, group, list, updates=lambda: 0, **settings)
        feed = Feed(tmp_path, group, list, updates=lambda: 0)
        feed.close()
        feed.close()
        with pytest.raises(ClosedError, match="one that was closed"):
            feed.push()

    run_threads(2, body)
    with pytest.raises(CheckpointError, match=r"got no feed\.json there"):
        Reader(tmp_path).update()
    with pytest.raises(CheckpointError, match=r"got no feed\.json there"):
        Reader(tmp_path / "nowhere").update()


def test_one_publisher_at_a_time(tmp_path):
    def body(group):
        feed = Feed(tmp_path, group, list, updates=lambda: 0)
        text = r"nobody else to publish in .*, which is this process\..* Close the feed or runtime that has it first"
        with pytest.raises(CheckpointInUseError, match=text):
            Feed(tmp_path, group, list, updates=lambda: 0)
        feed.close()
        Feed(tmp_path, group, list, updates=lambda: 0).close()

    run_threads(2, body)


@pytest.mark.parametrize("fault", ["enospc@{}:op=append", "eio@{}:op=sync", "eio@{}:op=rename", "eio@{}:op=create"])
def test_a_push_that_fails_leaves_the_versions_of_before(tmp_path, fault):
    """On every rank the same error; nothing is left lying, and the next version is whole."""
    reader = Reader(tmp_path)

    def work(group, feed, floats, counts):
        feed.push().wait()
        group.barrier().wait()
        for at in (1, 2):
            before = set(os.listdir(tmp_path))
            wanted = reader.update() if group.rank == 0 else {}
            group.barrier().wait()
            floats[::3] += 1
            failed = False
            with faults.injected(fault.format(at)) if group.rank == 0 else contextlib.nullcontext():
                group.barrier().wait()
                try:
                    feed.push().wait()
                except StorageError:
                    failed = True
                group.barrier().wait()
            if group.rank == 0 and failed:
                wait_for_sweeps()
                assert set(os.listdir(tmp_path)) == before
                assert_same(reader.update(), wanted)
            group.barrier().wait()
            assert feed.push().wait().is_full == failed
            group.barrier().wait()
            if group.rank == 0:
                assert_same(reader.update(), expected(floats, counts))
            group.barrier().wait()
            assert failed or at == 2

    publishing(tmp_path, work)


@pytest.mark.parametrize("full_every", [2, 50])
def test_a_version_that_readers_have_though_its_push_failed_is_no_base_of_the_next(tmp_path, full_every):
    """The last sync, of the renamed feed.json, is refused: readers may have that version, so its number is used up."""
    reader = Reader(tmp_path)

    def work(group, feed, floats, counts):
        for number in (1, 2, 3, 4, 5):
            if group.rank == 0:
                with faults.injected("eio@2:op=syncdir" if number in (1, 3) else ""):
                    pushed = _push(feed)
            else:
                pushed = _push(feed)
            assert pushed == (None if number in (1, 3) else number)
            group.barrier().wait()
            if group.rank == 0:
                assert_same(reader.update(), expected(floats, counts))
                assert reader.version == number
            group.barrier().wait()
            floats[number::7] -= 1

    publishing(tmp_path, work, full_every=full_every)


def _push(feed):
    """Return the number of the version that was pushed; None if the disk refused."""
    try:
        return feed.push().wait().version
    except StorageError:
        return None


def test_a_reader_knows_versions_by_their_records_not_by_their_numbers(tmp_path):
    """Two versions 1 of one run, as a disk that lost a rename may leave them: the second is taken, and its deltas."""
    reader = Reader(tmp_path)

    def work(group, feed, floats, counts):
        feed._token = "0123456789abcdef"
        feed.push()
        assert_same(reader.update(), expected(floats, counts))
        for path in tmp_path.glob("*-*"):
            path.unlink()
        feed._newest, feed._number, feed._needs_full = 0, 0, True
        for _ in range(2):
            floats[::3] += 1
            feed.push()
            assert_same(reader.update(), expected(floats, counts))
        assert reader.version == 2

    publishing(tmp_path, work, ranks=1)


@pytest.mark.parametrize("damage", ["torn", "deleted"])
def test_a_feed_whose_head_is_lost_is_published_over(tmp_path, damage):
    """With a whole version, and a number above those of the files that are there."""
    pushed(tmp_path)
    reader = Reader(tmp_path)
    reader.update()
    head = tmp_path / "feed.json"
    content = head.read_bytes()
    head.unlink()
    if damage == "torn":
        head.write_bytes(content[:-9])

    def work(group, feed, floats, counts):
        floats[:] *= 2
        done = feed.push().wait()
        assert (done.version, done.is_full) == (4, True)
        return expected(floats, counts)

    wanted = publishing(tmp_path, work)[0]
    assert_same(reader.update(), wanted)


def test_a_feed_that_cannot_be_opened_does_not_keep_others_out(tmp_path):
    pushed(tmp_path, times=1)
    head = tmp_path / "feed.json"
    content = head.read_bytes()
    body = json.dumps(json.loads(content.split(b"\n", 1)[1]) | {"format": 3}).encode()
    head.write_bytes(b"%08x\n" % crc32c(body) + body)

    def refused(group):
        for _ in range(2):
            with pytest.raises(CheckpointError, match="got format 3"):
                Feed(tmp_path, group, list, updates=lambda: 0)

    run_threads(2, refused)
    head.write_bytes(content)
    pushed(tmp_path, times=1)
    reader = Reader(tmp_path)
    reader.update()
    assert reader.version == 2


def test_a_reader_needs_no_mpi(tmp_path):
    pushed(tmp_path)
    code = """
import sys
import zerort as zr
arrays = zr.Reader(sys.argv[1]).update()
print(sorted(arrays), "mpi4py" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[0] == "['b', 'k', 'none', 'q', 'scale', 'steps'] False"
    assert Path(tmp_path).is_dir()


def test_a_push_takes_memory_for_pieces_not_for_the_model(tmp_path, monkeypatch):
    """Whole or as a delta: what it allocates does not grow with the model."""
    import tracemalloc

    from zerort.publish import pieces

    monkeypatch.setattr(pieces, "_PIECE_NUMEL", 20_000)
    layout = FlatLayout.build({"w": (2_000_000,)})
    mine = np.random.default_rng(0).standard_normal(layout.numel).astype(np.float32)  # 8 MB; published: 4 MB

    def body(group):
        value = Value(kind="parameter", layout=layout, partition=Partition.build(layout.numel, 1), mine=mine)
        feed = Feed(tmp_path, group, lambda: [value], updates=lambda: 0)
        peaks = []
        for _ in range(3):
            tracemalloc.start()
            feed.push().wait()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            mine[::50] += 1
        feed.close()
        return peaks

    assert max(run_threads(1, body)[0]) < 1_000_000
