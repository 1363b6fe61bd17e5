"""Which disk holds a path, and directories that are there or are asked for.

    mount_of("/mnt/nvme/run")            ->  /mnt/nvme (ext4 on /dev/nvme0n1)
    expect_directory("/mnt/nvme/run")    ->  nothing, or StorageError: what is not there is made only for who asks

A directory that is made for somebody who has only mistyped it, or whose disk is not mounted, fills another disk without
a word.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from zerort.errors import StorageError
from zerort.storage.files.failures import storage_error_from

__all__ = ["Mount", "disk_of", "expect_directory", "file_system", "mount_of", "nearest"]


class Mount(NamedTuple):
    """A file system, where it is mounted."""

    point: str
    device: str
    """Such as ``/dev/nvme0n1``; a word where no device is behind it."""
    kind: str
    """Such as ``ext4`` or ``tmpfs``."""

    @property
    def is_memory(self) -> bool:
        """Whether its files take memory: nothing is saved by moving values there."""
        return self.kind in ("tmpfs", "ramfs")

    def __str__(self) -> str:
        return f"{self.point} ({self.kind} on {self.device})"


def mount_of(path: str) -> Mount | None:
    """Return the file system that holds an absolute path, or will once it is made; None if the kernel does not tell.

    >>> mount_of("/proc/self").kind
    'proc'
    """
    where = os.path.realpath(nearest(path))
    best: Mount | None = None
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            device, point, kind = (word.replace("\\040", " ") for word in line.split(" ")[:3])
            inside = where == point or where.startswith(point.rstrip("/") + "/")
            # The last of several on one place is the one that is seen.
            if inside and (best is None or len(point) >= len(best.point)):
                best = Mount(point, device, kind)
    return best


def file_system(path: str) -> str:
    """Return the type of the file system that holds a path, such as ``ext4`` or ``nfs4``; empty if it is not known."""
    mount = mount_of(os.path.abspath(path))
    return "" if mount is None else mount.kind


def expect_directory(path: str, *, what: str, create: bool = False, rank: int | None = None, or_else: str = "") -> None:
    """Raise unless a directory is there.

    Args:
        path: An absolute path.
        what: What the directory is for, as a noun phrase.
        create: Make it, with its parents, if it is not there.
        rank: Whose it is, for the error.
        or_else: What else than ``mkdir`` makes it.

    Raises:
        StorageError: It is not there, is no directory, or cannot be made; with the disk that it would be on.
    """
    try:
        if create:
            os.makedirs(path, exist_ok=True)
        os.stat(path)
    except FileNotFoundError:
        mount = mount_of(path)
        disk = "" if mount is None else f", and would be on {mount}"
        raise StorageError(
            f"Expected a directory for {what} at {path}, got none: it is not there{disk}. If another disk is meant, "
            f"mount it; if not, mkdir -p {path}{or_else}."
        ) from None
    except FileExistsError:
        pass  # a file, as is said below
    except OSError as error:
        raise storage_error_from(error, path=path, what=what, rank=rank) from error
    if not os.path.isdir(path):
        raise StorageError(f"Expected a directory for {what} at {path}, got a file. Name another path.")


def nearest(path: str) -> str:
    """Return an absolute path, or what is there of it: the nearest directory above.

    >>> nearest("/proc/self/nowhere/at/all")
    '/proc/self'
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return nearest(os.path.dirname(path))
    return path


def disk_of(path: str) -> int:
    """Return the number of the file system that holds a path, or will hold it once it is made."""
    return os.stat(nearest(path)).st_dev
