"""Write what was recorded: plain values, one clock for all ranks, and files that are whole or not there.

A trace is looked at by other tools and a flight record after a crash, so neither may be half written, hold a NaN that
JSON does not know, or fail because somebody passed an array as an argument. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
from numbers import Integral, Real
from pathlib import Path
from typing import Any

__all__ = ["make_private", "plain", "wall_offset_ns", "write_json"]


def plain(value: Any) -> Any:
    """Return the value as JSON knows it; what JSON does not know becomes text.

    >>> plain({"shape": (2, 3), "loss": float("nan"), "plan": {1}})
    {'shape': [2, 3], 'loss': 'nan', 'plan': '{1}'}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Integral):  # NumPy's too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)


def wall_offset_ns() -> int:
    """Measure what to add to `time.perf_counter_ns` to get the wall clock, `time.time_ns`.

    The performance counter starts anywhere on each host, and only the wall clock is common to all. The closest of a few
    readings is taken, since the thread may lose its core between two clocks.
    """
    best_gap, best_offset = None, 0
    for _ in range(8):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if best_gap is None or after - before < best_gap:
            best_gap, best_offset = after - before, wall - (before + after) // 2
    return best_offset


def make_private(directory: Path) -> None:
    """Make a directory that only this user can read; one that is there must be his if everybody could have made it.

    Raises:
        OSError: It cannot be made, or lies in a place like /tmp and is another user's, or a link.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status, parent = directory.lstat(), directory.parent.stat()
    if parent.st_mode & stat.S_IWOTH and (status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode)):
        raise PermissionError(errno.EPERM, "it is a link or another user's, in a directory that everybody may write to")


def write_json(path: Path, document: Any, *, private: bool = False) -> None:
    """Write a JSON file that appears whole or not at all.

    Args:
        path: The file; its directory has to exist.
        document: What `plain` returns.
        private: Let this user alone read it.

    Raises:
        OSError: If it cannot be written; it names `path`, and nothing is left behind.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.perf_counter_ns()}")
    try:
        try:
            mode = 0o600 if private else 0o666
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(document, file, allow_nan=False)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        # The user asked for `path` and has never heard of the draft.
        raise OSError(error.errno, error.strerror, str(path)) from None
