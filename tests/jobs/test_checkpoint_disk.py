"""Real file systems that are full or read-only: the same error on every rank, and the checkpoint of before intact."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from zerort.checkpoint import read_manifest, verify

JOB = """
import inspect
from unittest import mock
from zerort.checkpoint import Value, load, save
from zerort.checkpoint.files.room import expect_room
from zerort.layout import FlatLayout, Partition

path, numel, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
group = zr.open_group()
layout = FlatLayout.build({"w": (numel,)})
partition = Partition.build(layout.numel, group.size)
values = [Value(kind="parameter", layout=layout, partition=partition, mine=np.ones(partition.counts[group.rank], "f4"))]
if how != "look":  # the disk fills between the look at it and the write
    mock.patch.object(inspect.getmodule(expect_room), "free_nbytes", return_value=None).start()
if how == "write":  # a file system that cannot reserve
    mock.patch.object(os, "posix_fallocate", side_effect=OSError(95, "not supported")).start()
try:
    save(path, group, values, meta={"numel": numel})
    say("rank", group.rank, "saved")
except StorageError as error:
    say("rank", group.rank, "raised", error)
group.close()
"""


@pytest.fixture
def disk(tmp_path: Path):
    """A file system of 12 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


@pytest.mark.parametrize("how", ["look", "reserve", "write"])
def test_a_full_disk(disk: Path, job, how: str) -> None:
    first = job(2, JOB, args=[disk / "c", 1_000_000, how])
    assert first.output.count("saved") == 2, first.output
    before = sorted(os.listdir(disk / "c"))
    # 8 MB more do not fit beside the 4 MB that have to stay.
    second = job(2, JOB, args=[disk / "c", 2_200_000, how])
    texts = dict(re.findall(r"rank (\d) raised (.*)", second.output))
    assert set(texts) == {"0", "1"}, second.output
    for text in texts.values():
        assert re.search(rf"Expected 8\.4\d?MiB \(\d+ bytes\) for a checkpoint at {disk}", text), text
        assert re.search(r"got .*B \(\d+ bytes\) free", text), text
        assert "What was there before is intact. Delete what is no longer needed" in text
    assert sorted(os.listdir(disk / "c")) == before
    assert read_manifest(disk / "c").meta == {"numel": 1_000_000}
    assert verify(disk / "c") == []
    third = job(3, JOB, args=[disk / "c", 1_000_000, how])
    assert third.output.count("saved") == 3, third.output
    assert len(os.listdir(disk / "c")) == 4


def test_a_read_only_disk(disk: Path, job) -> None:
    assert job(2, JOB, args=[disk / "c", 1000, "look"]).output.count("saved") == 2
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for path in (disk / "c", disk / "new" / "c"):
        result = job(2, JOB, args=[path, 1000, "look"])
        assert result.output.count("got Read-only file system. The file system is read-only: mount it") == 2
    assert verify(disk / "c") == []
