"""`Job`: the ranks of one method, started under mpirun, which take steps when told to and sleep otherwise.

They are told over a Unix socket: a rank that waits for its turn takes no core from the method whose turn it is, and
one whose benchmark has died reads the end of the line and leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from peers.work import Method
from zerort.comm.bootstrap.environment import find_launcher, without_launcher

PATIENCE = 900.0
"""Seconds that ranks may take for an answer: DeepSpeed compiles when it is built first, and must not be killed then."""


class JobFailed(Exception):
    """A method's ranks ended, or did not answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps in a row. Times are seconds per step, means over the ranks."""

    seconds: float
    cpu: float
    losses: list[float]
    """Of each step, the mean over the ranks."""
    rss: int
    """Most memory of a rank so far, on the rank that had most; bytes."""


class Job:
    """The ranks of a method, from start to `close`.

    Args:
        name: Its name in `work.METHODS`, or ``reference``.
        method: What it is.
        config: Name of the sizes.
        ranks: How many train; the reference does their work in one process.
        clip: Global norm to scale gradients to, if any.
    """

    def __init__(self, name: str, method: Method, *, config: str, ranks: int, clip: float | None) -> None:
        self.name = name
        self.done = 0
        """Steps taken so far."""
        self.pids: list[int] = []
        """Of the ranks."""
        processes = 1 if method.alone else ranks
        self._room = tempfile.TemporaryDirectory(prefix="zerort-bench-")
        self._log = Path(self._room.name, "log")
        path = str(Path(self._room.name, "socket"))
        words = ["-m", "peers", name, "--config", config, "--ranks", str(ranks), "--socket", path]
        if clip is not None:
            words += ["--clip", str(clip)]
        folders = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = without_launcher() | {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "MASTER_PORT": str(random.randint(20_000, 29_000)),
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._lines: list[socket.socket] = []
        self._files: list[TextIO] = []
        with socket.socket(socket.AF_UNIX) as ear:
            ear.bind(path)
            ear.listen(processes)
            ear.settimeout(0.1)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*find_launcher().command(processes), sys.executable, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            try:
                for _ in range(processes):
                    self._lines.append(self._answered(ear))
                    self._files.append(self._lines[-1].makefile("rw"))
                self.pids = [fact["pid"] for fact in self._hear()]
            except BaseException:
                self.close()
                raise

    def wait_until_built(self) -> float:
        """Return the seconds that the slowest rank took, without importing torch and making the model."""
        return max(fact["start"] for fact in self._hear())

    def take_steps(self, count: int) -> Turn:
        """Let all ranks take some steps, and return when they have."""
        self._say(do="steps", first=self.done, count=count)
        self.done += count
        answers = self._hear()
        everyone = len(answers)
        return Turn(
            seconds=sum(one["seconds"] for one in answers) / everyone,
            cpu=sum(one["cpu"] for one in answers) / everyone,
            losses=[sum(step) / everyone for step in zip(*(one["losses"] for one in answers), strict=True)],
            rss=max(one["rss"] for one in answers),
        )

    def close(self) -> None:
        """End the ranks, whatever they are doing."""
        with contextlib.suppress(OSError, JobFailed):
            self._say(do="close")
            self._hear()
        for line in (*self._files, *self._lines):
            with contextlib.suppress(OSError):
                line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for pid in (*self.pids, self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:  # a launcher may give each rank a group, which has what the rank started
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._room.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answered(self, ear: socket.socket) -> socket.socket:
        for _ in range(int(PATIENCE / 0.1)):
            with contextlib.suppress(TimeoutError):
                line, _ = ear.accept()
                line.settimeout(PATIENCE)
                return line
            if self._process.poll() is not None:
                break
        raise self._failure("its ranks did not start")

    def _say(self, **order: Any) -> None:
        for file in self._files:
            file.write(json.dumps(order) + "\n")
            file.flush()

    def _hear(self) -> list[dict[str, Any]]:
        answers = []
        for file in self._files:
            try:
                text = file.readline()
            except OSError as error:
                raise self._failure(str(error)) from None
            answers.append(json.loads(text) if text else {"error": "a rank has ended"})
        for answer in answers:
            if "error" in answer:
                raise self._failure(answer["error"])
        return answers

    def _failure(self, reason: str) -> JobFailed:
        tail = self._log.read_text(errors="replace").splitlines()[-30:]
        return JobFailed("\n".join([f"{self.name}: {reason}", *tail]))


@contextlib.contextmanager
def peak_pss(job: Job) -> Iterator[list[int]]:
    """Look at the ranks' PSS while the block runs; leave the largest sum of it in the list, in bytes.

    PSS counts a page that n processes share as 1/n in each: their sum is what the machine has to have. A look stops a
    rank for some milliseconds, so nothing is timed meanwhile.
    """
    peak, end = [0], threading.Event()

    def look() -> None:
        while not end.wait(0.02):
            peak[0] = max(peak[0], sum(map(_pss_nbytes, job.pids)))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        end.set()
        watcher.join()


def _pss_nbytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next((int(row.split()[1]) for row in file if row.startswith("Pss:")), 0) * 1024
    return 0
