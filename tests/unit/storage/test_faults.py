"""Faults that are injected are survived, or named with file, offset and rank; the text that injects them is read."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zerort import trace
from zerort.errors import CallError, CorruptStorageError, StorageError
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files import faults as faults_module
from zerort.storage.files.faults import KINDS, injected, parse
from zerort.streaming import Pipeline, StoreTransfer

NBYTES = 3 * 1024**2


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path, rank=5) as store:
        store.create("value", NBYTES)
        yield store
    assert list(tmp_path.iterdir()) == []


def some(seed=0):
    return np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)


def test_what_the_variable_says():
    [fault] = parse("eio@3").faults
    assert (fault.kind, fault.at, fault.times, fault.operations, fault.rank) == ("eio", 3, 1, ("read", "write"), None)
    first, second = parse(" delay@2:seconds=0.5:op=read:times=all , kill@9:rank=1:file=exp ").faults
    assert (first.seconds, first.operations, first.times) == (0.5, ("read",), math.inf)
    assert (second.kind, second.rank, second.file) == ("kill", 1, "exp")
    assert parse("") is None
    assert parse(" , ") is None
    for kind in KINDS:
        assert parse(f"{kind}@1").faults[0].operations == KINDS[kind]


@pytest.mark.parametrize(
    "text", ["eio", "eio@", "eio@0", "boom@1", "eio@x", "eio@1:times=x", "eio@1:op=fly", "eio@1:what=1", "eio@1:rank=a"]
)
def test_what_does_not_read_as_a_fault_is_refused(text):
    with pytest.raises(CallError, match="ZERORT_FAULT"):
        parse(text)


def test_only_the_rank_and_file_that_are_meant(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "2")
    found = parse("short@1:rank=2:file=exp_avg:times=all")
    assert found.meet("read", "/d/exp_avg.chunk") == {"short"}
    assert found.meet("read", "/d/other.chunk") == frozenset()
    assert found.meet("sync", "/d/exp_avg.chunk") == frozenset()
    monkeypatch.setenv("PMI_RANK", "1")
    assert found.meet("read", "/d/exp_avg.chunk") == frozenset()


def test_the_environment_is_read_once_and_a_wrong_text_is_an_error(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom zerort.storage import NvmeStore\nfrom zerort.errors import CallError\n"
        "try:\n    NvmeStore(sys.argv[1])\nexcept CallError as error:\n    print('refused', error)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env={**os.environ, "ZERORT_FAULT": "nonsense"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "refused Expected ZERORT_FAULT to read like" in answer.stdout
    assert os.listdir(tmp_path) == []


def test_without_the_variable_nothing_is_asked(tmp_path, monkeypatch):
    """The one test of a file's faults is whether there are any."""
    monkeypatch.setattr(faults_module.Faults, "meet", None)
    with NvmeStore(tmp_path) as store:
        store.create("value", 10)
        store.write("value", np.ones(10, np.uint8)).wait()
        assert store.read("value", np.zeros(10, np.uint8)).wait().sum() == 10


@pytest.mark.parametrize(
    "fault", ["eio@1", "eio@1:times=2", "short@1:times=all", "delay@1:seconds=0.05", "flip@1:op=read"]
)
@pytest.mark.parametrize("aligned", [True, False])
def test_what_passes_is_survived(store, fault, aligned):
    """EIO that passes, short moves, delays, and a bit that is flipped on its way back: the bytes are right."""
    from zerort.device import HostDevice

    data = HostDevice().empty(NBYTES, "uint8", alignment=4096 if aligned else 64)
    data[:] = some()
    out = HostDevice().empty(NBYTES, "uint8", alignment=4096 if aligned else 64)
    before = trace.counters()
    with injected(f"{fault},{fault}:op=write" if "op=" not in fault else fault):
        store.write("value", data).wait()
        store.read("value", out).wait()
    assert np.array_equal(out, data)
    after = trace.counters()
    if fault.startswith("eio"):
        assert after["offload.retries"] > before.get("offload.retries", 0)
    if fault.startswith("flip"):
        assert after["offload.rereads"] > before.get("offload.rereads", 0)


def test_a_delay_delays(store):
    with injected("delay@1:seconds=0.2:op=write"):
        began = time.perf_counter()
        store.write("value", some()).wait()
    assert time.perf_counter() - began >= 0.2


@pytest.mark.parametrize("operation", ["read", "write"])
def test_eio_that_stays_is_raised_with_everything(store, operation):
    with injected(f"eio@1:times=all:op={operation}"):
        ticket = getattr(store, operation)("value", some())
        with pytest.raises(StorageError) as caught:
            ticket.wait()
    text = str(caught.value)
    assert re.search(r"value\.chunk at offset 0 on rank 5, got Input/output error\. The disk reports an error", text)
    store.write("value", some(1)).wait()
    assert np.array_equal(store.read("value", some()).wait(), some(1))


