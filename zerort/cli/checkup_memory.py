"""What the doctor finds about shared memory. May import: comm.window, config."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from zerort.cli.checkup import Finding, bad, ok, warn
from zerort.comm.window import create_file
from zerort.config import GroupOptions, format_bytes
from zerort.errors import SharedMemoryError

__all__ = ["check_shared_memory"]

_LEAST = 64 * 1024**2
_ENOUGH = 1024**3
_SETTLED = 60.0
"""Seconds. Files of ours live for milliseconds, and a job that starts maps MPI's at once."""

_NAMES = ("zerort-", "mpich_shm_", "vader_segment", "sm_segment")
"""How files of ours, MPICH's and Open MPI's begin."""


def check_shared_memory(options: GroupOptions) -> Iterator[Finding]:
    """Yield what is found about the directory whose files the ranks of a node share."""
    directory = options.shm_dir
    try:
        os.unlink(create_file(directory, 4096))
        status = os.statvfs(directory)
    except (SharedMemoryError, OSError) as error:
        yield bad("shared memory", str(error).split(". ")[0], cure="Set ZERORT_SHM_DIR to a directory in memory.")
        return
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{directory}: {format_bytes(free)} free of {format_bytes(size)}"
    cure = f"Make it larger: docker run --shm-size=8g, or mount -o remount,size=8g {directory}."
    if free < _LEAST:
        yield bad("shared memory", text, cure=cure)
    elif free < _ENOUGH:
        yield warn("shared memory", text, cure=cure)
    else:
        yield ok("shared memory", text)
    yield _check_leftovers(directory)


def _check_leftovers(directory: str) -> Finding:
    found = {}
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # gone meanwhile
            status = entry.stat(follow_symlinks=False)
            settled = time.time() - status.st_mtime > _SETTLED
            if entry.name.startswith(_NAMES) and settled and status.st_uid == os.getuid():
                found[entry.path] = status.st_blocks * 512
    for path in _mapped(directory):
        found.pop(path, None)
    if not found:
        return ok("leftovers", f"none in {directory}")
    kinds = [name for name in _NAMES if any(os.path.basename(path).startswith(name) for path in found)]
    return warn(
        "leftovers",
        f"{len(found)} file{'s' * (len(found) > 1)} of jobs that were killed in {directory}, "
        f"{format_bytes(sum(found.values()))}",
        cure=f"When no job runs: rm {' '.join(f'{directory}/{kind}*' for kind in kinds)}",
    )


def _mapped(directory: str) -> Iterator[str]:
    """Yield the files in ``directory`` that a process of this user has mapped."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    at = line.find(f" {directory}/")
                    if at >= 0:
                        yield line[at + 1 :].rstrip("\n")
