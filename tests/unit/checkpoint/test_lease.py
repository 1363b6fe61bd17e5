"""Two savers in one directory: one of them saves, the other is told who that is, and neither destroys anything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

import zerort as zr
from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.checkpoint.files import lease
from zerort.checkpoint.files.lease import LEASE, LEASE_SECONDS, Lease
from zerort.errors import CheckpointInUseError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (4096,)})

HOLDER = """
import os, sys
if "slow" in sys.argv:  # registered first, so it runs before zerort's own: the child has closed nothing yet
    os.register_at_fork(after_in_child=lambda: os.read(0, 1))
from zerort.checkpoint.files.lease import Lease
lease = Lease(sys.argv[1])
lease.hold()
if "fork" in sys.argv and os.fork() == 0:
    os.read(0, 1)  # a worker that outlives the one who saves
    os._exit(0)
print("held", flush=True)
os.read(0, 1)
"""


def value(group, fill):
    partition = Partition.build(LAYOUT.numel, group.size)
    mine = np.full(partition.counts[group.rank], fill, np.float32)
    return Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)


def store(path, fill, *, ranks=1):
    run_threads(ranks, lambda group: save(path, group, [value(group, fill)], meta={"fill": fill}))


def loaded(path):
    def body(group):
        mine = value(group, -1)
        manifest = load(path, group, [mine])
        assert (mine.array == manifest.meta["fill"]).all()
        return manifest.meta["fill"]

    return run_threads(1, body)[0]


@contextlib.contextmanager
def holder(path, *words):
    """Another process that has the lease of a directory."""
    path.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def refused(path, *, ranks=2):
    """Save, and return the one text that all ranks saw."""

    def body(group):
        with pytest.raises(CheckpointInUseError) as caught:
            save(path, group, [value(group, 9)], meta={"fill": 9})
        return str(caught.value).removesuffix(" (rank 0)")

    (text,) = set(run_threads(ranks, body))
    return text


def test_the_second_is_told_on_every_rank_who_the_first_is(tmp_path):
    store(tmp_path / "c", 1)
    files = sorted(os.listdir(tmp_path / "c"))
    with holder(tmp_path / "c") as process:
        text = refused(tmp_path / "c", ranks=3)
        assert sorted(os.listdir(tmp_path / "c")) == sorted([*files, LEASE])
    assert f"got process {process.pid} on {socket.gethostname()} (-c), since 20" in text
    assert "Let it end, or name another directory." in text
    assert loaded(tmp_path / "c") == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("fork",)])
def test_one_that_was_killed_holds_nobody_up(tmp_path, words):
    """Nor does its child, which lives on and has all of its descriptors."""
    store(tmp_path / "c", 1)
    with holder(tmp_path / "c", *words) as process:
        process.kill()
        process.wait()
        assert (tmp_path / "c" / LEASE).exists()
        store(tmp_path / "c", 2, ranks=2)
    assert loaded(tmp_path / "c") == 2
    assert not (tmp_path / "c" / LEASE).exists()


def test_its_child_may_be_slow_to_start(tmp_path):
    """A child that was forked but has not run yet has its dead parent's lock: the next saver waits for it."""
    with holder(tmp_path / "c", "fork", "slow") as process:
        process.kill()
        process.wait()
        saver = threading.Thread(target=store, args=(tmp_path / "c", 2))
        with mock.patch.object(lease.time, "sleep", wraps=time.sleep) as looked:
            saver.start()
            while not looked.called and saver.is_alive():
                threading.Event().wait(0.01)
            assert looked.called
            process.stdin.write("x")
            process.stdin.flush()
            saver.join()
    assert loaded(tmp_path / "c") == 2


def test_one_that_was_stopped_is_not_taken_for_dead_on_its_own_machine(tmp_path):
    with holder(tmp_path / "c") as process:
        process.send_signal(signal.SIGSTOP)
        long_ago = time.time() - 10 * LEASE_SECONDS
        os.utime(tmp_path / "c" / LEASE, (long_ago, long_ago))
        assert f"got process {process.pid}" in refused(tmp_path / "c")


def elsewhere(path, *, silent):
    """A lease of another host, whose owner has given no sign of life for so long."""
    path.mkdir(exist_ok=True)
    told = ["0123456789abcdef", ["89abcdef", "0000beef", 77, 1234], "node7", "job 4711", "2026-01-02T03:04:05+00:00"]
    (path / LEASE).write_text(json.dumps(told))
    then = time.time() - silent
    os.utime(path / LEASE, (then, then))


def test_one_on_another_host_is_given_a_minute(tmp_path):
    elsewhere(tmp_path / "c", silent=LEASE_SECONDS - 20)
    text = refused(tmp_path / "c")
    assert "got process 77 on node7 (job 4711), since 2026-01-02T03:04:05+00:00" in text
    assert "its lease ends by itself: start again in 60 s" in text
    elsewhere(tmp_path / "c", silent=LEASE_SECONDS + 5)
    store(tmp_path / "c", 3)
    assert loaded(tmp_path / "c") == 3


