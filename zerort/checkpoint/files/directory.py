"""The directory of a checkpoint: the names in it, and the moves that make a save appear whole or not at all.

    shard-00003.<token>.bin        a rank's data; the token is the save's own, so no save touches another's files
    shard-00003-00007.<token>.bin  a file of the rank's store, taken over as it is (links.py)
    manifest.json.<token>.tmp      the manifest before it counts
    manifest.json                  the checkpoint: what it names is all there is
    saver.lease                    who saves there at the moment (lease.py)

A save counts from the moment its manifest is renamed onto ``manifest.json``; before that the files of the one before
are untouched, after that they are deleted. Only names of these forms are ever deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable

from zerort.checkpoint.failure import storage_error
from zerort.checkpoint.files.lease import LEASE
from zerort.checkpoint.format.manifest import DATA_NAME, Manifest, decode
from zerort.errors import CheckpointError, StorageError
from zerort.storage.files import disk
from zerort.storage.files.activity import on_disk
from zerort.storage.files.hard_links import TRIAL

__all__ = [
    "MANIFEST",
    "MOST_REPLACED",
    "commit_manifest",
    "data_name",
    "delete_save",
    "exists",
    "is_replaced",
    "make_directory",
    "new_token",
    "rank_of",
    "read_manifest",
    "replaced_too_often",
    "stale_names",
]

MANIFEST = "manifest.json"

MOST_REPLACED = 100
"""How often somebody who reads a checkpoint begins again because a newer one has taken its place."""

_MOST_MANIFEST = 1024**3

_DRAFT_NAME = re.compile(r"manifest\.json\.[0-9a-f]{16}\.tmp")
_TRIAL_NAME = re.compile(rf"{re.escape(TRIAL)}[0-9a-f]{{16}}")
_PROBE_NAME = re.compile(rf"{re.escape(LEASE)}\.[0-9a-f]{{16}}\.tmp")
_OURS = (DATA_NAME, _DRAFT_NAME, _TRIAL_NAME, _PROBE_NAME)


def new_token() -> str:
    """Return 16 hexadecimal digits that no other save has."""
    return secrets.token_hex(8)


def data_name(rank: int, token: str, *, link: int | None = None) -> str:
    """Return the name of a rank's data file, or of a file that it has linked.

    >>> data_name(3, "0123456789abcdef"), data_name(3, "0123456789abcdef", link=7)
    ('shard-00003.0123456789abcdef.bin', 'shard-00003-00007.0123456789abcdef.bin')
    """
    return f"shard-{rank:05d}{'' if link is None else f'-{link:05d}'}.{token}.bin"


def rank_of(name: str) -> int:
    """Return whose data file has this name.

    >>> rank_of("shard-00003-00007.0123456789abcdef.bin")
    3
    """
    return int(name.split(".")[0].split("-")[1])


def make_directory(path: str) -> list[str]:
    """Make the directory and its parents if need be, for good, and return those that were made, the outermost first.

    Raises:
        StorageError: There is a file of that name.
        OSError: The file system refused.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise StorageError(
            f"Expected a directory or nothing at {path}, got a file. A checkpoint is a directory: name another path."
        )
    missing = []
    here = path
    while here and not os.path.isdir(here):
        missing.append(here)
        here = os.path.dirname(here)
    made = []
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another job makes it at the same time
            disk.make_directory(directory)
            disk.sync_directory(os.path.dirname(directory))  # or all that is put there could be gone with it
            made.append(directory)
    return made


def commit_manifest(path: str, text: bytes, *, token: str, fence: Callable[[], None], name: str = MANIFEST) -> None:
    """Make ``text`` the manifest of the checkpoint: from here on it is the one that loads.

    Args:
        path: The checkpoint's directory; all data files of the save are on the disk.
        text: The manifest.
        token: The save's.
        fence: Raises if the save may not count any more; called last.
        name: What the manifest is called.

    Raises:
        OSError: The file system refused. If the rename was not reached, the draft is gone again.
    """
    draft = os.path.join(path, f"{name}.{token}.tmp")
    try:
        descriptor = disk.create(draft)
        try:
            disk.write(descriptor, text, path=draft)
            disk.sync(descriptor, path=draft)
        finally:
            os.close(descriptor)
        # The data files' names first: a manifest must never outlive the files that it names.
        disk.sync_directory(path)
        fence()
        disk.rename(draft, os.path.join(path, name))
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(draft)
        raise
    disk.sync_directory(path)


