"""Blocks move whole, past the page cache or not, and a worker that fails stops the others."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from zerort.checkpoint.files.sweep import sweep, wait_for_sweeps
from zerort.storage.files.blocks import BlockFile, aligned_buffer, run_workers


def test_buffers_start_at_a_page() -> None:
    for nbytes in (0, 1, 4096, 5_000_000):
        buffer = aligned_buffer(nbytes)
        assert (buffer.size, buffer.ctypes.data % 4096) == (nbytes, 0)
        buffer[:] = 1


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = aligned_buffer(3 * 4096)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size)
    with BlockFile(str(tmp_path / "f"), create_nbytes=5 * 4096) as file:
        file.write(data, 4096)
        file.sync()
        assert file.nbytes == 5 * 4096
        found = aligned_buffer(8 * 4096)
        assert file.read(found, 0) == 5 * 4096
        assert np.array_equal(found[4096 : 4 * 4096], data)
    file.close()  # twice is fine
    with pytest.raises(FileExistsError):
        BlockFile(str(tmp_path / "f"), create_nbytes=4096)


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_a_file_system_without_o_direct_is_served_without(tmp_path: Path, call: str) -> None:
    """Some refuse it when the file is opened, some when it is used, one makes the file and then refuses."""
    real = getattr(os, call)

    def refuse(first, *more, **options):
        if call == "open" and more[0] & os.O_DIRECT:
            os.close(real(first, more[0] & ~os.O_DIRECT, *more[1:]))
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        if call != "open":
            import fcntl

            if fcntl.fcntl(first, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(first, *more, **options)

    data = aligned_buffer(8192)
    data[:] = 7
    with mock.patch.object(os, call, refuse), BlockFile(str(tmp_path / "f"), create_nbytes=8192) as file:
        file.write(data, 0)
        found = aligned_buffer(8192)
        assert file.read(found, 0) == 8192
        assert not file.direct
    assert (found == 7).all()


def test_who_is_refused_o_direct_while_another_gives_it_up_goes_on_too(tmp_path: Path) -> None:
    data, found = aligned_buffer(4096), aligned_buffer(4096)
    data[:] = 7
    real, refusals = os.preadv, []

    def refuse(descriptor, parts, at):
        if len(refusals) < 2:
            refusals.append(at)
            if len(refusals) == 1:  # in the middle of this read another one is refused, and gives O_DIRECT up
                assert file.read(aligned_buffer(4096), 0) == 4096
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(descriptor, parts, at)

    with BlockFile(str(tmp_path / "f"), create_nbytes=4096) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT in the directory for tests")
        file.write(data, 0)
        with mock.patch.object(os, "preadv", refuse):
            assert file.read(found, 0) == 4096
        assert not file.direct
    assert (found == 7).all()
    assert len(refusals) == 2


def test_short_moves_go_on_where_they_stopped(tmp_path: Path) -> None:
    real_write, real_read = os.pwritev, os.preadv
    data = aligned_buffer(4 * 4096)
    data[:] = np.arange(data.size) % 251
    with (
        mock.patch.object(os, "pwritev", lambda fd, parts, at: real_write(fd, [parts[0][:4096]], at)),
        mock.patch.object(os, "preadv", lambda fd, parts, at: real_read(fd, [parts[0][:4096]], at)),
        BlockFile(str(tmp_path / "f"), create_nbytes=data.size) as file,
    ):
        file.write(data, 0)
        found = aligned_buffer(data.size)
        assert file.read(found, 0) == data.size
    assert np.array_equal(found, data)


def test_a_file_that_cannot_be_reserved_is_not_left_behind(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "full")
    with mock.patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(OSError, match="full"):
        BlockFile(str(tmp_path / "f"), create_nbytes=4096)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_every_task_is_done_once_with_a_buffer_of_its_own(threads: int) -> None:
    done: list[int] = []
    busy: set[int] = set()
    lock = threading.Lock()

    def work(task: int, buffer) -> None:
        address = buffer.ctypes.data
        with lock:
            assert address not in busy
            busy.add(address)
            done.append(task)
        buffer[:] = task % 256
        with lock:
            busy.discard(address)

    run_workers(200, work, threads=threads, buffer_nbytes=4096)
    assert sorted(done) == list(range(200))
    run_workers(0, work, threads=threads, buffer_nbytes=0)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_task_stops_the_rest(threads: int) -> None:
    done: list[int] = []

    def work(task: int, buffer) -> None:
        if task == 5:
            raise OSError(errno.EIO, "broken")
        done.append(task)

    with pytest.raises(OSError, match="broken"):
        run_workers(10_000, work, threads=threads, buffer_nbytes=16)
    assert len(done) < 9_000


def test_many_bytes_are_deleted_in_the_background(tmp_path: Path) -> None:
    release = threading.Event()
    real = os.unlink
    names = []
    for at in range(3):
        with (tmp_path / f"f{at}").open("wb") as file:
            file.truncate(20 * 2**20)
        names.append(f"f{at}")

    def slow(path, **options):
        assert release.wait(200)
        real(path, **options)

    with mock.patch.object(os, "unlink", slow):
        sweep(str(tmp_path), [*names, "gone"])
        assert len(os.listdir(tmp_path)) == 3  # nobody had to wait
        release.set()
        wait_for_sweeps()
    assert os.listdir(tmp_path) == []
