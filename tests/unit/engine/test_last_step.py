"""A runtime that keeps its last step goes back to it whatever ends the next one, and goes on with the same bits."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from unittest import mock

import numpy as np
import pytest
import seams
from runs import EVERYTHING, NUMEL, STATE, assert_as_in_memory, faults, open_offloaded, steps, values, weights

import zerort as zr
from zerort.checkpoint import read_manifest, save, verify
from zerort.checkpoint.files.room import expect_room
from zerort.engine import RuntimeOptions
from zerort.engine.persist.last_step import room_beside
from zerort.errors import CallError, StorageError
from zerort.storage.opening import open_together
from zerort.testing.threads import run_threads

VALUE = 4 * NUMEL  # bytes of one kind of value of a unit
PAGES = 32 * 1024  # what files are larger than their values, together; less than one of them


@contextlib.contextmanager
def disk(where, nbytes):
    """Have a directory on a disk of so many bytes, as far as somebody asks for its room."""

    def free(path):
        if not str(path).startswith(str(where)):
            return 2**40
        taken = {}
        for directory, _, names in os.walk(where):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(os.path.join(directory, name))
                    taken[status.st_ino] = status.st_size * (name != "manifest.json")
        return nbytes - sum(taken.values())

    with seams.inside(open_together, free_nbytes=free), seams.inside(expect_room, free_nbytes=free):
        yield


@pytest.fixture
def elsewhere():
    """A directory on another file system than the tests' own."""
    where = tempfile.mkdtemp(dir="/dev/shm")
    yield where
    shutil.rmtree(where)


def opened(group, where, plan=EVERYTHING, **options):
    rt = open_offloaded(group, where / "scratch", plan, **{"last_step": where / "last", **options})
    for at in range(2):
        rt.register(f"unit{at}", values(at))
    return rt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (2, "eio@5:op=write:times=all"),  # while gradients are put away
        (1, "eio@15:op=write:times=all"),
        (2, "eio@10:op=read:times=all"),
        (1, "eio@5:op=sync:times=all"),  # while the step is kept
        (2, "enospc@15:op=write:times=all"),
        (1, "enospc@4:op=reserve:times=all"),  # new files, as the last step has the old ones
    ],
)
def test_a_disk_that_fails_costs_one_step(tmp_path, ranks, fault):
    def body(group):
        with opened(group, tmp_path) as rt:
            steps(rt, range(3))
            with faults(group, f"{fault}:file=-r{ranks - 1}-"), pytest.raises(StorageError, match=f"rank {ranks - 1}"):
                steps(rt, [3])
            found = rt.resume()
            assert found.updates == rt.updates == 3
            steps(rt, [3, 4])
            return weights(rt)

    assert_as_in_memory(run_threads(ranks, body)[0], 5, ranks=ranks)
    assert read_manifest(tmp_path / "last").meta["updates"] == 5
    assert verify(tmp_path / "last") == []
    assert os.listdir(tmp_path / "scratch") == []


def test_the_next_run_goes_on_where_the_last_one_was(tmp_path):
    def body(group, numbers):
        with opened(group, tmp_path, STATE) as rt:
            restored = rt.resume()
            for number in numbers:
                steps(rt, [number])
            return restored, weights(rt)

    assert run_threads(2, lambda group: body(group, range(2)))[0][0] is None
    restored, found = run_threads(2, lambda group: body(group, range(2, 5)))[1]
    assert restored.updates == 2
    assert_as_in_memory(found, 5)


def test_a_run_that_forgot_to_resume_does_not_overwrite_the_last_step_of_another(tmp_path):
    def first(group):
        with opened(group, tmp_path) as rt:
            steps(rt, range(2))
            rt.save(tmp_path / "elsewhere")

    def second(group):
        with opened(group, tmp_path) as rt:
            before = weights(rt)
            with pytest.raises(CallError, match=r"Expected rt\.resume\(\) before the first step"):
                steps(rt, [0])
            assert rt.updates == 0
            for name, value in weights(rt).items():
                np.testing.assert_array_equal(value, before[name])
            assert read_manifest(tmp_path / "last").meta["updates"] == 2
            rt.load(tmp_path / "elsewhere", optimizer=False)  # where a run begins is not where one goes on
            with pytest.raises(CallError, match="holds the last step of another run"):
                steps(rt, [0])
            rt.load(tmp_path / "elsewhere")  # whoever loads all of it has chosen where to go on
            steps(rt, [2])

    run_threads(2, first)
    run_threads(2, second)
    assert read_manifest(tmp_path / "last").meta["updates"] == 3


