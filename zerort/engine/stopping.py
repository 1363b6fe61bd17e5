"""Signals that ask a run to stop: noted when they come, carried by the next step's agreement to all ranks.

    SIGINT, SIGTERM, SIGUSR1     noted; after the next step `StepReport.stop` is true on every rank
    SIGINT again                 KeyboardInterrupt, here and now
    SIGTERM again                what it does by default: the process ends

Handlers are set while a runtime is open, from the main thread only, and only where nobody else has set one. A signal
that no step has told of when the last runtime closes is sent again, to whoever handles it then. `unbroken` is for what
interrupts a verb all the same (decision 0073).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from zerort.comm import Group
from zerort.comm.guard.failure import write_lines
from zerort.errors import StopRequested

__all__ = ["Stopping", "unbroken"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Signals:
    """What asked this process to stop; one for all runtimes that are open in it."""

    def __init__(self) -> None:
        self._open = 0
        self._earlier: dict[int, object] = {}
        self._seen: set[int] = set()
        self._told = False
        self.number = 0
        """The signal that came first; 0 if none did."""

    def watch(self) -> None:
        """Note signals from now on, until `release` has been called as often as this."""
        self._open += 1
        if self._open == 1:
            self.number, self._told = 0, False
            self._seen.clear()
        if not self._earlier and threading.current_thread() is threading.main_thread():
            for number in filter(_is_default, _SIGNALS):
                self._earlier[number] = signal.signal(number, self._take)

    def release(self, *, who: str, again: bool) -> None:
        """Let signals do again what they did before; send one ``again`` that no step has told of, and say so."""
        self._open -= 1
        if self._open or not self._earlier or threading.current_thread() is not threading.main_thread():
            return  # off the main thread, which alone may set handlers, `_take` hands signals on
        self._restore()
        if again and self.number and not self._told:
            if self.number != signal.SIGINT:  # of which Python tells
                # The launcher ends the other ranks with this one, and may name any of them.
                write_lines(who, f"zerort: ends by {signal.Signals(self.number).name}, which came after its last step.")
            signal.raise_signal(self.number)

    def tell(self) -> None:
        """Take note that all ranks have heard of the signal."""
        self._told = True

    def disown(self) -> None:
        """In a forked child, which trains nothing: signals do what they did before."""
        self._open = self.number = 0
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._take:  # nobody has set another one since
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._earlier.clear()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._open:  # the last runtime was closed by another thread
            self._restore()
            signal.raise_signal(number)
        elif number not in self._seen:
            self._seen.add(number)
            self.number = self.number or number
            if number == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(2, b"zerort: will stop after this step; once more interrupts at once.\n")
        elif number == signal.SIGINT:
            self._told = True
            raise KeyboardInterrupt
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _is_default(number: int) -> bool:
    """Say whether a signal does what it does by default. Handlers of C, as faulthandler's, are unseen by Python."""
    if number == signal.SIGINT:
        return signal.getsignal(number) is signal.default_int_handler
    with contextlib.suppress(OSError):
        if _is_set_by_mpi(number):
            return True
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(("SigCgt:", "SigIgn:")) and int(line.split()[1], 16) >> (number - 1) & 1:
                return False
    return signal.getsignal(number) is signal.SIG_DFL


_signals = _Signals()
os.register_at_fork(after_in_child=_signals.disown)


def _is_set_by_mpi(number: int) -> bool:
    """Say whether a signal's handler is MPI's: MPICH takes SIGUSR1 for itself, and does nothing of use with it."""
    libc = ctypes.CDLL(None)
    action, found = (ctypes.c_void_p * 32)(), (ctypes.c_void_p * 4)()
    libc.sigaction(number, None, action)  # whose first word is the handler
    if not hasattr(libc, "dladdr") or not libc.dladdr(ctypes.c_void_p(action[0]), found) or not found[0]:
        return False
    library = ctypes.cast(found[0], ctypes.c_char_p).value or b""
    return b"libmpi" in os.path.basename(library)


class Stopping:
    """What asks one runtime to stop.

    Args:
        who: What messages call this rank.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._begun = False
        self._heard = self._asked = ""

    @property
    def number(self) -> int:
        """The signal that has asked this rank to stop; 0 if none has."""
        return _signals.number if self._begun else 0

    def begin(self) -> None:
        """Note signals from now on."""
        self._begun = True
        _signals.watch()

    def hear(self, what: str) -> None:
        """Take note of what the ranks have agreed on: which signal came to which rank; nothing if none did."""
        self._heard = what

    def tell(self) -> None:
        """Take note that the caller is told of it: the next step is one too many."""
        if self._heard:
            self._asked = self._heard
            _signals.tell()

    def check(self) -> None:
        """Raise if a step has told that the run is to stop."""
        if self._asked:
            raise StopRequested(
                f"Expected the loop to end after report.stop ({self._asked}), got another step. Nothing was updated. "
                "Save and leave the loop: if report.stop: rt.save(path); break."
            )

    def end(self, *, again: bool = True) -> None:
        """Note signals no more; one that no step has told of does what it would have done without us, if ``again``."""
        if self._begun:
            self._begun = False
            _signals.release(who=self._who, again=again)


@contextlib.contextmanager
def unbroken(verb: str, groups: Iterable[Group]) -> Iterator[None]:
    """Break ``groups`` if a verb is left in its middle by an interrupt: then nobody goes on from there, nor waits."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        for group in groups:
            group.give_up(verb, error)
        raise
