"""What the doctor finds about a disk: room, O_DIRECT, and how fast blocks are written and read.

Blocks go through `os.pwritev` and `os.preadv` on a few threads, past the page cache where the file system allows that.
The file is unlinked as soon as it is open: nothing is left behind, however the doctor ends. May import: config.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from zerort.cli.checkup import Finding, bad, ok, warn
from zerort.config import format_bytes

__all__ = ["check_disk"]

FILE_NBYTES = 256 * 1024**2
BLOCK_NBYTES = 4 * 1024**2
THREADS = 4

_SLOW = 0.2
"""GB/s: below this, training with state on this disk waits for it."""


def check_disk(directory: str) -> Iterator[Finding]:
    """Yield what is found about the disk that holds ``directory``."""
    where = os.path.abspath(directory)
    try:
        status = os.statvfs(where)
        descriptor, direct = _open_nameless(where)
    except OSError as error:
        yield bad("disk", f"{where}: {error.strerror}", cure="Name a directory that exists and can be written to.")
        return
    try:
        free = status.f_bavail * status.f_frsize
        if free < 2 * FILE_NBYTES:
            yield warn(
                "disk",
                f"{where}: {format_bytes(free)} free, too little to measure it",
                cure="Make room, or name another.",
            )
            return
        yield ok("disk", f"{where}: {format_bytes(free)} free")
        if direct:
            yield ok("O_DIRECT", "supported")
        else:
            yield warn(
                "O_DIRECT",
                "not supported: what is written also fills the page cache",
                cure="Put offloaded state on a local disk with ext4 or xfs.",
            )
        yield _check_speed(descriptor, direct=direct)
    except OSError as error:
        yield bad("disk", f"{where}: {error.strerror}", cure="Name a directory on a disk that works.")
    finally:
        os.close(descriptor)


def _open_nameless(directory: str) -> tuple[int, bool]:
    """Return a new file without a name, and whether it goes past the page cache."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    path = os.path.join(directory, f".zerort-doctor-{uuid.uuid4().hex}")
    try:
        for extra in (os.O_DIRECT, 0):
            with contextlib.suppress(OSError):
                return os.open(path, flags | extra, 0o600), bool(extra)
            with contextlib.suppress(OSError):
                os.unlink(path)  # some file systems make the file and then refuse O_DIRECT
        return os.open(path, flags, 0o600), False  # says why it cannot
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _check_speed(descriptor: int, *, direct: bool) -> Finding:
    block = mmap.mmap(-1, BLOCK_NBYTES)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(4096) * (BLOCK_NBYTES // 4096))  # a disk may not store zeros at all

    def write(offset: int) -> int:
        return os.pwritev(descriptor, [block], offset)

    def read(offset: int) -> int:
        with mmap.mmap(-1, BLOCK_NBYTES) as into:
            return os.preadv(descriptor, [into], offset)

    written = _gbs(write, lambda: os.fsync(descriptor))
    if not direct:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    readback = _gbs(read, lambda: None)
    how = "O_DIRECT" if direct else "buffered, synced"
    text = (
        f"write {written:.2f} GB/s, read {readback:.2f} GB/s "
        f"({how}, {format_bytes(FILE_NBYTES)} in blocks of {format_bytes(BLOCK_NBYTES)}, {THREADS} threads)"
    )
    if min(written, readback) < _SLOW:
        return warn("disk speed", text, cure="Keep state in host memory, or name a directory on a faster disk.")
    return ok("disk speed", text)


def _gbs(work: Callable[[int], int], finish: Callable[[], None]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        moved = sum(pool.map(work, range(0, FILE_NBYTES, BLOCK_NBYTES)))
    finish()
    seconds = time.perf_counter() - began
    if moved != FILE_NBYTES:
        raise OSError(0, f"Expected {FILE_NBYTES} bytes, got {moved}")
    return moved / seconds / 1e9
