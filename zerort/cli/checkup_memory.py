"""What the doctor finds about shared memory. May import: comm.window, config."""

from __future__ import annotations

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
"""Seconds. Files of a running job live for milliseconds; older ones belong to nobody."""


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
    count = nbytes = 0
    for entry in os.scandir(directory):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # gone meanwhile
            continue
        if entry.name.startswith("zerort-") and time.time() - status.st_mtime > _SETTLED:
            count += 1
            nbytes += status.st_blocks * 512
    if not count:
        return ok("leftovers", f"none in {directory}")
    return warn(
        "leftovers",
        f"{count} file{'s' * (count > 1)} of ended jobs in {directory}, {format_bytes(nbytes)}",
        cure=f"rm {directory}/zerort-*",
    )
