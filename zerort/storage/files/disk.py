"""The operations that change a file system: stores and checkpoints make, name and delete files through these alone.

So a test can refuse any of them (`ZERORT_FAULT`, faults.py) or write all of them down in their order (`watched`), and
knows that none went another way. Bytes are moved by `BlockFile`, which tells the same watcher.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from zerort.storage.files import faults
from zerort.storage.files.activity import on_disk

__all__ = [
    "create",
    "link",
    "make_directory",
    "open_regular",
    "remove_directory",
    "rename",
    "set_size",
    "sync",
    "sync_directory",
    "tell",
    "unlink",
    "watched",
    "write",
    "write_at",
]

_NO_FILE = "a link, a pipe, a directory or a device where a file should be"

Watcher = Callable[..., None]
"""Called as ``watcher(operation, path, …)`` after an operation was done."""

_watcher: Watcher | None = None


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell somebody of every operation of this process within the block, once it is done."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def tell(operation: str, path: str, *more: object) -> None:
    """Tell the watcher, if there is one, of an operation that was done."""
    if _watcher is not None:
        _watcher(operation, path, *more)


@contextlib.contextmanager
def _operation(name: str, path: str) -> Iterator[None]:
    """Do one operation: noted while it is under way, and refused if a fault was asked for."""
    with on_disk(name, path):
        found = faults.current()
        if found is not None:
            found.meet(name, path)
        yield


def open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file of our own and return its descriptor. No link is followed, and no pipe or device waited for.

    Raises:
        OSError: It is no regular file, or the file system refused.
    """
    with on_disk("open", path):
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise OSError(error.errno, _NO_FILE, path) from None
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NO_FILE, path)
    return descriptor


def create(path: str, *, mode: int = 0o666) -> int:
    """Make a new file and return its descriptor, for reading and writing.

    Raises:
        OSError: There is one of that name, or the file system refused. As from all functions here.
    """
    with _operation("create", path):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    tell("create", path)
    return descriptor


def write(descriptor: int, data: bytes | memoryview, *, path: str) -> None:
    """Write all of ``data`` where the file stands."""
    with _operation("append", path):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    tell("append", path, bytes(data) if _watcher is not None else b"")


def write_at(descriptor: int, data: memoryview, offset: int, *, path: str) -> None:
    """Write all of ``data`` at an offset; other processes may write elsewhere in the file."""
    with _operation("write", path):
        rest, at = data, offset
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written
    tell("write", path, offset, bytes(data) if _watcher is not None else b"")


def set_size(descriptor: int, nbytes: int, *, path: str) -> None:
    """Make a file as long as given; what was not written is zeros."""
    with _operation("reserve", path):
        os.ftruncate(descriptor, nbytes)
    tell("reserve", path, nbytes)


def sync(descriptor: int, *, path: str) -> None:
    """Return when all that was written to a file is on the disk."""
    with _operation("sync", path):
        os.fsync(descriptor)
    tell("sync", path)


def sync_directory(path: str) -> None:
    """Return when the names in a directory are on the disk."""
    with _operation("syncdir", path):
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    tell("syncdir", path)


def link(path: str, name: str) -> None:
    """Give a file another name; one that is there is not replaced."""
    with _operation("link", name):
        os.link(path, name, follow_symlinks=False)
    tell("link", path, name)


def rename(path: str, name: str) -> None:
    """Give a file another name instead of its own; one that is there is replaced."""
    with _operation("rename", name):
        os.rename(path, name)
    tell("rename", path, name)


def unlink(path: str) -> None:
    """Delete a name of a file."""
    with _operation("unlink", path):
        os.unlink(path)
    tell("unlink", path)


def make_directory(path: str) -> None:
    """Make a directory; its parent is there."""
    with _operation("mkdir", path):
        os.mkdir(path)
    tell("mkdir", path)


def remove_directory(path: str) -> None:
    """Delete an empty directory."""
    with _operation("rmdir", path):
        os.rmdir(path)
    tell("rmdir", path)
