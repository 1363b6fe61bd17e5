"""``kill -9`` at any point of a save leaves a checkpoint that loads and verifies; the next save succeeds and cleans up.

Every system call of a save is a point: a child saves with two ranks (threads) and kills itself at the n-th call, for
every n. Then real jobs, where one rank kills itself and the launcher ends the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zerort.checkpoint import Value, load, read_manifest, verify
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads

STATE = """
import os, signal, sys, threading
import numpy as np
from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.layout import FlatLayout, Partition

LAYOUT = FlatLayout.build({"w": (5000, 1000), "b": (1000,), "scale": ()})
CALLS = ("mkdir", "open", "posix_fallocate", "pwritev", "write", "fsync", "rename", "unlink")

def values_of(group, step):
    partition = Partition.build(LAYOUT.numel, group.size)
    mine = np.full(partition.counts[group.rank], step, np.float32)
    return [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(number, *, only=None, calls=CALLS):
    \"\"\"Kill this process at the n-th of these calls; a write has then written half.\"\"\"
    lock = threading.Lock()
    seen = 0
    for name in calls:
        def fatal(*words, _real=getattr(os, name), _name=name, **options):
            nonlocal seen
            with lock:
                seen += 1
                if seen == number:
                    if _name == "pwritev":
                        _real(words[0], [words[1][0][: words[1][0].size // 8192 * 4096]], words[2])
                    die()
            return _real(*words, **options)
        setattr(os, name, fatal)
"""

LOOP = (
    STATE
    + """
from zerort.checkpoint.files.sweep import wait_for_sweeps
from zerort.testing import run_threads

path = sys.argv[1]

def in_child(work):
    \"\"\"Return whether the work was killed; it must not fail in any other way.\"\"\"
    child = os.fork()
    if child == 0:
        try:
            work()
            wait_for_sweeps()  # as the end of a process does, which this one cuts short
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0

def save_at(step, number=None):
    def work():
        if number is not None:
            kill_at(number)
        run_threads(2, lambda group: save(path, group, values_of(group, step), meta={"step": step}))
    return work

def step_of_checkpoint():
    \"\"\"Return the step of the checkpoint, every byte of which is right.\"\"\"
    assert verify(path) == []
    def body(group):
        values = values_of(group, -1)
        step = load(path, group, values).meta["step"]
        for overlap in LAYOUT.overlaps(*values[0].partition.of(group.rank)):
            assert (values[0].mine[overlap.in_range] == step).all()
        return step
    return run_threads(3, body)[0]

def files():
    return {name for name in os.listdir(path)}

assert not in_child(save_at(0))
number, committed, killed, early, late = 1, 0, True, 0, 0
while killed:
    step = number
    killed = in_child(save_at(step, number))
    found = step_of_checkpoint()
    assert found in (committed, step), (found, committed, step)
    if killed and found == committed:
        early += 1
    elif killed:
        late += 1
    committed = found
    if number % 4 == 0 or not killed:
        committed = 1000 + number
        assert not in_child(save_at(committed))
        assert step_of_checkpoint() == committed
        assert files() == {"manifest.json", *(file.name for file in read_manifest(path).files)}
    number += 1
print(number, "points", early, "before the rename", late, "after")
assert early >= 15 and late >= 3
"""
)


def test_every_system_call_of_a_save_is_survived(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    answer = subprocess.run(
        [sys.executable, script, tmp_path / "c"], capture_output=True, text=True, check=False, timeout=280
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "points" in answer.stdout


JOB = (
    STATE.replace("from zerort.layout", "import zerort as zr\nfrom zerort.layout", 1)
    + """
path, who, step, call, number = sys.argv[1], *map(str, sys.argv[2:])
group = zr.open_group()
if who == str(group.rank):
    kill_at(int(number), calls=(call,))
save(path, group, values_of(group, int(step)), meta={"step": int(step)})
group.close()
"""
)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint whose every byte is right."""
    assert verify(path) == []
    layout = FlatLayout.build({"w": (5000, 1000), "b": (1000,), "scale": ()})
    buffer = np.zeros(layout.numel, np.float32)
    partition = Partition.build(layout.numel, 1)
    value = Value(kind="parameter", layout=layout, partition=partition, mine=buffer)
    step = run_threads(1, lambda group: load(path, group, [value]))[0].meta["step"]
    assert all((buffer[extent.slice] == step).all() for extent in layout.extents)
    return int(step)


def test_a_rank_of_a_real_job_is_killed_while_it_saves(tmp_path: Path) -> None:
    from zerort.testing import run_job

    script = tmp_path / "job.py"
    script.write_text(JOB)
    path = tmp_path / "c"

    def job(who: int | str, step: int, call: str = "-", number: int = 0) -> int:
        return run_job(3, [script, path, who, step, call, number], timeout=280, cwd=tmp_path).code

    assert job("nobody", 1) == 0
    assert step_of(path) == 1
    for who, call, number, survives in (
        (2, "posix_fallocate", 1, 1),
        (2, "pwritev", 1, 1),
        (0, "fsync", 2, 1),  # of the draft of the manifest
        (0, "rename", 1, 1),
        (0, "unlink", 1, 2),  # of the first file of before: the new one counts already
    ):
        code = job(who, 2, call, number)
        assert code not in (0, 124)
        assert step_of(path) == survives, (who, call)
    assert len(os.listdir(path)) > 4  # what killed saves left lying
    assert job("nobody", 3) == 0
    assert step_of(path) == 3
    assert sorted(os.listdir(path)) == ["manifest.json", *(file.name for file in read_manifest(path).files)]


@pytest.mark.parametrize("who", [0, 1])
def test_the_others_hear_of_a_rank_that_fails_between(tmp_path: Path, job, who: int) -> None:
    """A rank that raises something of its own while saving is an error on all, and the checkpoint of before stays."""
    code = STATE.split("def die")[0] + (
        """
import zerort as zr
from zerort.checkpoint import save as _
import importlib
module = importlib.import_module("zerort.checkpoint.save")
path, who = sys.argv[1], int(sys.argv[2])
group = zr.open_group()
save(path, group, values_of(group, 1), meta={"step": 1})
if group.rank == who:
    def broken(*words, **options):
        raise MemoryError("no memory for a buffer")
    module.write_shard = broken
try:
    save(path, group, values_of(group, 2), meta={"step": 2})
except (MemoryError, zr.errors.ZerortError) as error:
    say("rank", group.rank, "raised", type(error).__name__, error)
group.close()
"""
    )
    result = job(2, code, args=[tmp_path / "c", who])
    assert result.code == 0, result.output
    assert f"rank {who} raised MemoryError no memory for a buffer" in result.output
    assert f"rank {1 - who} raised RankFailedError Rank {who} failed: MemoryError: no memory" in result.output
    assert step_of(tmp_path / "c") == 1
