"""One rank's unhandled exception ends the whole job: with its traceback, once, and a non-zero exit.

Without this, a rank that raises sits in MPI_Finalize for ever, and the others wait for it. ``python -m mpi4py`` does
the same for those who think of it; here nobody has to.

    all ranks raise the same     the lowest of them prints it, "on all 8 ranks"
    ranks raise different errors each is printed once, with its ranks
    one raises, others miss it   its error is printed; theirs follow from it
    one leaves, others miss it   their error is printed; the one that left prints its last line
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import sys
import termios
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zerort import forks
from zerort.comm.guard.folded import format_error, likeness
from zerort.comm.guard.standing import exit_code
from zerort.config.environment import read_variable
from zerort.errors import RankFailedError

if TYPE_CHECKING:
    from mpi4py import MPI

    from zerort.comm.guard.last_words import LastWords

__all__ = ["abort_job_on_exception", "code_of_exit", "end_job", "see_others_out", "write_lines"]

_installed = False
_full_traceback = False
_last_words: LastWords | None = None
_home = 0  # the process that has the last words: not a child that was forked
_code_of_exit = 0
_ending = threading.RLock()  # of several threads that raise, the first ends the job: the others wait for that


def abort_job_on_exception(comm: MPI.Intracomm | None = None, *, full_traceback: bool = False) -> None:
    """Make an exception that nobody handles, on any thread of this rank, end all ranks. Calling twice is fine.

    Args:
        comm: Whose ranks call this together. If they are all of the job, they print what they raise alike once.
        full_traceback: Show all frames, those inside zerort included.
    """
    global _installed, _full_traceback, _last_words, _home
    _full_traceback |= full_traceback
    if comm is not None and _last_words is None and _is_whole_job(comm):
        from zerort.comm.guard.last_words import LastWords

        _last_words, _home = LastWords(comm), os.getpid()
    if _installed:
        return
    _installed = True
    stacks = read_variable("ZERORT_STACKS")
    if os.path.isdir(stacks):
        # `zerort.testing` asks a job that hangs where it stands. Each process has a file: they all answer at once.
        file = os.open(os.path.join(stacks, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    earlier_hook, earlier_thread_hook, plain_exit = sys.excepthook, threading.excepthook, sys.exit
    here = forks.generation()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_child = forks.generation() != here  # which ends alone
        if is_child or earlier_hook is not sys.__excepthook__:
            earlier_hook(kind, error, trace)
        if not is_child:
            _end_job_over(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        earlier_thread_hook(arguments)
        if forks.generation() != here:
            return
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:  # which ends its thread only
            _end_job_over(arguments.exc_value)

    def note_exit(status: Any = None, /) -> None:
        global _code_of_exit
        if threading.current_thread() is threading.main_thread():
            _code_of_exit = exit_code(status)
        plain_exit(status)

    sys.excepthook, threading.excepthook = hook, thread_hook
    sys.exit = note_exit  # type: ignore[assignment]  # Python tells nobody else with which code it ends


def _is_whole_job(comm: MPI.Intracomm) -> bool:
    from mpi4py import MPI

    return comm.Get_size() > 1 and MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)


def code_of_exit() -> int:
    """Return what this rank last gave to ``sys.exit``: 0 if it never called it."""
    return _code_of_exit


def see_others_out(*, broken: str = "", patience: float | None = None) -> None:
    """Wait until every rank ends. Who misses this rank meanwhile says so, and this one repeats it. At exit only.

    Args:
        broken: The group that broke, if one did: a rank that is stopped or stuck may never come to its end.
        patience: Seconds after which the job is ended then.
    """
    last_words = _usable_last_words()
    if last_words is not None:
        rank, size = last_words.rank, last_words.size
        ended = f"zerort: rank {rank} of {size} ended before the others:"
        with _ending:
            tell = functools.partial(_repeat, f"rank {rank}", ended)
            if not last_words.see_others_out(tell, code=_code_of_exit, patience=patience):
                late = f"other ranks did not come to their end within {patience:.0f} s: ending all ranks."
                end_job(f"ends after {broken} broke; {late}", code=_code_of_exit or 1)


def _repeat(who: str, ended: str, story: str) -> None:
    write_lines(who, f"{ended} {story}")


def _usable_last_words() -> LastWords | None:
    is_home = os.getpid() == _home
    return _last_words if _last_words is not None and is_home and _last_words.usable else None


def _end_job_over(error: BaseException) -> None:
    from mpi4py import MPI

    if isinstance(error, KeyboardInterrupt):
        end_job("was interrupted; ending all ranks.", code=130)
        return
    text = format_error(error, full=_full_traceback)
    last_words = _usable_last_words()
    if last_words is None:
        end_job("raised; ending all ranks.\n" + text)
        return
    code = 1
    with _ending:
        try:
            said = _tell_together(last_words, error, text)
            if isinstance(error, RankFailedError):  # what a rank asked for: when it left the group, or afterwards
                code = error.exit_code if error.exit_code > 1 else said or 1
            _unlink_segments_of_mpich()
        finally:
            MPI.COMM_WORLD.Abort(code)


def _tell_together(last_words: LastWords, error: BaseException, text: str) -> int:
    """Print ``error`` if this is the lowest rank that raised it; return when all that was raised has been printed.

    Returns:
        The exit code of those who have left, as far as they know it; 0 if they ended well.
    """
    from zerort.comm.guard.last_words import Words

    rank, size = last_words.rank, last_words.size
    story = error.story if isinstance(error, RankFailedError) else ""
    follows = isinstance(error, RankFailedError)
    heard = last_words.exchange(Words(rank, "raised", likeness(error), follows, story))
    raised = sorted((one for one in heard.values() if one.kind == "raised"), key=lambda one: one.rank)
    causes = [one for one in raised if not one.follows] or raised
    alike: dict[str, list[int]] = {}
    for one in causes:
        alike.setdefault(one.like, []).append(one.rank)
    mine = next((ranks for ranks in alike.values() if rank == ranks[0]), None)
    if mine is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        others = [one.rank for one in raised if one not in causes]
        missed = f" ({_ranks(others, size)} missed it and raised, too.)" if others else ""
        write_lines(_ranks(mine, size), f"zerort: {_head(mine, size)}; ending all ranks.{missed}\n{text}")
    tellers = {ranks[0] for ranks in alike.values()}
    if rank == raised[0].rank:
        last_words.wait_until_told(tellers - {rank})
    else:
        last_words.say_told(raised[0].rank)
    return max(one.code for one in heard.values())


def _head(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return f"the same error on all {size} ranks"
    return f"{_ranks(ranks, size)} of {size} raised" + (" the same error" if len(ranks) > 1 else "")


def _ranks(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def end_job(story: str, *, code: int = 1) -> None:
    """End all ranks, once this one's ``story`` has been read by whoever shows it."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    try:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        write_lines(f"rank {rank}", f"zerort: rank {rank} of {size} {story}")
        _unlink_segments_of_mpich()
    finally:
        MPI.COMM_WORLD.Abort(code)


def write_lines(who: str, text: str) -> None:
    """Write lines to stderr, each with who wrote it, and wait until they have been read."""
    _write_all("".join(f"[{who}] {line}\n" for line in text.rstrip().splitlines()).encode())


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
