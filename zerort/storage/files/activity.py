"""What this process does on disks: how many operations it has ended, and which of those under way is the oldest.

A system call on a disk that is stuck does not return, and cannot be left: others have to see that nothing moves.
Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

__all__ = ["ended", "on_disk", "under_way"]

_numbers = itertools.count()
_running: dict[int, tuple[float, str, str]] = {}
_ended = 0


@contextlib.contextmanager
def on_disk(operation: str, path: str) -> Iterator[None]:
    """Take note of one operation on a file, for as long as it takes."""
    global _ended
    number = next(_numbers)
    _running[number] = (time.monotonic(), operation, path)
    try:
        yield
    finally:
        del _running[number]
        _ended += 1


def ended() -> int:
    """Return how many operations have ended, about: it grows as long as anything moves."""
    return _ended


def under_way() -> str:
    """Return the operation that is under way for longest, and its file; empty if there is none."""
    oldest = min(list(_running.values()), default=None)
    return "" if oldest is None else f"{oldest[1]} {oldest[2]}"