def test_a_full_disk_is_raised_with_the_numbers(store):
    with injected("enospc@1:op=write"), pytest.raises(StorageError, match=r"on rank 5, got .*bytes\) free: No space"):
        store.write("value", some()).wait()
    with (
        injected("enospc@1:op=reserve"),
        pytest.raises(StorageError, match=r"Expected 1MiB \(1048576 bytes\) for 'new'"),
    ):
        store.create("new", 1024**2)
    assert [name for name in os.listdir(store.path) if "new" in name] == []
    store.create("new", 1024**2)


@pytest.mark.parametrize("fault", ["torn@1", "flip@1"])
def test_what_a_disk_claims_to_have_written_is_found_out(store, fault):
    with injected(fault):
        store.write("value", some()).wait()
    with pytest.raises(CorruptStorageError) as caught:
        store.read("value", some()).wait()
    assert re.search(
        r"crc32c [0-9a-f]{8}, as written at offset \d+ of .*value\.chunk \('value' of rank 5\), got [0-9a-f]{8}\.",
        str(caught.value),
    )
    store.write("value", some(1)).wait()  # what is written anew is good again
    assert np.array_equal(store.read("value", some()).wait(), some(1))


def test_checks_can_be_turned_off(tmp_path):
    with NvmeStore(tmp_path, options=NvmeOptions(checksum=False)) as store, injected("flip@1"):
        store.create("value", NBYTES)
        store.write("value", some()).wait()
        assert (store.read("value", some(1)).wait() != some()).sum() == 1


def test_a_write_that_nobody_waits_for_fails_in_flush_and_warns_at_the_end(tmp_path):
    with NvmeStore(tmp_path) as store:
        store.create("value", NBYTES)
        with injected("eio@1:times=all:op=write"):
            store.write("value", some())
            with pytest.raises(StorageError, match="Input/output error"):
                store.flush()
            store.flush()  # said once
            store.write("value", some())
            with pytest.warns(RuntimeWarning, match="1 writes failed and nobody waited"):
                store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_sync_that_fails_is_raised(store):
    store.write("value", some()).wait()
    with injected("eio@1:op=sync:times=all"), pytest.raises(StorageError, match="rank 5"):
        store.flush()


@pytest.mark.parametrize("synced_by", ["flush", "link"])
def test_a_sync_that_failed_once_is_not_believed_the_next_time(store, tmp_path, synced_by):
    store.write("value", some()).wait()
    with injected("eio@1:op=sync"), pytest.raises(StorageError, match="Input/output error"):
        store.flush() if synced_by == "flush" else store.link("value", str(tmp_path / "link"))
    for refused in (store.flush, lambda: store.link("value", str(tmp_path / "link"))):
        with pytest.raises(CorruptStorageError, match="as was said before"):
            refused()
    store.delete("value")
    store.create("value", NBYTES)
    store.write("value", some()).wait()
    store.flush()


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"kill", "stuck"}))
def test_any_fault_at_any_operation_is_survived_or_named(tmp_path, kind):
    """Three steps over state on a disk: they end with the right bytes, or with an error that names the file."""
    numel, ended = 200_000, set()
    for at in range(1, 40, 2):
        with NvmeStore(tmp_path, options=NvmeOptions(retries=1)) as store:
            store.create("value", 4 * numel)
            chunks = [[StoreTransfer(store=store, name="value", numel=50_000, offset=k * 200_000)] for k in range(4)]
            try:
                with injected(f"{kind}@{at}:seconds=0.01"), Pipeline(slot_nbytes=200_704) as pipeline:
                    for _ in range(3):
                        pipeline.run(chunks, lambda number, x: x.__iadd__(1))
                    found = store.read("value", np.empty(numel, np.float32)).wait()
                assert (found == 3).all()
                ended.add("well")
            except StorageError as error:
                ended.add(type(error).__name__ if "value.chunk" in str(error) else str(error))
        assert list(tmp_path.iterdir()) == []
    assert ended == {
        "delay": {"well"},
        "eio": {"well"},
        "short": {"well"},
        "torn": {"CorruptStorageError", "well"},
        "flip": {"CorruptStorageError", "well"},
        "eintr": {"well"},
        "enospc": {"StorageError", "well"},
    }.get(kind, {"StorageError"})


def test_checkpoints_take_part(tmp_path):
    """The checkpoint of before stays when the disk of the next one fails."""
    from zerort.checkpoint import Value, read_manifest, save, verify
    from zerort.layout import FlatLayout, Partition
    from zerort.testing import run_threads

    layout = FlatLayout.build({"w": (1000, 100)})
    partition = Partition.build(layout.numel, 2)

    def body(group):
        mine = np.ones(partition.counts[group.rank], np.float32)
        value = Value(kind="parameter", layout=layout, partition=partition, mine=mine)
        save(tmp_path / "c", group, [value], meta={"step": step})

    step = 1
    run_threads(2, body)
    step = 2
    for fault in ("eio@1:op=write", "enospc@2:op=reserve", "eio@1:op=sync"):
        with injected(fault), pytest.raises(StorageError):
            run_threads(2, body)
        assert read_manifest(tmp_path / "c").meta == {"step": 1}
        assert verify(tmp_path / "c") == []
    with injected("flip@1"):
        run_threads(2, body)
    assert len(verify(tmp_path / "c")) == 1
