"""One rank's unhandled exception ends the whole job: with that rank's traceback, and a non-zero exit.

Without this, a rank that raises sits in MPI_Finalize for ever, and the others wait for it. ``python -m mpi4py`` does
the same for those who think of it; here nobody has to. May import: mpi4py.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from types import TracebackType

__all__ = ["abort_job_on_exception"]

_installed = False


def abort_job_on_exception() -> None:
    """Make an exception that nobody handles, on any thread of this rank, end all ranks. Calling twice is fine."""
    global _installed
    if _installed:
        return
    _installed = True
    if os.environ.get("ZERORT_STACKS", "0") != "0":
        faulthandler.register(
            signal.SIGUSR1, all_threads=True
        )  # `zerort.testing` asks a job that hangs where it stands
    earlier_hook, earlier_thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if earlier_hook is not sys.__excepthook__:
            earlier_hook(kind, error, trace)
        _end_job(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        earlier_thread_hook(arguments)
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:  # which ends its thread only
            _end_job(arguments.exc_value)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _end_job(error: BaseException) -> None:
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    story = "".join(traceback.format_exception(error))
    text = f"zerort: rank {rank} of {size} raised; ending all ranks.\n{story}"
    # One write: the ranks share a terminal, and lines of several tracebacks would mix.
    os.write(2, "".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True)).encode())
    sys.stdout.flush()
    MPI.COMM_WORLD.Abort(1)
