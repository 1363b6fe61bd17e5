"""What a directory can do is found before anything is put there; too little room is refused with the numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import seams

from zerort.errors import CallError, StorageError
from zerort.storage import inspect
from zerort.storage.files.faults import injected
from zerort.storage.files.mounts import mount_of

SMALL = 4 * 2**20


def test_a_good_directory(tmp_path: Path) -> None:
    report = inspect(tmp_path, needed=1000, sample_nbytes=SMALL)
    assert report.free_nbytes > SMALL
    assert min(report.write_gbs, report.read_gbs) <= report.gbs <= max(report.write_gbs, report.read_gbs)
    assert report.alignment in ((512, 1024, 2048, 4096) if report.direct else (None,))
    assert report.seconds(read=10**9, written=0) == pytest.approx(1 / report.read_gbs)
    assert str(tmp_path) in str(report)
    assert os.listdir(tmp_path) == []


def test_the_mount_that_a_directory_lies_on_is_named(tmp_path: Path) -> None:
    point, device, kind = inspect(tmp_path, sample_nbytes=SMALL).mount
    assert point == next(str(one) for one in (tmp_path, *tmp_path.parents) if os.path.ismount(one))
    assert f"{device} {point} {kind} " in Path("/proc/mounts").read_text()
    assert f"{tmp_path} on {point} ({kind} on {device}): " in str(inspect(tmp_path, sample_nbytes=SMALL))
    shm = mount_of("/dev/shm/not/there")
    assert (shm.point, shm.kind) == ("/dev/shm", "tmpfs")


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"Expected a directory for .* at {tmp_path}/new, got none: .* mkdir -p"):
        inspect(tmp_path / "new", sample_nbytes=SMALL)
    assert os.listdir(tmp_path) == []


def test_too_little_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        inspect(tmp_path, needed=2**60, what="the optimizer's state", rank=1)
    assert re.search(
        rf"Expected 1024PiB \({2**60} bytes\) for the optimizer's state at {tmp_path} on rank 1, got .*bytes\) free",
        str(caught.value),
    ), caught.value
    with (
        seams.free(100),
        pytest.raises(StorageError, match="4MiB"),
    ):
        inspect(tmp_path, sample_nbytes=SMALL)


def test_a_disk_that_fills_while_it_is_measured_is_refused_with_the_sample(tmp_path: Path) -> None:
    with injected("enospc@1"), pytest.raises(StorageError, match=rf"Expected 4MiB \({SMALL} bytes\) for .*No space"):
        inspect(tmp_path, sample_nbytes=SMALL)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="got a file"):
        inspect(tmp_path / "file")
    with pytest.raises(StorageError, match="A part of the path is a file"):
        inspect(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_right_to_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="Give this user the right"):
        inspect(tmp_path / "locked")


def test_a_disk_that_fails_while_it_is_measured_leaves_nothing(tmp_path: Path) -> None:
    with injected("eio@1:times=all"), pytest.raises(StorageError, match="Input/output error"):
        inspect(tmp_path, sample_nbytes=SMALL)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CallError):
        inspect(tmp_path, needed=-1)
