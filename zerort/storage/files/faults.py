"""Break the disk on purpose: ``ZERORT_FAULT`` makes the n-th file operation late, refused, short, flipped or fatal.

    ZERORT_FAULT=eio@3                        the third read or write is refused with EIO; tried again, it works
    ZERORT_FAULT=eio@3:times=all              the third and all after it
    ZERORT_FAULT=enospc@2:op=write:rank=1     the second write of rank 1 finds the disk full
    ZERORT_FAULT=delay@1:seconds=0.2:times=9,kill@40

    kind      what happens                                                  operations, unless op= says
    delay     it takes `seconds` longer (1 by default)                      read write sync
    eio       it is refused: input/output error                             read write
    enospc    it is refused: no space left on device                        write reserve
    short     it moves half of its pages and says so, as kernels may        read write
    torn      it writes half of its pages and claims to have written all    write
    flip      one bit is other than it was                                  write
    kill      the process is killed (SIGKILL) before it                     read write sync reserve
    stuck     it never returns                                              read write sync
    edquot, erofs, estale, eintr, enomem                                    refused with that; read write

Settings after the number: ``op`` (one of read, write, sync, reserve: blocks of data; create, append, link, rename,
unlink, syncdir, mkdir, rmdir: names and small files; or ``any``), ``rank`` (of the launcher), ``file`` (a part of the
path), ``times`` (a number or ``all``), ``seconds``. Several faults are separated by commas; each counts the operations
that it is for. Without the variable a file has no faults and asks nothing. Files of stores and checkpoints take part.
"""

# not-gpu: it hangs on purpose
from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from zerort.comm.bootstrap.environment import launched_rank
from zerort.config.environment import read_variable
from zerort.errors import CallError

__all__ = ["KINDS", "VARIABLE", "Fault", "Faults", "current", "injected", "parse"]

VARIABLE: Final = "ZERORT_FAULT"

KINDS: Final = {
    "delay": ("read", "write", "sync"),
    "eio": ("read", "write"),
    "enospc": ("write", "reserve"),
    "short": ("read", "write"),
    "torn": ("write",),
    "flip": ("write",),
    "kill": ("read", "write", "sync", "reserve"),
    "stuck": ("read", "write", "sync"),
    "edquot": ("read", "write"),
    "erofs": ("read", "write"),
    "estale": ("read", "write"),
    "eintr": ("read", "write"),
    "enomem": ("read", "write"),
}
"""Which operations each kind of fault is for, unless it says otherwise."""

_NAMES = ("create", "append", "link", "rename", "unlink", "syncdir", "mkdir", "rmdir")  # disk.py
_OPERATIONS = ("read", "write", "sync", "reserve", *_NAMES)
_CODES = {name: getattr(errno, name.upper()) for name in KINDS if hasattr(errno, name.upper())}
_FAULT = re.compile(r"([a-z]+)@(\d+)((?::[a-z]+=[^:,]+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when."""

    kind: str
    """A row of `KINDS`."""
    at: int
    """The first operation that it meets, counted from 1 among those that it is for."""
    times: float = 1
    """How many in a row; infinite for all."""
    operations: tuple[str, ...]
    """What it is for."""
    rank: int | None = None
    """Whom it is for; None is everybody."""
    file: str = ""
    """A part of the path of the files that it is for."""
    seconds: float = 1.0
    """How long a delay is."""

    def concerns(self, operation: str, path: str) -> bool:
        """Say whether an operation is one that this fault counts."""
        return operation in self.operations and self.file in path and self.rank in (None, launched_rank() or 0)


class Faults:
    """Some faults, and how many operations each has seen."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._seen = [0] * len(self.faults)
        self._lock = threading.Lock()

    def meet(self, operation: str, path: str) -> frozenset[str]:
        """Count an operation; wait, raise or die if that is its fate, and return the kinds that its caller carries out.

        Args:
            operation: Which; see the table above.
            path: The file.

        Raises:
            OSError: The operation is refused.
        """
        due = []
        with self._lock:
            for at, fault in enumerate(self.faults):
                if fault.concerns(operation, path):
                    self._seen[at] += 1
                    if fault.at <= self._seen[at] < fault.at + fault.times:
                        due.append(fault)
        for fault in due:
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "stuck":
                threading.Event().wait()
            elif fault.kind in _CODES:
                raise OSError(_CODES[fault.kind], os.strerror(_CODES[fault.kind]), path)
        return frozenset(fault.kind for fault in due)


def parse(text: str) -> Faults | None:
    """Read what the variable says; None if it says nothing.

    >>> parse("eio@3:op=read:times=all").faults[0].operations
    ('read',)

    Raises:
        CallError: It does not read as faults.
    """
    faults = [_parse_one(part.strip()) for part in text.split(",") if part.strip()]
    return Faults(faults) if faults else None


def _parse_one(text: str) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None or found[1] not in KINDS or int(found[2]) < 1:
        raise CallError(
            f"Expected {VARIABLE} to read like eio@3 or delay@1:seconds=0.5:op=read, with one of {', '.join(KINDS)}; "
            f"got {text!r}. Correct or unset it."
        )
    settings = dict(part.split("=", 1) for part in found[3].split(":")[1:])
    try:
        times = settings.pop("times", "1")
        rank = settings.pop("rank", None)
        named = settings.pop("op", "")
        operations = _OPERATIONS if named == "any" else (named,) if named else KINDS[found[1]]
        fault = Fault(
            kind=found[1],
            at=int(found[2]),
            times=math.inf if times == "all" else int(times),
            operations=operations,
            rank=None if rank is None else int(rank),
            file=settings.pop("file", ""),
            seconds=float(settings.pop("seconds", "1")),
        )
    except ValueError as error:
        raise CallError(f"Expected numbers in {VARIABLE}, got {text!r} ({error}). Correct or unset it.") from None
    if settings or operations[0] not in _OPERATIONS:
        raise CallError(
            f"Expected the settings op ({', '.join(_OPERATIONS)}), rank, file, times and seconds in {VARIABLE}, got "
            f"{text!r}. Correct or unset it."
        )
    return fault


_reading = threading.Lock()
_read = False
_current: Faults | None = None


def current() -> Faults | None:
    """Return the faults of this process, from the environment unless a test injected others; None if there are none.

    Raises:
        CallError: The variable does not read as faults.
    """
    global _read, _current
    if not _read:
        with _reading:  # or two threads would count operations apart
            if not _read:
                _current = parse(read_variable(VARIABLE))
                _read = True
    return _current


@contextlib.contextmanager
def injected(text: str) -> Iterator[None]:
    """Put faults in place of the environment's, for files that are opened inside the block."""
    global _read, _current
    before = (_read, _current)
    _current = parse(text)
    _read = True
    try:
        yield
    finally:
        _read, _current = before
