"""`make test-loaded`: the busy processes are there while the command runs, and gone afterwards, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOADED = [sys.executable, str(Path(__file__).parents[1] / "loaded.py")]

# Says which processes its parent has started beside it.
COUNT = """
import os, sys
children = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
print(*[one for one in open(children).read().split() if one != str(os.getpid())], flush=True)
sys.exit(3)
"""


def is_alive(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_they_run_beside_the_command_and_end_with_it() -> None:
    done = subprocess.run([*LOADED, "2", sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True, check=False)
    busy = [int(one) for one in done.stdout.split()]
    assert (done.returncode, len(busy)) == (3, 2)
    assert not any(map(is_alive, busy))


def test_they_end_even_if_nobody_ends_them() -> None:
    script = COUNT.replace("sys.exit(3)", "sys.stdin.read()")
    words = [*LOADED, "1", sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loaded:
        assert loaded.stdout is not None
        (busy,) = map(int, loaded.stdout.readline().split())
        assert is_alive(busy)
        os.kill(loaded.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_alive(busy) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(busy)


@pytest.mark.parametrize("words", [[], ["2"], ["many", "true"]])
def test_nonsense_is_refused(words: list[str]) -> None:
    done = subprocess.run([*LOADED, *words], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "Expected a number of busy processes and a command" in done.stderr
