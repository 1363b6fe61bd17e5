"""An unhandled error as its user should read it: frames of zerort are folded into one line, and alike errors are known.

    Traceback (most recent call last):
      File "train.py", line 11, in <module>
        rt.step()
      … 9 frames inside zerort (ZERORT_FULL_TRACEBACK=1 shows them) …
    zerort.errors.UnitStateError: Expected …

An error that zerort does not raise by name and that comes out of zerort itself is nobody's mistake but ours: it keeps
all of its frames.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import traceback
from typing import Any

from zerort.comm.guard.call import calls_back, is_binding, is_ours
from zerort.errors import CollectiveError, ZerortError

__all__ = ["format_error", "likeness"]

_PRIVATE = re.compile(r"0x[0-9a-f]{6,}|… \d+ frames?| \(rank \d+\)$")
"""What differs where ranks say the same: addresses, the way through zerort, who found it out first."""


def format_error(error: BaseException, *, full: bool = False) -> str:
    """Return what Python would print of ``error``, with zerort's own frames folded unless ``full``."""
    told = traceback.TracebackException.from_exception(error)
    own_fault = not isinstance(error, ZerortError) and bool(told.stack) and _is_inside(told.stack[-1].filename)
    if not full and not own_fault:
        _fold(told)
    return "".join(told.format())


def likeness(error: BaseException) -> str:
    """Return a short text that is the same for errors which say the same, on whichever rank."""
    if isinstance(error, CollectiveError):  # seconds, processes and records between head and cure are each rank's own
        lines = str(error).splitlines() or [""]
        text = f"{type(error).__name__} {lines[0]} {lines[-1]}"
    else:
        text = format_error(error)
    return hashlib.sha256(_PRIVATE.sub("", text.rstrip()).encode()).hexdigest()[:16]


def _fold(told: traceback.TracebackException) -> None:
    if told.__cause__ is not None:
        _fold(told.__cause__)
    elif told.__context__ is not None and not told.__suppress_context__:
        found = told.__context__.stack
        if found and all(_is_inside(frame.filename) for frame in found):
            told.__context__ = None  # how zerort found out is told by the error that it raised then
        else:
            _fold(told.__context__)
    told.stack = _Folded(told.stack)


class _Folded(traceback.StackSummary):
    """Frames, of which those inside zerort are shown as one line."""

    def format(self, **how: Any) -> list[str]:
        lines = []
        for between, group in itertools.groupby(self, lambda frame: calls_back(frame.filename)):
            run = list(group)
            if between and any(_is_inside(frame.filename) for frame in run):
                where = "zerort and torch" if any(f"{os.sep}torch{os.sep}" in one.filename for one in run) else "zerort"
                many = "1 frame" if len(run) == 1 else f"{len(run)} frames"
                lines.append(f"  … {many} inside {where} (ZERORT_FULL_TRACEBACK=1 shows them) …\n")
            else:
                lines += traceback.StackSummary.from_list(run).format(**how)
        return lines


@functools.lru_cache(maxsize=256)
def _is_inside(filename: str) -> bool:
    """Say whether a file is zerort's, or a binding's: a user's own folder may be called zerort_something, too."""
    return is_ours(filename) or is_binding(filename)
