"""Shared memory: files without names, and what killed jobs of an MPI library left."""

import os
import subprocess
import sys
import textwrap

import pytest
import seams

from zerort.comm.bootstrap.leftovers import abandoned, sees_every_process, sweep
from zerort.comm.transports.node.memory import slab_nbytes
from zerort.comm.transports.node.window import SharedFile, map_file
from zerort.config import GroupOptions
from zerort.errors import SharedMemoryError


@pytest.mark.parametrize("named", [False, True])
def test_a_shared_file_is_mapped_by_another_process_and_leaves_nothing(tmp_path, named):
    file = SharedFile(str(tmp_path), 5000, named=named)
    mine = map_file(file.path)
    assert len(os.listdir(tmp_path)) == named
    code = f"from zerort.comm.transports.node.window import map_file; map_file({file.path!r})[4999] = 7"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mine.size == 5000
    assert mine[4999] == 7
    file.close()
    file.close()
    assert not os.listdir(tmp_path)
    mine[0] = 1  # the mapping outlives the file
    with pytest.raises(SharedMemoryError, match="Expected the shared memory that another rank"):
        map_file(file.path)


def test_a_file_system_that_knows_no_files_without_names_is_served_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel without it sees
    file = SharedFile(str(tmp_path), 5000)
    assert not os.listdir(tmp_path)
    assert map_file(file.path).size == 5000
    file.close()


@pytest.mark.parametrize("named", [False, True])
def test_a_shared_file_that_finds_no_room_leaves_nothing(tmp_path, named):
    with pytest.raises(SharedMemoryError, match=r"Expected room for .* bytes of shared memory"):
        SharedFile(str(tmp_path), 1 << 60, named=named)
    assert not os.listdir(tmp_path)


def test_segments_of_killed_jobs_are_removed_and_those_in_use_are_not(tmp_path):
    names = ["mpich_shm_1_0", "mpich_shm_2_0", "sm_segment.host.0", "mpich_shm_young", "notes", "zerort-data.bin"]
    (tmp_path / "mpich_shm_directory").mkdir()
    os.utime(tmp_path / "mpich_shm_directory", (0, 0))
    for name in names:
        (tmp_path / name).write_bytes(bytes(5000))
        if name != "mpich_shm_young":
            os.utime(tmp_path / name, (0, 0))
    mapped = textwrap.dedent(
        f"""
        import mmap, os
        descriptor = os.open({str(tmp_path / "mpich_shm_2_0")!r}, os.O_RDWR)
        memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        print("mapped", flush=True)
        input()
        """
    )
    with (
        subprocess.Popen([sys.executable, "-c", mapped], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user,
        open(tmp_path / "sm_segment.host.0", "rb"),
    ):
        assert user.stdout.readline() == b"mapped\n"
        assert set(abandoned(str(tmp_path))) == {str(tmp_path / "mpich_shm_1_0")}
        gone = sweep(str(tmp_path))
        user.communicate(b"\n")
    assert gone == ([str(tmp_path / "mpich_shm_1_0")] if sees_every_process() else [])
    assert {entry.name for entry in tmp_path.iterdir()} >= {"mpich_shm_2_0", "sm_segment.host.0", *names[3:]}


def test_nothing_is_swept_where_processes_may_be_hidden(tmp_path):
    (tmp_path / "mpich_shm_1_0").write_bytes(b"x")
    os.utime(tmp_path / "mpich_shm_1_0", (0, 0))
    with seams.inside(sweep, _FIRST_PROCESS_SPACE=1):
        assert sweep(str(tmp_path)) == []
    assert (tmp_path / "mpich_shm_1_0").exists()


def test_many_ranks_of_a_host_share_the_default_and_get_what_a_user_asked_for(monkeypatch):
    assert slab_nbytes(GroupOptions().staging_nbytes, 64) == 512 * 1024
    monkeypatch.setenv("ZERORT_STAGING_BYTES", "16MiB")
    assert slab_nbytes(GroupOptions.from_environment().staging_nbytes, 64) == 16 * 1024**2