@pytest.mark.slow
def test_whoever_waits_for_another_host_goes_on_when_its_minute_is_over(tmp_path):
    elsewhere(tmp_path / "c", silent=LEASE_SECONDS - 1)
    one = Lease(str(tmp_path / "c"))
    one.hold(patience=LEASE_SECONDS)
    assert one.is_held
    one.release()
    elsewhere(tmp_path / "c", silent=LEASE_SECONDS - 30)
    two = Lease(str(tmp_path / "c"))
    silence, looks = two._silence, []

    def look():
        """Its owner gives one sign of life, later after the first look than clocks may differ."""
        looks.append(time.monotonic())
        if looks[-1] - looks[0] > 1.5 and not signs:
            os.utime(tmp_path / "c" / LEASE)
            signs.append(True)
        return silence()

    two._silence, signs = look, []
    with pytest.raises(CheckpointInUseError, match="process 77 on node7"):
        two.hold(patience=LEASE_SECONDS)
    assert signs


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '["a", [1], "b", "c", "d"]', "[" * 2000])
def test_a_lease_that_nobody_can_read_and_nobody_has_locked_is_nobodys(tmp_path, text):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / LEASE).write_text(text)
    store(tmp_path / "c", 4)
    assert loaded(tmp_path / "c") == 4


def test_a_saver_that_was_taken_for_dead_and_is_not_stops_at_the_fence(tmp_path):
    """It is stopped before its manifest counts; another, on a file system without locks, takes over and saves."""
    path = tmp_path / "c"
    store(path, 1)
    reached, go_on = threading.Event(), threading.Event()
    told = []

    class Stalled(Lease):
        def check(self):
            reached.set()
            assert go_on.wait(60)
            super().check()

    def first():
        def body(group):
            with pytest.raises(CheckpointInUseError, match=r"Expected nobody else to save in .* got process \d+ on"):
                save(path, group, [value(group, 2)], meta={"fill": 2}, lease=stalled)
            told.append(group.rank)

        run_threads(2, body)

    stalled = Stalled(str(path))
    with mock.patch.object(lease, "_lock", return_value=None):  # as if there were none across hosts
        thread = threading.Thread(target=first)
        thread.start()
        assert reached.wait(60)
        elsewhere(path, silent=LEASE_SECONDS + 1)  # for all that anybody there can see
        own = Lease(str(path))
        run_threads(1, lambda group: save(path, group, [value(group, 3)], meta={"fill": 3}, lease=own))
        go_on.set()
        thread.join(60)
    assert sorted(told) == [0, 1]
    assert loaded(path) == 3
    assert verify(path) == []
    stalled.release()
    assert own.is_held  # what was lost is not released for its owner
    own.release()
    assert sorted(os.listdir(path)) == sorted(["manifest.json", *(file.name for file in read_manifest(path).files)])


@pytest.mark.slow
def test_savers_and_readers_at_once_leave_whole_checkpoints(tmp_path):
    """Each of two savers saves, or is told; two readers never see damage, nor anything but what was saved."""
    path = tmp_path / "c"
    store(path, 0)
    stop = threading.Event()
    counts = {"saved": 0, "told": 0, "read": 0}
    lock = threading.Lock()
    failures = []

    def until_stopped(work):
        def loop():
            try:
                while not stop.is_set():
                    what = work()
                    with lock:
                        counts[what] += 1
                        if counts["saved"] >= 60 and counts["read"] >= 10:
                            stop.set()
            except BaseException as error:
                failures.append(error)
                stop.set()

        return threading.Thread(target=loop)

    def saver(first):
        numbers = iter(range(first, 10**6, 2))

        def work():
            try:
                store(path, next(numbers))
            except CheckpointInUseError:
                return "told"
            return "saved"

        return work

    def reader():
        assert verify(path) == []
        loaded(path)
        return "read"

    threads = [until_stopped(work) for work in (saver(1), saver(2), reader, reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    assert counts["saved"] >= 60, counts
    assert counts["read"] >= 10, counts
    store(path, -5)
    assert sorted(os.listdir(path)) == sorted(["manifest.json", *(file.name for file in read_manifest(path).files)])


def test_a_requeued_run_is_told_that_its_predecessor_still_keeps_its_steps_there(tmp_path):
    """The first run lives on while the second begins: the second is refused on all ranks, the first loses nothing."""

    def run(group, body):
        with zr.open(group=group, optimizer=zr.SGD(lr=0.5), last_step=tmp_path / "last") as rt:
            unit = rt.register("unit", {"w": np.ones(100, np.float32)})
            return body(rt, unit)

    def step(rt, unit):
        unit.reduce({"w": np.ones(100, np.float32)})
        rt.step()

    def overlapping(rt, unit):
        with pytest.raises(CheckpointInUseError, match=rf"got process {os.getpid()} on .*Close the feed or") as caught:
            rt.resume()
        assert str(tmp_path / "last") in str(caught.value)
        with pytest.raises(CheckpointInUseError, match="Nothing was changed"):
            step(rt, unit)
        return rt.updates

    def predecessor(rt, unit):
        step(rt, unit)
        rt.world.barrier().wait()
        if rt.rank == 0:
            assert run_threads(3, lambda group: run(group, overlapping)) == [0, 0, 0]
        rt.world.barrier().wait()
        step(rt, unit)
        rt.save(tmp_path / "last")  # by hand, beside the steps: it is the same owner
        return rt.updates

    def successor(rt, unit):
        assert rt.resume().updates == 2
        step(rt, unit)

    assert run_threads(2, lambda group: run(group, predecessor)) == [2, 2]
    assert not (tmp_path / "last" / LEASE).exists()
    run_threads(2, lambda group: run(group, successor))
    assert read_manifest(tmp_path / "last").meta["updates"] == 3
