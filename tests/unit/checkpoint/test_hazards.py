"""Savers that were taken for dead, disks that hang, and copies that read while somebody saves: nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import seams

import zerort as zr
from zerort import checkpoint
from zerort.checkpoint import Value, load, read_manifest, reader, save
from zerort.checkpoint.failure import fail_together, with_progress_watch
from zerort.checkpoint.files import lease
from zerort.checkpoint.files.directory import commit_manifest
from zerort.checkpoint.files.lease import LEASE, LEASE_SECONDS, Lease
from zerort.config import GroupOptions
from zerort.errors import CheckpointError, CheckpointInUseError, StorageError
from zerort.layout import FlatLayout, Partition
from zerort.storage.files.activity import on_disk
from zerort.storage.files.owners import this_owner
from zerort.testing import run_threads


def run(path, body, *, ranks=2):
    def opened(group):
        with zr.open(group=group, optimizer=zr.SGD(lr=0.5), last_step=path) as rt:
            unit = rt.register("unit", {"w": np.ones(100, np.float32)})
            return body(rt, unit)

    return run_threads(ranks, opened)


def step(rt, unit):
    unit.reduce({"w": np.ones(100, np.float32)})
    rt.step()


def take_over(path):
    """Be on another host and take the owner of a lease for dead; then say no more."""
    told = ["0123456789abcdef", ["89abcdef", "0000beef", 77, 1234], "node7", "job 4711", "2026-01-02T03:04:05+00:00"]
    (path / "new").write_text(json.dumps(told))
    then = time.time() - LEASE_SECONDS - 5
    os.utime(path / "new", (then, then))
    os.rename(path / "new", path / LEASE)


def test_a_run_that_was_taken_for_dead_overwrites_no_step_of_its_successor(tmp_path):
    """Not after the successor has ended, either: it has to go on from what the successor kept."""
    last = tmp_path / "last"

    def successor(rt, unit):
        assert rt.resume().updates == 2
        step(rt, unit)

    def slow(rt, unit):
        step(rt, unit)
        step(rt, unit)
        rt.world.barrier().wait()
        if rt.rank == 0:
            take_over(last)
            run(last, successor, ranks=1)
            assert not (last / LEASE).exists()
        rt.world.barrier().wait()
        for _ in range(2):
            with pytest.raises(CheckpointInUseError, match=r"got another that took it over.*load what it saved"):
                step(rt, unit)
        with pytest.raises(CheckpointInUseError, match="Nothing was changed"):
            rt.save(last)
        assert read_manifest(last).meta["updates"] == 3
        assert rt.resume().updates == 3
        step(rt, unit)

    run(last, slow)
    assert read_manifest(last).meta["updates"] == 4
    assert not (last / LEASE).exists()


def test_a_run_that_lost_its_directory_begins_it_anew_when_it_resumes(tmp_path):
    last = tmp_path / "last"

    def body(rt, unit):
        step(rt, unit)
        rt.world.barrier().wait()
        if rt.rank == 0:
            shutil.rmtree(last)
        rt.world.barrier().wait()
        with pytest.raises(CheckpointInUseError):
            step(rt, unit)
        assert rt.resume() is None
        step(rt, unit)

    run(last, body)
    assert read_manifest(last).meta["updates"] == 2


def test_copies_of_a_model_that_read_different_checkpoints_are_told(tmp_path):
    """The second copy opens its files when a newer save has replaced those that the first copy has open."""
    path = tmp_path / "c"
    first_copy, replaced = threading.Barrier(2), threading.Event()

    def store(count):
        def body(group):
            with zr.open(group=group, plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.5)) as rt:
                unit = rt.register("unit", {"w": np.ones(100, np.float32)})
                for _ in range(count):
                    step(rt, unit)
                rt.save(path)

        run_threads(1, body)

    def opened(*args, **settings):
        rank = threading.current_thread().name
        if rank in ("rank 0", "rank 1"):
            files = reader.ShardFiles(*args, **settings)
            first_copy.wait(60)
            if rank == "rank 0":
                store(2)
                replaced.set()
            return files
        assert replaced.wait(60)
        return reader.ShardFiles(*args, **settings)

    def body(group):
        mesh = zr.mesh(shard=2, replicate=2, group=group)
        with zr.open(mesh=mesh, plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.5)) as rt:
            unit = rt.register("unit", {"w": np.zeros(100, np.float32)})
            with contextlib.ExitStack() as stack:
                if group.rank == 0:
                    stack.enter_context(
                        seams.inside(load, with_progress_watch=fail_together, ShardFiles=opened)
                    )  # on the rank's own thread
                group.barrier().wait()
                with pytest.raises(CheckpointError, match="Expected all copies of the model to load one checkpoint"):
                    rt.load(path)
                group.barrier().wait()
            with pytest.raises(StorageError, match="got those of a load, half done"):
                rt.save(tmp_path / "laundered")
            assert rt.load(path).updates == 2
            with unit.gathered() as p:
                return float(p["w"][0])

    store(1)
    assert run_threads(4, body) == [0.0] * 4


def test_ranks_with_different_timeouts_decide_alike_that_a_disk_is_stuck(tmp_path):
    gate = threading.Event()

    def body(group):
        if group.rank == 0:
            group._options = dataclasses.replace(group._options, timeout=0.8)
        with pytest.raises(StorageError, match=r"within 1 s, got none on rank 0, which is at: .*/c\. ") as caught:
            with_progress_watch(group, gate.wait if group.rank == 0 else bool, path=str(tmp_path / "c"), name="write")
        group.barrier().wait()
        return str(caught.value)

    with seams.inside(with_progress_watch, _MEET_EVERY=0.2):
        assert len(set(run_threads(3, body))) == 1
    gate.set()


def test_an_operation_longer_than_the_timeout_is_not_stuck_while_others_of_its_rank_end(tmp_path):
    """One block of a slow disk, and small operations beside it: the work is waited for, and gives what it gives."""
    long_ended = threading.Event()

    def others():
        while not long_ended.wait(0.1):
            with on_disk("write", "another block"):
                pass

    def work():
        helper = threading.Thread(target=others)
        helper.start()
        with on_disk("write", str(tmp_path / "block")):
            time.sleep(2.5)
        long_ended.set()
        helper.join()
        return "written"

    def body(group):
        return with_progress_watch(group, work if group.rank == 0 else str, path=str(tmp_path), name="write")

    assert run_threads(2, body, options=GroupOptions(timeout=1.0)) == ["written", ""]


def test_a_child_forked_while_its_lease_is_being_released_does_not_hang(tmp_path):
    """Some thread of the parent has the event's lock at the moment of the fork, and is not there to give it back."""
    one = Lease(str(tmp_path))
    one.hold()
    with one._released._cond:
        child = os.fork()
        if child == 0:
            os._exit(0 if not one.is_held else 1)
    until = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert one.is_held
    one.release()


