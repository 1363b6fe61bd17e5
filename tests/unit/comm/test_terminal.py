"""A rank draws for a terminal only where its launcher's own output is one, whatever the launcher hands to its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zerort.comm.bootstrap.environment import without_launcher

RANK = """import sys
from zerort.comm.bootstrap.environment import sees_terminal
print(sys.stdout.isatty(), sees_terminal(sys.stdout))"""

# As Open MPI does: ranks write to a pseudo-terminal, and the launcher passes on what it reads there.
LAUNCHER = """
import os, pty, subprocess, sys
ours, theirs = pty.openpty()
ranks = {**os.environ, "OMPI_COMM_WORLD_RANK": "0"}
rank = subprocess.Popen(sys.argv[1:], stdout=theirs, env=ranks)
os.close(theirs)
rank.wait()
os.write(1, os.read(ours, 1000))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    script = tmp_path / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER))
    return [sys.executable, str(script)]


BETWEEN = [pytest.param([], id="at once"), pytest.param(["sh", "-c", '"$@"; exit $?', "sh"], id="from a shell")]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_pseudo_terminal_before_a_pipe_is_none(launcher: list[str], between: list[str]) -> None:
    words = [*launcher, *between, sys.executable, "-c", RANK]
    done = subprocess.run(words, env=without_launcher(), stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("between", BETWEEN)
def test_one_before_a_terminal_is_one(launcher: list[str], between: list[str]) -> None:
    ours, theirs = os.openpty()
    words = [*launcher, *between, sys.executable, "-c", RANK]
    subprocess.run(words, env=without_launcher(), stdout=theirs, timeout=60, check=True)
    os.close(theirs)
    assert os.read(ours, 1000).split() == [b"True", b"True"]
    os.close(ours)


def test_without_a_launcher_the_file_itself_counts() -> None:
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", RANK], env=without_launcher(), stdout=theirs, timeout=60, check=True)
    os.close(theirs)
    assert os.read(ours, 1000).split() == [b"True", b"True"]
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=without_launcher(), stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]
