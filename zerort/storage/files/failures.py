"""Turn an OSError into a StorageError with the file, the offset, the rank, needed and free bytes, and the cure.

    storage_error_from(OSError(EIO), path=…, offset=…, rank=…)   "Expected to read and write …, got …. The disk …"
    no_room(path, what="state", needed=n, why=…)                 "Expected 8GiB for state at …, got 3GiB free …"

Files of checkpoints and of stores fail alike.
"""

from __future__ import annotations

import errno
import os

from zerort.config import format_bytes
from zerort.errors import StorageError

__all__ = ["free_nbytes", "no_room", "storage_error_from"]

_CURES = {
    errno.EROFS: "The file system is read-only: mount it for writing, or name another directory.",
    errno.EACCES: "Give this user the right to it, or name another directory.",
    errno.EPERM: "Give this user the right to it, or name another directory.",
    errno.EIO: "The disk reports an error: look at the kernel's log (dmesg), and use another disk.",
    errno.ESTALE: "The network file system lost it: mount it again.",
    errno.ENOTDIR: "A part of the path is a file: name another directory.",
    errno.ENAMETOOLONG: "Take a shorter path.",
    errno.EMFILE: "Allow more open files: ulimit -n.",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_error_from(
    error: OSError,
    *,
    path: str,
    what: str,
    needed: int | None = None,
    offset: int | None = None,
    rank: int | None = None,
    intact: str = "",
) -> StorageError:
    """Return the StorageError for an OSError of a file, with the cure.

    Args:
        error: What the file system said.
        path: What we wanted to read or write; the error's own file name is better known, if it has one.
        what: What lies there, as a noun phrase.
        needed: The bytes that were to be written there, if known.
        offset: Where in the file, if known.
        rank: Whose file it is, if that is not all ranks' business.
        intact: A sentence about what was not harmed.
    """
    where = error.filename if isinstance(error.filename, str) else path
    if error.errno in _FULL:
        return no_room(where, what=what, needed=needed, why=error.strerror or "no space", rank=rank, intact=intact)
    cure = _CURES.get(error.errno or 0, "Look at the directory and its disk, or name another.")
    at = "" if offset is None else f" at offset {offset}"
    return StorageError(f"Expected to read and write {where}{at}{_on(rank)}, got {error.strerror or error}. {cure}")


def no_room(
    path: str, *, what: str, needed: int | None, why: str, rank: int | None = None, intact: str = ""
) -> StorageError:
    """Return that there is no room, with the numbers.

    Args:
        path: Where.
        what: What there is no room for, as a noun phrase.
        needed: Its bytes, if known.
        why: What the file system said, or how we know.
        rank: Whose it is, if that is not all ranks' business.
        intact: A sentence about what was not harmed.
    """
    free = free_nbytes(path)
    want = "room" if needed is None else f"{format_bytes(needed)} ({needed} bytes)"
    have = "an unknown number of bytes" if free is None else f"{format_bytes(free)} ({free} bytes)"
    return StorageError(
        f"Expected {want} for {what} at {path}{_on(rank)}, got {have} free: {why}. {intact}{' ' * bool(intact)}Delete "
        "what is no longer needed, raise the quota, or name a directory on a larger disk."
    )


def _on(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def free_nbytes(path: str) -> int | None:
    """Return the bytes that this user can still write at ``path``; None where the file system does not tell."""
    while True:
        try:
            status = os.statvfs(path)
            break
        except OSError:
            if path in ("", "/", os.path.dirname(path)):
                return None
            path = os.path.dirname(path)
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return None if status.f_blocks == 0 else blocks * status.f_frsize
