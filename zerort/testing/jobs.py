"""`run_job`: N ranks as processes under mpirun; one that hangs is shown with every rank's stacks, then ended.

The processes of a job are found by a mark in their environment, not by parentage: a launcher puts daemons between
itself and its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerort.comm.bootstrap.environment import find_launcher, without_launcher

__all__ = ["JobResult", "run_job", "signal_all", "wait_for_job"]

_MARK = "ZERORT_JOB"
_SHM = "/dev/shm/"
_LOOK_EVERY = 0.25
"""Seconds between looks at what the ranks have mapped."""
_DUMP_FOR = 3.0
"""Seconds that ranks get to write their stacks before they are killed."""
_GONE_WITHIN = 30.0
"""Seconds that killed processes get to be gone; one that waits for a stuck disk is not."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended."""

    code: int
    """The launcher's exit code; 124 if the job was ended because its time was up."""
    output: str
    """What all ranks wrote, mixed as it came."""
    seconds: float
    left: tuple[str, ...] = ()
    """Files in /dev/shm that its processes had mapped, and that are still there: MPI's own shared memory, too."""

    @property
    def timed_out(self) -> bool:
        """Whether the job had to be ended."""
        return self.code == 124


def run_job(
    ranks: int,
    words: Sequence[str | Path],
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    echo: bool = False,
) -> JobResult:
    """Start ``ranks`` processes of ``python words…`` and wait for them.

    Args:
        ranks: How many.
        words: The script and its arguments, as one would give them to ``python``.
        timeout: Seconds; then all stacks are dumped into the output and the job is ended with code 124.
        env: Variables to add to this process's environment.
        cwd: Where to start; here if None.
        echo: Also show the output as it comes.
    """
    command = [*find_launcher().command(ranks), sys.executable, *map(str, words)]
    return wait_for_job(command, timeout=timeout, env=env, cwd=cwd, echo=echo)


def wait_for_job(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    echo: bool = False,
) -> JobResult:
    """Run a launcher's ``command`` as `run_job` does."""
    mark = uuid.uuid4().hex
    began = time.monotonic()
    # Into a file, not a pipe: processes that outlive the launcher would keep a pipe open, and us waiting for its end.
    with tempfile.TemporaryFile() as sink, tempfile.TemporaryDirectory(prefix="zerort-stacks-") as stacks:
        environment = {**without_launcher(), "ZERORT_STACKS": stacks, **(env or {}), _MARK: mark}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=cwd
        )
        mapped: set[str] = set()
        try:
            code = _follow(process, mark, sink.fileno(), began + timeout, echo=echo, mapped=mapped)
            if code is None:
                code = 124
                signal_all(f"{_MARK}={mark}", signal.SIGUSR1)
                time.sleep(_DUMP_FOR)
                for file in sorted(Path(stacks).iterdir()):
                    os.write(sink.fileno(), b"\n" + file.read_bytes())
                os.write(sink.fileno(), f"\nzerort: the job was ended after {timeout:.0f} s.\n".encode())
        finally:
            process.kill()
            process.wait()
            _end(mark)
        sink.seek(0)
        output = sink.read().decode(errors="replace")
    if echo and code == 124:
        print(output)
    return JobResult(code, output, time.monotonic() - began, tuple(sorted(filter(os.path.exists, mapped))))


def _follow(
    process: subprocess.Popen[bytes], mark: str, sink: int, deadline: float, *, echo: bool, mapped: set[str]
) -> int | None:
    shown, looked = 0, time.monotonic()
    while True:
        code = process.poll()
        if time.monotonic() - looked >= _LOOK_EVERY:
            mapped.update(_mapped(mark))
            looked = time.monotonic()
        if echo:
            fresh = os.pread(sink, 1 << 20, shown)
            shown += len(fresh)
            sys.stdout.write(fresh.decode(errors="replace"))
            sys.stdout.flush()
        if code is not None or time.monotonic() > deadline:
            return code
        time.sleep(0.02)


def _end(mark: str) -> None:
    """Kill what is left of a job and wait until it is gone: a dying process still has its files open and mapped."""
    deadline = time.monotonic() + _GONE_WITHIN
    while time.monotonic() < deadline:
        signal_all(f"{_MARK}={mark}", signal.SIGKILL)  # each time: what was being forked is there by now
        if next(_processes(f"{_MARK}={mark}"), None) is None:
            return
        time.sleep(0.02)


def signal_all(variable: str, number: signal.Signals) -> None:
    """Send a signal to every Python process with a variable in its environment; a killing one to any other, too.

    Args:
        variable: As ``NAME=value``, or how that begins. Processes that those start inherit it.
        number: The signal.
    """
    for entry in _processes(variable):
        with contextlib.suppress(OSError):
            if number == signal.SIGKILL or "python" in os.readlink(entry / "exe"):
                os.kill(int(entry.name), number)


def _processes(variable: str) -> Iterator[Path]:
    """Yield the entries in /proc of other processes with a variable in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours
                if variable.encode() in (entry / "environ").read_bytes():
                    yield entry


def _mapped(mark: str) -> Iterator[str]:
    """Yield the files in /dev/shm that processes of the job have mapped."""
    for entry in _processes(f"{_MARK}={mark}"):
        with contextlib.suppress(OSError):
            for line in (entry / "maps").read_text(errors="replace").splitlines():
                _, found, name = line.partition(f" {_SHM}")
                if found and not name.endswith(" (deleted)"):
                    yield _SHM + name