def stale_names(path: str, *, keep: Iterable[str] = ()) -> list[str]:
    """Return the data files and drafts of other saves, finished or killed.

    Args:
        path: The checkpoint's directory.
        keep: The data files of the checkpoint that counts.
    """
    kept = frozenset(keep)
    with contextlib.suppress(OSError):  # left to the next save: this one is whole already
        return [
            name for name in sorted(os.listdir(path)) if name not in kept and any(one.fullmatch(name) for one in _OURS)
        ]
    return []


def delete_save(path: str, token: str) -> None:
    """Delete what all ranks have put into the directory in one save."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if DATA_NAME.fullmatch(name) and name.split(".")[1] == token:
                with contextlib.suppress(OSError):
                    disk.unlink(os.path.join(path, name))


def exists(path: str | os.PathLike[str]) -> bool:
    """Say whether a save at ``path`` was ever completed. Whether it can be read, `read_manifest` says.

    Raises:
        StorageError: The file system does not tell.
    """
    file = os.path.join(os.path.abspath(os.fspath(path)), MANIFEST)
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, path=file) from error


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check what the checkpoint at ``path`` holds, in one process.

    Raises:
        CheckpointError: There is no checkpoint, an unfinished one, or one of a newer format.
        CorruptCheckpointError: The manifest is damaged.
        StorageError: The file system refused.
    """
    where = os.path.abspath(os.fspath(path))
    file = os.path.join(where, MANIFEST)
    try:
        with open(disk.open_regular(file, os.O_RDONLY), "rb") as stream:
            nbytes = os.fstat(stream.fileno()).st_size
            if nbytes > _MOST_MANIFEST:
                raise CheckpointError(
                    f"Expected a manifest of at most {_MOST_MANIFEST} bytes, got one of {nbytes} bytes at {file}. It "
                    "was not written by zerort: take another checkpoint."
                )
            with on_disk("read", file):
                text = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_what_is_there(where)) from None
    except OSError as error:
        raise storage_error(error, path=file) from error
    return decode(text, path=file)


def is_replaced(path: str, manifest: Manifest) -> bool:
    """Say whether another save has put its manifest in the place of this one: then files of this one may be deleted."""
    try:
        return read_manifest(path).digest != manifest.digest
    except (CheckpointError, StorageError):
        return False  # what was found wrong with the first is to be told


def replaced_too_often(path: str) -> CheckpointError:
    """Return that a checkpoint is replaced whenever one begins to read it."""
    return CheckpointError(
        f"Expected the checkpoint {path} to stay until its files are open, got {MOST_REPLACED} new ones in a row. "
        "Somebody saves there faster than it can be read from here: try again, or read a copy."
    )


def _what_is_there(path: str) -> str:
    if not os.path.lexists(path):
        return f"Expected a checkpoint at {path}, got nothing. Name the directory that was given to save."
    if not os.path.isdir(path):
        return f"Expected a checkpoint at {path}, got a file. Name the directory that holds {MANIFEST}."
    names = os.listdir(path)
    pieces = sum(1 for name in names if DATA_NAME.fullmatch(name) or _DRAFT_NAME.fullmatch(name))
    if pieces:
        return (
            f"Expected a finished checkpoint at {path}, got {pieces} files of a save that did not finish, and no "
            f"{MANIFEST}. Nothing of it can be loaded: take another checkpoint. The next save there cleans up."
        )
    return (
        f"Expected a checkpoint at {path}, got a directory of {len(names)} entries without {MANIFEST}. "
        "Name the directory that was given to save."
    )
