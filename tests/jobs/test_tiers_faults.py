"""Whole runs on disks that fail: all ranks raise the named error, or go on as if nothing had been; nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerort.checkpoint import read_manifest, verify

TRAIN = """
scratch, path = sys.argv[1:3]
NVME = zr.Tier.NVME
plan = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
options = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
mean = lambda tensors: np.float32(sum(float(value.sum()) for value in tensors.values()) / 20_000)
try:
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=0.01), scratch=scratch, create_scratch=True, offload=options) as rt:
        rank = rt.rank
        units = [rt.register(f"unit{at}", {"w": np.full(20_000, 1 + at, "float32")}) for at in range(2)]
        if "load" in sys.argv:
            say(f"rank {rank} loads update", rt.load(path).updates)
        for step in range(rt.updates, 8):
            for unit in units:
                with unit.gathered() as p:
                    gradient = p["w"] + np.float32(rank + step)
                unit.reduce({"w": gradient})
            rt.step()
            if step == 3:
                rt.save(path)
            if step == 5 and rank == 1:
                if "raise" in sys.argv:
                    raise ValueError("of the user's loop")
                if "interrupt" in sys.argv:
                    os.kill(os.getpid(), signal.SIGINT)
        rt.save(path)
        say(f"rank {rank} done", zr.engine.step.digest.digest_of(rt.context, rt.units))
except StorageError as error:
    say(f"rank {rank} raised {type(error).__name__}: {error}")
"""


@pytest.fixture
def run(job, tmp_path):
    """Train on 2 ranks with a fault in the files of rank 1, and see to it that nothing is left in shared memory."""
    shared = Path("/dev/shm") / f"zerort-test-faults-{os.getpid()}"
    shared.mkdir()

    def train(fault="", *words, ranks=2):
        env = {"ZERORT_FAULT": fault, "ZERORT_SHM_DIR": str(shared), "ZERORT_TIMEOUT": "30"}
        return job(ranks, TRAIN, args=[tmp_path / "scratch", tmp_path / "checkpoint", *words], env=env)

    yield train
    assert os.listdir(shared) == []
    shared.rmdir()


def left_in(scratch: Path) -> list[str]:
    return sorted(os.listdir(scratch))


@pytest.fixture(scope="module")
def digests() -> dict[int, str]:
    return {}


def test_a_run_without_faults(run, tmp_path: Path, digests) -> None:
    result = run()
    assert result.code == 0, result.output
    assert result.output.count("done") == 2
    digests[0] = result.output.split("done")[1].split()[0]
    assert left_in(tmp_path / "scratch") == []


HERE = "file=zerort-offload:rank=1"


@pytest.mark.parametrize(
    "fault",
    [
        f"delay@20:seconds=0.02:times=20:{HERE}",
        f"eio@50:op=read:{HERE}",  # tried again, it works
        f"eio@50:op=write:{HERE}",
        f"short@20:times=all:{HERE}",
        f"flip@60:op=read:{HERE}",  # read again, it is right
    ],
)
def test_what_passes_does_not_show(run, tmp_path: Path, digests, fault: str) -> None:
    result = run(fault)
    assert result.code == 0, result.output
    assert [line.split()[-1] for line in result.output.splitlines() if "done" in line] == [digests[0]] * 2
    assert left_in(tmp_path / "scratch") == []
    assert verify(tmp_path / "checkpoint") == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (f"eio@280:op=read:times=all:{HERE}", "StorageError: Expected to read and write"),
        (f"eio@230:op=write:times=all:{HERE}", "StorageError: Expected to read and write"),
        (f"enospc@230:op=write:times=all:{HERE}", "StorageError: Expected room for"),
        (f"torn@230:op=write:{HERE}", "CorruptStorageError: Expected bytes with the crc32c"),
        (f"flip@230:op=write:{HERE}", "CorruptStorageError: Expected bytes with the crc32c"),
    ],
)
def test_what_stays_ends_the_run_with_one_error_on_all_ranks(
    run, tmp_path: Path, digests, fault: str, error: str
) -> None:
    """The checkpoint from before verifies, and a run that goes on from it ends as one that was never disturbed."""
    result = run(fault)
    assert not result.timed_out, result.output
    told = [line for line in result.output.splitlines() if "raised" in line]
    assert len(told) == 2, result.output
    for rank, line in enumerate(sorted(told)):
        assert line.startswith(f"rank {rank} raised {error}")
        assert "zerort-offload" in line
        assert "rank 1" in line.partition("raised")[2]
    assert left_in(tmp_path / "scratch") == []
    assert verify(tmp_path / "checkpoint") == []
    assert read_manifest(tmp_path / "checkpoint").meta["updates"] == 4
    again = run("", "load")
    assert again.output.count("loads update 4") == 2, again.output
    assert [line.split()[-1] for line in again.output.splitlines() if "done" in line] == [digests[0]] * 2


def test_a_rank_that_is_killed_leaves_a_checkpoint_that_loads_and_files_that_the_next_run_deletes(
    run, tmp_path: Path, digests
) -> None:
    killed = run(f"kill@540:{HERE}")
    assert killed.code not in (0, 124), killed.output
    assert any("-r1-" in name for name in left_in(tmp_path / "scratch"))
    assert verify(tmp_path / "checkpoint") == []
    again = run("", "load")
    assert [line.split()[-1] for line in again.output.splitlines() if "done" in line] == [digests[0]] * 2
    assert left_in(tmp_path / "scratch") == []


@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_an_exception_in_the_users_loop_leaves_nothing(run, tmp_path: Path, how: str) -> None:
    result = run("", how)
    assert result.code not in (0, 124), result.output
    assert "done" not in result.output
    assert left_in(tmp_path / "scratch") == []
    assert verify(tmp_path / "checkpoint") == []