def test_without_locks_the_lease_of_a_container_that_is_gone_ends_by_itself(tmp_path):
    """It ran on this machine under another host name: nobody here can look for its process."""
    owner = this_owner()._replace(host="89abcdef")
    told = ["0123456789abcdef", owner, "pod-1", "train.py", "2026-01-02T03:04:05+00:00"]

    def left(*, silent):
        (tmp_path / LEASE).write_text(json.dumps(told))
        then = time.time() - silent
        os.utime(tmp_path / LEASE, (then, then))

    one = Lease(str(tmp_path))
    with mock.patch.object(lease, "_lock", return_value=None):
        left(silent=LEASE_SECONDS - 40)
        with pytest.raises(CheckpointInUseError, match=r"on pod-1 .*its lease ends by itself: start again in 60 s"):
            one.hold()
        left(silent=LEASE_SECONDS - 1)
        one.hold(patience=LEASE_SECONDS)  # which waits for the rest
    assert one.is_held
    one.release()


def value(group, fill):
    layout = FlatLayout.build({"w": (4096,)})
    partition = Partition.build(layout.numel, group.size)
    mine = np.full(partition.counts[group.rank], fill, np.float32)
    return Value(kind="parameter", layout=layout, partition=partition, mine=mine)


def store(path, fill, *, ranks=2):
    run_threads(ranks, lambda group: save(path, group, [value(group, fill)], meta={"fill": fill}))


