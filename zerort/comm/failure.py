"""One rank's unhandled exception ends the whole job: with that rank's traceback, and a non-zero exit.

Without this, a rank that raises sits in MPI_Finalize for ever, and the others wait for it. ``python -m mpi4py`` does
the same for those who think of it; here nobody has to. May import: mpi4py.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import termios
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

__all__ = ["abort_job_on_exception", "end_job"]

_installed = False


def abort_job_on_exception() -> None:
    """Make an exception that nobody handles, on any thread of this rank, end all ranks. Calling twice is fine."""
    global _installed
    if _installed:
        return
    _installed = True
    stacks = os.environ.get("ZERORT_STACKS", "")
    if os.path.isdir(stacks):
        # `zerort.testing` asks a job that hangs where it stands. Each process has a file: they all answer at once.
        file = os.open(os.path.join(stacks, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    earlier_hook, earlier_thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if earlier_hook is not sys.__excepthook__:
            earlier_hook(kind, error, trace)
        _end_job_over(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        earlier_thread_hook(arguments)
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:  # which ends its thread only
            _end_job_over(arguments.exc_value)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _end_job_over(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        end_job("was interrupted; ending all ranks.", code=130)
    else:
        end_job("raised; ending all ranks.\n" + "".join(traceback.format_exception(error)))


def end_job(story: str, *, code: int = 1) -> None:
    """End all ranks, once this one's ``story`` has been read by whoever shows it."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    try:
        text = f"zerort: rank {rank} of {size} {story.rstrip()}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        _write_all("".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True)).encode())
        _unlink_segments_of_mpich()
    finally:
        MPI.COMM_WORLD.Abort(code)


def _write_all(raw: bytes) -> None:
    """Write to stderr, and wait until it has been read: a launcher that ends at once would take the story with it."""
    with contextlib.suppress(OSError):
        while raw:  # in one piece if it can be: ranks share a terminal, and several tracebacks would mix
            raw = raw[os.write(2, raw) :]
        deadline = time.monotonic() + 1.0
        unread = array.array("i", [1])
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(2, termios.FIONREAD, unread)  # refused where stderr is no pipe: then nobody has to read it
            time.sleep(0.01)
        time.sleep(0.05)  # from the launcher's daemon on to the launcher


def _unlink_segments_of_mpich() -> None:
    """Remove the names of MPICH's shared memory: an aborted job leaves them behind, a few megabytes each time."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line}:
            with contextlib.suppress(OSError):
                os.unlink(path)
