"""Whose directory it is, is read from its name; only what dead runs of this host left is deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import seams
from hypothesis import given
from hypothesis import strategies as st

from zerort.storage import NvmeStore
from zerort.storage.files.owners import is_dead, this_owner
from zerort.storage.scratch import Scratch, clean_up, file_name, owner_of


def name_of(owner, token="0123abcd"):
    return f"zerort-offload-{owner.host}-{owner.boot}-{owner.pid}-{owner.start}-r0-{token}"


@pytest.fixture
def dead():
    """Return what names a process of this host that is gone."""
    child = subprocess.run(
        [sys.executable, "-c", "from zerort.storage.files.owners import this_owner; print(*this_owner())"],
        capture_output=True,
        text=True,
        check=True,
    )
    host, boot, pid, start = child.stdout.split()
    return this_owner()._replace(host=host, boot=boot, pid=int(pid), start=int(start))


@given(st.lists(st.text(min_size=1, max_size=300), unique=True, max_size=20))
def test_names_of_files_are_stable_short_and_different(names):
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert files == [file_name(name) for name in names]
    for file in files:
        assert len(file.encode()) < 256
        assert "/" not in file
        assert file.endswith(".chunk")


def test_a_process_is_dead_or_alive(dead):
    me = this_owner()
    assert owner_of(name_of(me)) == me
    assert not is_dead(me)
    assert is_dead(dead)
    assert is_dead(me._replace(start=me.start - 1))  # its number was given to another
    assert is_dead(me._replace(boot="00000000"))  # the machine was booted since
    assert not is_dead(dead._replace(host="00000000"))  # nobody knows
    # On a network's file system: booted since, or another machine of the same name.
    assert not is_dead(me._replace(boot="00000000"), on_this_machine=False)
    assert is_dead(dead, on_this_machine=False)


def test_a_machine_of_the_same_name_keeps_its_scratch_on_a_networks_file_system(tmp_path: Path, dead):
    """flock is each client's own there: the lock of a run on another machine can be had on this one."""
    live, left = tmp_path / name_of(this_owner()._replace(boot="00000000")), tmp_path / name_of(dead)
    for directory in (live, left):
        directory.mkdir()
        (directory / "value.chunk").write_bytes(b"x")
    with seams.inside(clean_up, file_system=lambda path: "nfs4"):
        assert clean_up(str(tmp_path)) == [left.name]
    assert (live / "value.chunk").exists()


def test_a_link_put_in_the_place_of_a_scratch_directory_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "value.chunk").write_text("mine")
    scratch = Scratch(str(tmp_path), rank=0)
    Path(scratch.file("value")).write_text("scratch")
    os.rename(scratch.path, tmp_path / "moved")
    os.symlink(mine, scratch.path)
    scratch.remove()
    assert (mine / "value.chunk").read_text() == "mine"
    assert not list((tmp_path / "moved").iterdir())


def test_only_what_dead_runs_left_is_deleted(tmp_path: Path, dead) -> None:
    me = this_owner()
    left = tmp_path / name_of(dead)
    booted = tmp_path / name_of(me._replace(boot="00000000"))
    others = [
        tmp_path / name_of(me),
        tmp_path / name_of(dead._replace(host="00000000")),
        tmp_path / "zerort-kept-0123abcd-r0",
        tmp_path / (name_of(dead) + ".bak"),
        tmp_path / "zerort-offload-results",
        tmp_path / "data",
    ]
    for directory in (left, booted, *others):
        directory.mkdir()
        (directory / "value.chunk").write_bytes(b"x" * 100)
    (tmp_path / "file.chunk").write_text("mine")
    used = tmp_path / name_of(dead, token="11111111")
    used.mkdir()
    (used / "a.chunk").write_text("left")
    (used / "notes.txt").write_text("mine")
    link = tmp_path / name_of(dead, token="22222222")
    link.symlink_to(tmp_path / "data")
    before = {path for other in others for path in [other, *other.iterdir()]}

    with NvmeStore(tmp_path) as store:
        assert set(store.cleaned) == {left.name, booted.name}
    assert not left.exists()
    assert not booted.exists()
    assert all(path.exists() for path in before)
    assert os.listdir(used) == ["notes.txt"]  # what is ours is gone, what is not stays
    assert (tmp_path / "data" / "value.chunk").exists()
    assert (tmp_path / "file.chunk").exists()


def test_a_lock_protects_what_a_name_calls_dead(tmp_path: Path, dead) -> None:
    """A container with process numbers of its own has names that look dead from outside."""
    scratch = Scratch(str(tmp_path), rank=0)
    moved = tmp_path / name_of(dead)
    os.rename(scratch.path, moved)
    scratch.path = str(moved)
    (moved / "a.chunk").write_text("alive")
    assert clean_up(str(tmp_path)) == []
    assert (moved / "a.chunk").exists()
    scratch._unlock()
    assert clean_up(str(tmp_path)) == [moved.name]


def test_a_directory_that_is_not_there_has_nothing_to_clean(tmp_path: Path) -> None:
    assert clean_up(str(tmp_path / "nowhere")) == []
