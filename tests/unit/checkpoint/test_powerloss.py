"""The power fails after any operation, and what was not synced is there or not: a whole checkpoint always is.

`make test` cuts at every few operations; ``ZERORT_EVERY=1`` (`make powerloss`) at all of them.
"""

from __future__ import annotations

import os
import shutil
from unittest import mock

import numpy as np
import pytest
from power_loss import DiskLog, put
from runs import EVERYTHING

import zerort as zr
from zerort.checkpoint import Value, exists, read_manifest, save, verify
from zerort.checkpoint.files import sweep
from zerort.errors import CheckpointError
from zerort.layout import FlatLayout, Partition
from zerort.storage.files import disk
from zerort.testing import run_threads

EVERY = os.environ.get("ZERORT_EVERY") == "1"
LAYOUT = FlatLayout.build({"w": (3000,), "b": (3,)})


def look_at_all(log, directory, found, *, stride):
    """Look at all that a restart may find in a directory; return how many states that are, and those that are lost.

    A state is lost if there is no whole checkpoint in it that is at least as new as the last save that had returned.
    """
    states, lost = 0, []
    for returned, state in log.states(str(directory), stride=1 if EVERY else stride):
        put(found, state)
        states += 1
        try:
            updates = read_manifest(found).meta["updates"] if exists(found) else 0
            damages = verify(found) if exists(found) else []
        except CheckpointError as error:
            lost.append(f"after {returned}: {error}")
            continue
        if damages or not returned <= updates <= returned + 1:
            lost.append(f"after {returned}: {updates}, {damages[:1]}")
    return states, lost


@pytest.mark.parametrize("at_once", [True, False])
def test_saves_of_what_is_in_memory(tmp_path, at_once):
    """Into a directory that is new, and so is the one above it; old files are deleted at once, or by a thread."""
    log = DiskLog()
    path = tmp_path / "above" / "c"

    def body(group):
        for updates in range(1, 4):
            partition = Partition.build(LAYOUT.numel, group.size)
            mine = np.full(partition.counts[group.rank], updates, np.float32)
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)
            save(path, group, [value], meta={"updates": updates})
            group.barrier().wait()
            if group.rank == 0:
                log.mark(updates)
            group.barrier().wait()

    with disk.watched(log.watch), mock.patch.object(sweep, "AT_ONCE_NBYTES", 10**9 if at_once else 0):
        run_threads(2, body)
        sweep.wait_for_sweeps()
    states, lost = look_at_all(log, path, tmp_path / "found", stride=3)
    print(f"{len(log.operations)} operations, {states} states, {len(lost)} lost")
    assert not lost, lost[:3]
    assert states > 50


def test_steps_that_are_kept_by_links(tmp_path):
    """Parameters and state rest in files that a kept step takes over as they are."""
    log = DiskLog()

    def body(group):
        options = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
        (tmp_path / "scratch").mkdir()
        settings = {"optimizer": zr.AdamW(lr=0.1), "scratch": tmp_path / "scratch", "offload": options}
        with zr.open(plan=EVERYTHING, group=group, last_step=tmp_path / "last", **settings) as rt:
            unit = rt.register("unit", {"w": np.linspace(-1, 1, 1500, dtype=np.float32)})
            for _ in range(3):
                unit.reduce({"w": np.ones(1500, np.float32)})
                rt.step()
                log.mark(rt.updates)

    with disk.watched(log.watch):
        run_threads(1, body)
    states, lost = look_at_all(log, tmp_path / "last", tmp_path / "found", stride=7)
    print(f"{len(log.operations)} operations, {states} states, {len(lost)} lost")
    assert not lost, lost[:3]
    assert states > 50


@pytest.mark.parametrize("missing", ["sync", "syncdir"])
def test_a_save_that_forgets_to_sync_is_found_out(tmp_path, missing):
    """The check itself: without the syncs of one kind there are states in which nothing is left."""
    log = DiskLog()

    def forgetful(kind, path, *more):
        if kind != missing:
            log.watch(kind, path, *more)

    def body(group):
        for updates in (1, 2):
            partition = Partition.build(LAYOUT.numel, 1)
            mine = np.full(LAYOUT.numel, updates, np.float32)
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)
            save(tmp_path / "c", group, [value], meta={"updates": updates})
            log.mark(updates)

    with disk.watched(forgetful):
        run_threads(1, body)
    _, lost = look_at_all(log, tmp_path / "c", tmp_path / "found", stride=3)
    assert lost
    shutil.rmtree(tmp_path / "found")
