"""Start ranks from a process that is none itself, and end them whatever happens.

The launcher and all it starts live in a session of their own. However this process leaves (Ctrl-C, SIGTERM, a timeout,
an error), the launcher is asked to end its ranks, and what is left of that session a little later is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zerort.comm.bootstrap.environment import find_launcher, without_launcher

__all__ = ["Finished", "ending_as_exit", "run_command", "run_here", "run_ranks"]

_GRACE = 5.0
"""Seconds that a launcher gets to end its ranks."""


class Finished(NamedTuple):
    """How a command ended."""

    code: int | None
    """Its exit code; None if its time was up."""
    out: str
    """What it printed, if that was captured."""
    errors: str
    """What it complained, if that was captured."""


def run_ranks(
    ranks: int,
    words: list[str],
    *,
    capture: bool = False,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run ``python words…`` on ``ranks`` ranks of this machine and wait for their end.

    Args:
        ranks: How many to start.
        words: What this Python gets as arguments.
        capture: Keep what they print instead of letting it through.
        timeout: Seconds after which they are ended; None waits for ever.
        env: Variables that they get if this process's environment does not set them.

    Raises:
        BootstrapError: There is no launcher.
    """
    command = [*find_launcher().command(ranks), sys.executable, *words]
    return run_command(command, capture=capture, timeout=timeout, env={**(env or {}), **os.environ})


def run_here(words: list[str], *, timeout: float) -> Finished:
    """Run ``python words…`` as one process that knows of no launcher, and keep what it prints."""
    return run_command([sys.executable, *words], capture=True, timeout=timeout, env=without_launcher())


def run_command(
    command: list[str],
    *,
    capture: bool = False,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run any command in a session of its own, as `run_ranks` does, in the environment that is given."""
    pipe = subprocess.PIPE if capture else None
    with ending_as_exit():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=env,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            out, errors = process.communicate()
            return Finished(None, out or "", errors or "")
        except BaseException:
            _end(process)
            raise
    return Finished(process.returncode, out or "", errors or "")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(leader: int) -> Iterator[int]:
    """Yield the processes whose session ``leader`` leads: those that it started, and theirs."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry)) == leader:
                    yield int(entry)


@contextlib.contextmanager
def ending_as_exit() -> Iterator[None]:
    """Let SIGTERM leave through the same door as Ctrl-C: a killed parent must not leave ranks or hosts behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
