"""The scratch directory of one run and rank: its name says whose it is, so that what dead runs left can be told.

    DIR/zerort-offload-<host>-<boot>-<pid>-<start>-r<rank>-<token>/     while the run lives
        block0%2Fexp_avg.chunk                                         a value; the name is the value's, escaped

A run is dead if it was on this host and the machine was booted since, or no process of its number and start time is
there. The name decides, a lock (flock) on the directory confirms: a container that has process numbers of its own, but
shares host name and disk, still holds it. On a network's file system a lock says nothing about other machines, two of
which may have one name: there only runs of this very boot can be known to be dead. Only names of these forms are ever
deleted; what else lies there, stays (decision 0031).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
from urllib.parse import quote

from zerort.storage.files.extents import SUFFIX
from zerort.storage.files.mounts import file_system
from zerort.storage.files.owners import Owner, is_dead, this_owner

__all__ = ["Scratch", "clean_up", "file_name", "owner_of"]

_OURS = re.compile(r"zerort-offload-([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)-r(\d+)-([0-9a-f]{8})")
_CHUNK = re.compile(r"[A-Za-z0-9_.~%-]+\.chunk")
_LONGEST = 200
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def owner_of(name: str) -> Owner | None:
    """Return whose directory has this name; None if it is not one of ours.

    >>> owner_of("zerort-offload-0123abcd-4567cdef-77-1234-r0-89abcdef")
    Owner(host='0123abcd', boot='4567cdef', pid=77, start=1234)
    >>> owner_of("zerort-offload-notes.txt")
    """
    found = _OURS.fullmatch(name)
    return None if found is None else Owner(found[1], found[2], int(found[3]), int(found[4]))


def is_on_this_machine(path: str) -> bool:
    """Say whether a path lies on a disk, or in the memory, of this machine alone: on no network's file system."""
    return file_system(path) in _LOCAL


def file_name(name: str) -> str:
    """Return the file name of a value: stable, readable, and different for different values.

    >>> file_name("block0/exp_avg")
    'block0%2Fexp_avg.chunk'
    """
    safe = quote(name, safe="")
    if len(safe) > _LONGEST:
        safe = f"{safe[:_LONGEST]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return safe + SUFFIX


def clean_up(directory: str) -> list[str]:
    """Delete what dead runs of this host left in a directory, and return the names of what is gone.

    What cannot be deleted is left; other ranks may do the same at the same time.
    """
    gone = []
    with contextlib.suppress(OSError):
        on_this_machine = is_on_this_machine(directory)
        for name in sorted(os.listdir(directory)):
            owner = owner_of(name)
            dead = owner is not None and is_dead(owner, on_this_machine=on_this_machine)
            if dead and _remove_unlocked(os.path.join(directory, name)):
                gone.append(name)
    return gone


class Scratch:
    """The directory of this run and rank.

    Args:
        directory: Where to make it; made itself if it is not there.
        rank: Whose.

    Raises:
        OSError: The file system refused.
    """

    def __init__(self, directory: str, *, rank: int) -> None:
        os.makedirs(directory, exist_ok=True)
        host, boot, pid, start = this_owner()
        token = secrets.token_hex(4)
        self.path = os.path.join(directory, f"zerort-offload-{host}-{boot}-{pid}-{start}-r{rank}-{token}")
        """Where the files are."""
        os.mkdir(self.path, 0o700)
        self._descriptor: int | None = _open_locked(self.path)

    def file(self, name: str) -> str:
        """Return the path of a value's file."""
        return os.path.join(self.path, file_name(name))

    def remove(self) -> None:
        """Delete our files and the directory, unless somebody else put something there."""
        if self._descriptor is not None:
            _remove(self.path, self._descriptor)
        self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _remove(path: str, descriptor: int) -> bool:
    """Delete our files in the open directory ``descriptor``, then its name ``path``, unless other files are in it.

    By descriptor: whoever puts a link in the directory's place meanwhile has none of his own files deleted.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptor):
            if _CHUNK.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=descriptor)
        os.rmdir(path)  # which follows no link
        return True
    return False


def _remove_unlocked(path: str) -> bool:
    try:
        directory = _open_locked(path)
    except OSError:
        return False  # somebody lives there, or somebody else is deleting it
    try:
        return _remove(path, directory)
    finally:
        os.close(directory)


def _open_locked(path: str) -> int:
    """Return a descriptor of a directory that holds its lock, where the file system has locks.

    Raises:
        OSError: Another process holds it, or the directory is not there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    return descriptor
