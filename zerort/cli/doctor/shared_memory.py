"""What the doctor finds about shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from zerort.cli.doctor.finding import Finding, bad, ok, warn
from zerort.comm.bootstrap.leftovers import NAMES, abandoned, sees_every_process
from zerort.comm.transports.node.window import SharedFile
from zerort.config import GroupOptions, format_bytes
from zerort.errors import SharedMemoryError

__all__ = ["check_shared_memory"]

_LEAST = 64 * 1024**2
_ENOUGH = 1024**3


def check_shared_memory(options: GroupOptions) -> Iterator[Finding]:
    """Yield what is found about the directory whose files the ranks of a node share."""
    directory = options.shm_dir
    try:
        SharedFile(directory, 4096).close()
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
    found = abandoned(directory)
    if not found:
        return ok("leftovers", f"none in {directory}")
    kinds = [name for name in NAMES if any(os.path.basename(path).startswith(name) for path in found)]
    by_hand = f"When no job runs: rm {' '.join(f'{directory}/{kind}*' for kind in kinds)}"
    return warn(
        "leftovers",
        f"{len(found)} file{'s' * (len(found) > 1)} of jobs that were killed in {directory}, "
        f"{format_bytes(sum(found.values()))}",
        cure="The next run removes them." if sees_every_process() else by_hand,
    )
