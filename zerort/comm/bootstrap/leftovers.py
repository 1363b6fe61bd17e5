"""Shared memory that MPI libraries of killed jobs left behind, found by proof and removed.

An MPI library names its segments, and removes the names when a job ends by itself; a job that is killed leaves them: a
few megabytes each time, until nothing can start any more. Ours have no names, but while
ranks map them that may not open each other's files (`comm/transports/node/window.py`).

A segment is abandoned if no process has it mapped or open. That is proved by looking at every process that could have
(this user's; root's too, if this is root), so it is asked only where every process can be seen, of files that belong to
this user and that nobody else may open, and not of a job that has just begun. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator

__all__ = ["NAMES", "abandoned", "sees_every_process", "sweep"]

NAMES = ("mpich_shm_", "vader_segment.", "sm_segment.", "zerort-")
"""How the names of MPICH's and Open MPI's segments begin; ours only have one where ranks cannot see each other."""

_SEGMENT = re.compile(r"mpich_shm_\w+|(vader|sm)_segment\..+|zerort-[0-9a-f]{32}")

_SETTLED = 60.0
"""Seconds. A job that starts maps its segments at once."""

_FIRST_PROCESS_SPACE = 0xEFFFFFFC
"""The inode of the process namespace that holds all others (PROC_PID_INIT_INO): who is in it sees every process."""


def sweep(directory: str, *, settled: float = _SETTLED) -> list[str]:
    """Remove the segments of a directory that are abandoned, for ``settled`` seconds, and return the paths of those.

    Nothing is removed where some processes cannot be seen, as in a container that shares its /dev/shm.
    """
    gone = []
    if sees_every_process():
        for path in abandoned(directory, settled=settled):
            with contextlib.suppress(OSError):  # another job sweeps at the same time
                os.unlink(path)
                gone.append(path)
    return gone


def abandoned(directory: str, *, settled: float = _SETTLED) -> dict[str, int]:
    """Return the segments in a directory that no process we can see uses, with the bytes each takes."""
    found = {}
    directory = os.path.realpath(directory)  # as processes' own tables name it
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):  # gone meanwhile
                status = entry.stat(follow_symlinks=False)
                is_settled = time.time() - status.st_mtime > settled
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
                if ours and is_settled and _SEGMENT.fullmatch(entry.name):
                    found[entry.path] = status.st_blocks * 512
    if found:  # only then is it worth a look at every process
        for path in _in_use(directory):
            found.pop(path, None)
    return found


def sees_every_process() -> bool:
    """Say whether no process of this machine is hidden from this one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PROCESS_SPACE
    except OSError:
        return False


def _in_use(directory: str) -> Iterator[str]:
    """Yield the files in a directory that a process has mapped or open."""
    for process in os.listdir("/proc"):
        if not process.isdecimal():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                at = line.find(f" {directory}/")
                if at >= 0:
                    yield line[at + 1 :].rstrip("\n")
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(descriptor.path)