def test_progress_is_looked_at_before_anything_changes(tmp_path):
    def body(group):
        with opened(group, tmp_path) as rt:
            steps(rt, [0])
            at = {"seen": np.arange(3)} if group.rank == 1 else {"seen": 3}
            ones = {name: np.ones_like(value) for name, value in values(0).items()}
            for progress in (at, {"seen": 3}):
                for unit in rt.units.values():
                    unit.reduce(ones)
                if progress is at:
                    with pytest.raises(CallError, match="Expected progress as JSON knows it"):
                        rt.step(progress=at)
                    assert rt.updates == 1
            assert rt.step(progress={"seen": 3}).updated
            return rt.resume()

    found = run_threads(2, body)
    assert [(one.updates, one.progress) for one in found] == [(2, {"seen": 3})] * 2


def test_progress_without_a_step_that_is_kept_is_refused_on_every_rank(tmp_path):
    def body(group):
        with opened(group, tmp_path, last_step=None) as rt:
            for unit in rt.units.values():
                unit.reduce({name: np.ones_like(value) for name, value in values(0).items()})
            with pytest.raises(CallError, match="keeps none"):
                rt.step(progress=1 if group.rank == 0 else None)
            assert rt.updates == 0

    run_threads(2, body)


def test_what_one_rank_could_not_reduce_is_told_on_every_rank(tmp_path):
    def body(group):
        with opened(group, tmp_path, zr.Plan.zero(3)) as rt:
            gradients = {name: np.ones_like(value) for name, value in values(0).items()}
            if group.rank == 1:
                with pytest.raises(CallError, match="in the parameter's shape"):
                    rt.units["unit0"].reduce({name: value[:-1] for name, value in gradients.items()})
            else:
                rt.units["unit0"].reduce(gradients)
                with pytest.raises(CallError, match="in the parameter's shape"):
                    rt.step()

    run_threads(2, body)


def test_a_last_step_that_is_no_directory_is_refused_before_anything_changes(tmp_path):
    (tmp_path / "last").write_text("mine")

    def with_something_on_a_disk(group):
        with pytest.raises(StorageError, match="Expected a directory or nothing"):
            opened(group, tmp_path)

    def in_memory(group):
        with opened(group, tmp_path, zr.Plan.zero(3)) as rt:
            with pytest.raises(StorageError, match="Expected a directory or nothing"):
                steps(rt, [0])
            assert rt.updates == 0

    run_threads(2, with_something_on_a_disk)
    run_threads(2, in_memory)
    assert (tmp_path / "last").read_text() == "mine"


def test_only_the_newest_step_is_kept_and_its_files_are_the_runs_own(tmp_path):
    last = tmp_path / "last"

    def body(group):
        with opened(group, tmp_path) as rt:
            for number in range(3):
                steps(rt, [number])
                names = [file.name for file in read_manifest(last).files]
                assert sorted(os.listdir(last)) == ["manifest.json", "saver.lease", *sorted(names)]
                assert all(os.stat(last / name).st_nlink == 2 for name in names)

    run_threads(1, body)


