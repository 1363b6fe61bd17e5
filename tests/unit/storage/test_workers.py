"""Threads that are lent and kept: steps that are saved start none after the first few."""

import errno
import os
import threading
import warnings

import numpy as np
import pytest

import zerort as zr
from zerort.storage.files import blocks
from zerort.storage.files.workers import lend


def test_a_thread_is_lent_again():
    names = []
    for _ in range(3):
        assert lend(lambda: names.append(threading.get_ident())).wait(60)
    assert len(set(names)) == 1


def test_work_of_two_runs_at_the_same_time():
    both = threading.Barrier(2, timeout=60)
    done = [lend(both.wait) for _ in range(2)]
    assert all(one.wait(60) for one in done)


def test_a_forked_child_is_lent_threads_of_its_own():
    assert lend(lambda: None).wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads that the child lacks
        child = os.fork()
    if child == 0:
        os._exit(0 if lend(lambda: None).wait(60) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_that_a_worker_cannot_have_is_the_callers_error(monkeypatch):
    def refuse(nbytes):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    done = []
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "aligned_buffer", refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            blocks.run_workers(8, lambda task, buffer: done.append(task), threads=4, buffer_nbytes=2**40)
    assert not done
    blocks.run_workers(8, lambda task, buffer: done.append(task), threads=4, buffer_nbytes=4096)
    assert sorted(done) == list(range(8))


def test_steps_that_are_kept_start_no_threads(tmp_path, monkeypatch):
    """A thread that ends gives memory back, and UCX, below MPICH, keeps a note of that for ever."""
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self))[1])
    plan = zr.Plan.zero(3, state=zr.Tier.NVME)
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=0.1), scratch=str(tmp_path), last_step=str(tmp_path / "last")) as rt:
        unit = rt.register("block", {"w": np.ones(5000, np.float32)})

        def step():
            unit.reduce({"w": np.ones(5000, np.float32)})
            rt.step()

        for _ in range(3):
            step()
        before = list(started)
        for _ in range(20):
            step()
    assert started == before
