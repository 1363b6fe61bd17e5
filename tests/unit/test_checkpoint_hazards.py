"""Savers that were taken for dead, disks that hang, and copies that read while somebody saves: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest

import zerort as zr
from zerort.checkpoint import read_manifest
from zerort.checkpoint.lease import LEASE, LEASE_SECONDS
from zerort.errors import CheckpointInUseError
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
            with pytest.raises(CheckpointInUseError, match="got another that took it over.*load what it saved"):
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
