"""A load that fails after it began to read leaves values that nobody may save: only a load that succeeds mends them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import seams

import zerort as zr
from zerort.checkpoint import load, reader, verify
from zerort.checkpoint.failure import fail_together
from zerort.errors import CallError, CheckpointError, CorruptCheckpointError, StorageError, ZerortError
from zerort.testing import run_threads

RNG = np.random.default_rng(3)
START = {"w": RNG.standard_normal(40_000).astype(np.float32)}
REFUSAL = r"got those of a load, half done when it ended with {}.* rt\.load\(path\), or rt\.resume\(\)"


def step(rt):
    for unit in rt.units.values():
        unit.reduce({"w": np.full(40_000, rt.updates + 1, np.float32)})
    rt.step()


def whole(rt):
    with rt.units["unit"].gathered() as p:
        return np.array(p["w"])


def flip_last_file(path: Path) -> None:
    """Change a byte of a parameter in the last rank's file: rank 0 finds nothing wrong with what it reads."""
    file = max(one for one in path.iterdir() if one.suffix == ".bin")
    data = bytearray(file.read_bytes())
    data[file.stat().st_size // 9] ^= 1
    file.write_bytes(bytes(data))


def run(body, *, ranks=2, **options):
    def opened(group):
        with zr.open(group=group, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), **options) as rt:
            rt.register("unit", START)
            return body(rt)

    return run_threads(ranks, opened)


def save_two(rt, tmp_path):
    """Save two checkpoints, and damage the second; return the parameters of the first."""
    step(rt)
    rt.save(tmp_path / "good")
    kept = whole(rt)
    step(rt)
    rt.save(tmp_path / "bad")
    if rt.rank == 0:
        flip_last_file(tmp_path / "bad")
    rt.world.barrier().wait()
    return kept


def test_damage_that_a_load_has_read_is_not_stepped_on_nor_saved_until_another_is_loaded(tmp_path):
    def body(rt):
        kept = save_two(rt, tmp_path)
        with pytest.raises(CorruptCheckpointError, match="partly overwritten and not usable"):
            rt.load(tmp_path / "bad")
        for verb in (lambda: step(rt), lambda: rt.save(tmp_path / "laundered"), lambda: whole(rt)):
            with pytest.raises(StorageError, match=REFUSAL.format("CorruptCheckpointError")):
                verb()
            rt.discard_gradients()
        assert rt.load(tmp_path / "good").updates == 1
        np.testing.assert_array_equal(whole(rt), kept)
        step(rt)
        rt.save(tmp_path / "good")

    run(body)
    assert not (tmp_path / "laundered").exists()
    assert verify(tmp_path / "good") == []


def test_after_parameters_alone_failed_to_load_those_of_another_checkpoint_may_be(tmp_path):
    def body(rt):
        kept = save_two(rt, tmp_path)
        with pytest.raises(CorruptCheckpointError, match="partly overwritten"):
            rt.load(tmp_path / "bad", optimizer=False)
        with pytest.raises(StorageError, match="half done"):
            rt.save(tmp_path / "laundered")
        rt.load(tmp_path / "good", optimizer=False)
        np.testing.assert_array_equal(whole(rt), kept)
        step(rt)

    run(body)


@pytest.mark.parametrize("error", [MemoryError("no slab"), CallError("of a reader")])
def test_any_error_of_reading_tears(tmp_path, error):
    def body(rt):
        step(rt)
        rt.save(tmp_path / "good")
        with (
            mock.patch.object(reader, "_sum_and_deliver", side_effect=error),
            mock.patch.object(reader.Fetch, "in_phase", False),
            pytest.raises(type(error)),
        ):
            rt.load(tmp_path / "good")
        with pytest.raises(StorageError, match=REFUSAL.format(type(error).__name__)):
            rt.save(tmp_path / "laundered")
        rt.load(tmp_path / "good")
        step(rt)

    run(body, ranks=1)


def test_an_interrupt_of_reading_tears_and_breaks_the_group(tmp_path):
    """One rank: nobody else is left waiting for the one that was interrupted."""

    def body(rt):
        step(rt)
        rt.save(tmp_path / "good")
        with (
            mock.patch.object(reader, "_sum_and_deliver", side_effect=KeyboardInterrupt),
            mock.patch.object(reader.Fetch, "in_phase", False),
            pytest.raises(KeyboardInterrupt),
        ):
            rt.load(tmp_path / "good")
        with pytest.raises(ZerortError):
            rt.save(tmp_path / "laundered")
        assert not (tmp_path / "laundered" / "manifest.json").exists()

    run(body, ranks=1)


def test_a_load_that_is_refused_before_it_reads_leaves_the_run_as_it_was(tmp_path):
    def body(rt):
        kept = save_two(rt, tmp_path)
        if rt.rank == 0:
            for file in (tmp_path / "bad").glob("shard-*"):
                os.truncate(file, 4096)
        rt.world.barrier().wait()
        with pytest.raises(CorruptCheckpointError, match="Nothing was changed"):
            rt.load(tmp_path / "bad")
        with pytest.raises(CheckpointError, match="got nothing"):
            rt.load(tmp_path / "nowhere")
        step(rt)
        assert rt.updates == 3
        assert (whole(rt) != kept).any()

    run(body)


def test_copies_of_the_model_that_failed_to_load_are_torn_together(tmp_path):
    """Two copies of two ranks: the second copy reads well, the first not at all. None of the four goes on."""

    def save(rt):
        step(rt)
        rt.save(tmp_path / "good")

    def body(group):
        mesh = zr.mesh(shard=2, replicate=2, group=group)
        with zr.open(mesh=mesh, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1)) as rt:
            rt.register("unit", START)
            with pytest.raises(CheckpointError, match="of the first copy"):
                rt.load(tmp_path / "good")
            with pytest.raises(StorageError, match="got those of a load, half done"):
                rt.save(tmp_path / "laundered")

    def opened(*args, **settings):
        if threading.current_thread().name in ("rank 0", "rank 1"):
            raise CheckpointError("of the first copy")
        return reader.ShardFiles(*args, **settings)

    run(save)
    with seams.inside(load, with_progress_watch=fail_together, ShardFiles=opened):  # on the rank's own thread
        run_threads(4, body)
