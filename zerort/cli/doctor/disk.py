"""What the doctor finds about a disk: room, O_DIRECT, and how fast blocks are written and read.

What is measured leaves nothing behind, however the doctor ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from zerort.cli.doctor.finding import Finding, bad, ok, warn
from zerort.config import format_bytes
from zerort.storage.files.blocks import BLOCK_NBYTES
from zerort.storage.files.preflight import THREADS, DirectoryReport, measure

__all__ = ["check_disk"]

FILE_NBYTES = 256 * 1024**2

_SLOW = 0.2
"""GB/s: below this, training with state on this disk waits for it."""


def check_disk(directory: str) -> Iterator[Finding]:
    """Yield what is found about the disk that holds ``directory``."""
    where = os.path.abspath(directory)
    try:
        status = os.statvfs(where)
        free = status.f_bavail * status.f_frsize
        if free < 2 * FILE_NBYTES:
            yield warn(
                "disk",
                f"{where}: {format_bytes(free)} free, too little to measure it",
                cure="Make room, or name another.",
            )
            return
        report = measure(where, nbytes=FILE_NBYTES)
    except OSError as error:
        cure = "Name a directory that exists, can be written to, and is on a disk that works."
        yield bad("disk", f"{where}: {error.strerror}", cure=cure)
        return
    text = f"{where} on {report.mount or 'a disk'}: {format_bytes(free)} free"
    if report.mount is not None and report.mount.is_memory:
        yield warn("disk", f"{text}, which is memory", cure="Name a disk: offloading here saves nothing.")
    else:
        yield ok("disk", text)
    if report.direct:
        yield ok("O_DIRECT", f"supported, at {report.alignment} bytes")
    else:
        yield warn(
            "O_DIRECT",
            "not supported: what is written also fills the page cache",
            cure="Put offloaded state on a local disk with ext4 or xfs.",
        )
    yield _speed(report)


def _speed(report: DirectoryReport) -> Finding:
    how = "O_DIRECT" if report.direct else "buffered, synced"
    text = (
        f"write {report.write_gbs:.2f} GB/s, read {report.read_gbs:.2f} GB/s "
        f"({how}, {format_bytes(FILE_NBYTES)} in blocks of {format_bytes(BLOCK_NBYTES)}, {THREADS} threads)"
    )
    if min(report.write_gbs, report.read_gbs) < _SLOW:
        return warn("disk speed", text, cure="Keep state in host memory, or name a directory on a faster disk.")
    return ok("disk speed", text)