def test_a_relative_directory_is_where_it_was_when_the_runtime_opened(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    def body(group):
        with opened(group, tmp_path, last_step="last") as rt:
            steps(rt, range(1))
            monkeypatch.chdir(tmp_path / "other")
            assert rt.resume().updates == 1
            steps(rt, [1])

    run_threads(1, body)
    assert read_manifest(tmp_path / "last").meta["updates"] == 2
    assert os.listdir(tmp_path / "other") == []


def test_progress_is_kept_with_the_step(tmp_path):
    def body(group):
        with opened(group, tmp_path) as rt:
            for unit in rt.units.values():
                unit.reduce({"w": np.ones(NUMEL, np.float32)})
            rt.step(progress={"batch": 7 + rt.rank})
            assert rt.resume().progress == {"batch": 7 + rt.rank}

    run_threads(2, body)


def test_room_for_the_last_step_is_asked_for_before_the_first(tmp_path):
    def body(group, free):
        with (
            open_offloaded(group, tmp_path / "scratch", EVERYTHING, last_step=tmp_path / "last") as rt,
            seams.inside(open_together, free_nbytes=lambda path: free - rt.context.storage.nbytes),
        ):
            rt.register("unit0", values(0))
            rt.register("unit1", values(1))
            return rt.context.storage.nbytes

    at_rest = run_threads(1, lambda group: body(group, 2**40))[0]
    enough = at_rest * 7 // 4  # a checkpoint has no gradients: three of four parts are there twice
    run_threads(1, lambda group: body(group, enough))
    with pytest.raises(StorageError, match="for unit 'unit1', and the last step beside the next at"):
        run_threads(1, lambda group: body(group, enough - 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "count"),
    [(EVERYTHING, 8 + 6), (STATE, 4 + 4 + 2 * 2)],  # what rests; of a checkpoint, what rests once and the others twice
    ids=["everything", "state"],
)
def test_a_run_that_fits_its_disk_fits_there_again(tmp_path, plan, count):
    def body(group):
        with opened(group, tmp_path, plan) as rt:
            rt.resume()
            steps(rt, range(rt.updates, rt.updates + 2))
            return rt.updates

    with disk(tmp_path, count * VALUE + PAGES):
        assert [run_threads(1, body)[0] for _ in range(3)] == [2, 4, 6]
    shutil.rmtree(tmp_path / "last")
    with disk(tmp_path, (count - 1) * VALUE + PAGES), pytest.raises(StorageError, match="and the last step beside"):
        run_threads(1, body)


@pytest.mark.filterwarnings("ignore:Expected last_step below the mount of scratch")
def test_a_last_step_that_fits_another_disk_fits_there_again(tmp_path, elsewhere):
    def body(group):
        with opened(group, tmp_path, last_step=f"{elsewhere}/last") as rt:
            rt.resume()
            steps(rt, range(rt.updates, rt.updates + 1))
            return rt.updates

    with disk(elsewhere, 2 * 6 * VALUE + PAGES):
        assert [run_threads(1, body)[0] for _ in range(2)] == [1, 2]


def test_a_unit_that_comes_after_a_step_does_not_pay_for_what_is_kept(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path / "scratch", STATE, last_step=tmp_path / "last") as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
                steps(rt, [at])

    with disk(tmp_path, (4 + 4 + 2 * 2) * VALUE + PAGES):
        run_threads(1, body)
    assert read_manifest(tmp_path / "last").meta["updates"] == 2


def test_on_another_disk_every_step_is_written_and_it_is_said_once(tmp_path, elsewhere):
    def body(group):
        with pytest.warns(RuntimeWarning, match="Expected last_step below the mount of scratch, .*scratch, 1") as found:
            rt = opened(group, tmp_path, last_step=f"{elsewhere}/last")
        assert len(found) == 1
        with rt:
            steps(rt, range(2))
            assert all(name.count("-") < 2 for name in os.listdir(f"{elsewhere}/last"))  # no links
            steps(rt, [2])
            assert rt.resume().updates == 3
            with (
                seams.free(300_000),
                pytest.raises(StorageError, match="for the last step and the one before at /dev/shm"),
            ):
                rt.register("unit2", values(2))

    run_threads(1, body)


@pytest.mark.filterwarnings("ignore:Expected links from")  # the store says so, too
def test_where_links_are_refused_every_step_is_written_to_the_disk_of_scratch(tmp_path):
    def body(group):
        with pytest.warns(RuntimeWarning, match="Expected last_step below the mount of scratch, .*scratch, 100%"):
            rt = opened(group, tmp_path)
        with rt:
            steps(rt, range(2))
            assert all(name.count("-") < 2 for name in os.listdir(tmp_path / "last"))
            return weights(rt)

    with mock.patch.object(os, "link", side_effect=OSError(errno.EXDEV, "Invalid cross-device link")):
        with disk(tmp_path, 20 * VALUE + PAGES):  # what rests there, and two checkpoints
            assert_as_in_memory(run_threads(1, body)[0], 2, ranks=1)
        shutil.rmtree(tmp_path / "last")
        with disk(tmp_path, 19 * VALUE + PAGES), pytest.raises(StorageError, match="'unit1', and the last step beside"):
            run_threads(1, body)


def test_a_directory_that_cannot_be_looked_at_is_told_on_every_rank(tmp_path):
    def body(group):
        with (
            open_offloaded(group, tmp_path / "scratch", EVERYTHING, last_step=tmp_path / "last") as rt,
            pytest.raises(StorageError, match="Stale file handle"),
        ):
            rt.register("unit0", values(0))

    stale = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with seams.inside(room_beside, disk_of=stale):
        run_threads(2, body)


def test_what_cannot_be_asked_for_is_said(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path) as rt, pytest.raises(CallError, match="keeps its last step, got one with"):
            rt.resume()

    run_threads(1, body)
    with pytest.raises(CallError, match="Expected last_step to be a directory, got ''"):
        RuntimeOptions(last_step="")


def test_a_save_may_count_on_the_room_of_the_one_before(tmp_path):
    old = tmp_path / "shard-00000-00000.0123456789abcdef.bin"
    old.write_bytes(bytes(1000))
    with seams.free(500):
        assert not expect_room(str(tmp_path), written=200, linked=300)
        assert expect_room(str(tmp_path), written=200, linked=1300)
        with pytest.raises(StorageError, match="too full"):
            expect_room(str(tmp_path), written=200, linked=1301)
        with pytest.raises(StorageError, match="too full"):
            expect_room(str(tmp_path), written=501, linked=0)
        os.link(old, tmp_path / "another name")
        with pytest.raises(StorageError, match="too full"):
            expect_room(str(tmp_path), written=200, linked=1300)


def test_a_save_elsewhere_on_the_disk_leaves_room_for_the_steps_after_it(tmp_path):
    def body(group):
        with opened(group, tmp_path) as rt:
            steps(rt, range(2))
            rt.save(tmp_path / "last")  # is no other
            with disk(tmp_path, (8 + 6) * VALUE + PAGES):
                with pytest.raises(StorageError, match=r"files of the last step in .*/last, so that the next"):
                    rt.save(tmp_path / "checkpoint")
                steps(rt, [2])
            with disk(tmp_path, (8 + 6 + 6) * VALUE + PAGES):
                rt.save(tmp_path / "checkpoint")
                steps(rt, range(3, 6))  # each asks for its room

    run_threads(1, body)


def test_a_save_beside_one_of_each_step_asks_for_the_next_of_these(tmp_path):
    path, kept = str(tmp_path / "checkpoint"), str(tmp_path / "last")
    with seams.free(800):
        assert not expect_room(path, written=200, linked=300, kept=kept)
        assert not expect_room(path, written=300, linked=200, kept=kept)  # it is written twice, too
        for written, linked in ((200, 301), (301, 200)):
            assert not expect_room(path, written=written, linked=linked, kept=path)
            assert not expect_room(path, written=written, linked=linked, kept="/dev/shm/last")
            with pytest.raises(StorageError, match="hold on to the files of the last step"):
                expect_room(path, written=written, linked=linked, kept=kept)


def test_what_no_step_changes_needs_no_room_beside_its_links(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path / "scratch", EVERYTHING) as rt:
            rt.register("base", values(0), frozen=True)
            head = rt.register("head", values(1))
            head.reduce({name: np.ones_like(value) for name, value in values(1).items()})
            rt.step()
            asked = mock.Mock(wraps=expect_room)
            with seams.inside(save, expect_room=asked):
                rt.save(tmp_path / "elsewhere")
            return asked.call_args.kwargs["linked"]

    (linked,) = run_threads(1, body)
    trained = sum(value.nbytes for value in values(1).values())
    assert 3 * trained <= linked < 4 * trained  # parameters and two moments of the head, in whole pages