@pytest.mark.slow
def test_a_commit_that_was_given_up_never_counts(tmp_path):
    """It hangs before its rename for longer than anybody waits, and goes on when a newer save is in place."""
    path = tmp_path / "c"
    own = Lease(str(path))
    gate, ended, is_first = threading.Event(), threading.Event(), iter([True])
    failures = []

    def late(where, text, *, token, fence):
        try:
            if next(is_first, False):
                assert gate.wait(60)
                with pytest.raises(StorageError, match="got one that was given up"):
                    commit_manifest(where, text, token=token, fence=fence)
                ended.set()
            else:
                commit_manifest(where, text, token=token, fence=fence)
        except BaseException as error:
            failures.append(error)
            raise

    def old(group):
        with pytest.raises(StorageError, match=r"save commit: Expected some progress .* got none on rank 0") as caught:
            save(path, group, [value(group, 1)], meta={"fill": 1}, lease=own)
        assert caught.value.is_stuck

    def new(group):
        save(path, group, [value(group, 2)], meta={"fill": 2}, lease=own)

    with seams.inside(save, commit_manifest=late):
        run_threads(2, old, options=GroupOptions(timeout=2.0))
        run_threads(2, new)
        gate.set()
        assert ended.wait(60), failures
    assert not failures
    assert read_manifest(path).meta["fill"] == 2
    own.release()
    store(path, 3)
    assert sorted(os.listdir(path)) == sorted(["manifest.json", *(file.name for file in read_manifest(path).files)])


STUCK = """
import sys, threading
import numpy as np
from zerort.checkpoint import Value, save
from zerort.config import GroupOptions
from zerort.errors import StorageError
from zerort.layout import FlatLayout, Partition
from zerort.storage.files.faults import injected
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (4096,)})

def run(at):
    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        mine = np.ones(partition.counts[group.rank], np.float32)
        value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)
        try:
            save(f"{sys.argv[1]}/c{at}-", group, [value], meta={})
        except StorageError as error:
            assert error.is_stuck, error
            return str(error)
        return "saved"

    (told,) = set(run_threads(2, body, options=GroupOptions(timeout=6.0)))
    print(at, told, flush=True)

every = range(1, 23, 3)  # the last is past all of them
with injected(",".join(f"stuck@{at}:op=any:times=all:file=/c{at}-" for at in every)):
    threads = [threading.Thread(target=run, args=(at,)) for at in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
def test_a_disk_that_hangs_as_a_whole_hangs_no_rank(tmp_path):
    """Whichever operation of a save is the first that never returns, as do all after it: both ranks are told."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, tmp_path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(told) == 8, done.stdout
    assert told["22"] == "saved"
    stuck = [text for text in told.values() if text != "saved"]
    assert len(stuck) > 4, told
    assert all("Expected some progress on every rank within 6 s, got none on rank" in text for text in stuck), told


SWEEPING = """
import sys
from zerort.checkpoint.files import sweep
from zerort.storage.files.faults import injected

sweep.AT_ONCE_NBYTES, sweep._END_SECONDS = 0, 0.1
fault = injected("stuck@1:op=unlink")
fault.__enter__()
sweep.sweep(sys.argv[1], ["old"])
print("swept", flush=True)
"""


def test_a_deletion_in_the_background_that_never_returns_keeps_no_process_from_ending(tmp_path):
    (tmp_path / "old").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", SWEEPING, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "swept\n", "")
    assert (tmp_path / "old").exists()  # the next save finds it


@pytest.mark.slow
def test_a_manifest_that_cannot_be_read_to_its_end_is_a_stuck_disk_on_every_rank(tmp_path):
    gate = threading.Event()

    def body(group):
        with zr.open(group=group, optimizer=zr.SGD(lr=0.5)) as rt:
            rt.register("unit", {"w": np.ones(100, np.float32)})
            with pytest.raises(StorageError, match=r"load manifest: Expected some progress on every rank") as caught:
                rt.load(tmp_path)
            assert caught.value.is_stuck
            assert str(tmp_path) in str(caught.value)

    with mock.patch.object(checkpoint, "read_manifest", side_effect=lambda path: gate.wait(60)):
        run_threads(2, body, options=GroupOptions(timeout=2.0))
    gate.set()


ENDING = """
import os, sys, threading
from zerort.checkpoint.files import sweep as module
from zerort.checkpoint.failure import with_progress_watch
from zerort.testing import run_threads
module.AT_ONCE_NBYTES = -1
real = os.unlink
def unlink(path, **options):  # not before the program has come to its end
    if "/old" in os.fspath(path):
        threading.main_thread().join()
    real(path, **options)
os.unlink = unlink
work = lambda: module.sweep(sys.argv[1], ["old", "older"])
run_threads(1, lambda group: with_progress_watch(group, work, path=sys.argv[1], name="save commit"))
"""


def test_files_of_earlier_saves_are_deleted_though_the_program_has_ended(tmp_path):
    """Saves delete on a daemon's thread. A thread that such a one starts is a daemon, too, unless it is told otherwise:
    for a while files stayed where a job ended with its save."""
    for name in ("old", "older"):
        (tmp_path / name).write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", ENDING, tmp_path], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []
