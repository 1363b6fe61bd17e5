"""The files of a feed that say what there is, each with a checksum in its first line.

feed.json                          the tensors, and the versions since the last whole one; replaced by each push
version-00000012.<token>.json      which elements of which tensors stand where in the files of version 12
full-00000012.<token>.safetensors  all tensors, written by all ranks
delta-00000012-00003.<token>.bin   what changed of rank 3's elements since version 11; beside a whole version, what is
                                   not zero of those of its sparse tensors, which are not in its file (format 2)
saver.lease                        who publishes there
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from zerort.checkpoint.failure import storage_error
from zerort.errors import CheckpointError, CorruptCheckpointError
from zerort.native import crc32c
from zerort.storage.files import disk
from zerort.storage.files.activity import on_disk

__all__ = [
    "FORMAT",
    "HEAD",
    "Head",
    "Link",
    "Piece",
    "Tensor",
    "Version",
    "data_file",
    "framed",
    "last_number",
    "stale_names",
]

T = TypeVar("T")

FORMAT: Final = 2
"""The newest format of the files that is read. All are written in format 1, which older readers know, but for the
record of a whole version that has sparse tensors."""

HEAD: Final = "feed.json"

_OURS = re.compile(
    r"(?:full|delta|version)-(\d{8})(?:-\d{5})?\.[0-9a-f]{16}\.(?:safetensors|bin|json)|feed\.json\.[0-9a-f]{16}\.tmp"
)


class Tensor(NamedTuple):
    """A published tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """Some elements of one tensor, in one file of a version."""

    file: int
    """Which of the version's files."""
    offset: int
    nbytes: int
    crc32c: int
    tensor: int
    """Its place among the head's tensors; -1: not of a tensor (the head of a safetensors file)."""
    first: int
    numel: int


class Link(NamedTuple):
    """A version as the head names it. Two versions never have equal ones: the record's name has the push's token."""

    number: int
    is_full: bool
    record: str
    """The name of its `Version`."""
    crc32c: int
    """Of that file."""


@dataclass(frozen=True, slots=True)
class Version:
    """What one version's files hold."""

    number: int
    updates: int
    """How many updates the trainer had done."""
    files: tuple[tuple[str, int], ...]
    """Names and bytes."""
    pieces: tuple[Piece, ...]
    format: int = 1
    """What the record is written in."""

    @classmethod
    def read(cls, where: str, link: Link) -> Version:
        """Read a version's record.

        Raises:
            FileNotFoundError: It is not there (any more).
            CorruptCheckpointError: It is damaged.
            OSError: The file system refused.
        """
        path = os.path.join(where, link.record)
        text = _read(path)
        if crc32c(text) != link.crc32c:
            raise _damaged(path)
        return _decoded(
            text,
            path,
            lambda found: cls(
                found["number"],
                found["updates"],
                tuple((name, nbytes) for name, nbytes in found["files"]),
                tuple(Piece(*one) for one in found["pieces"]),
                found["format"],
            ),
        )


@dataclass(frozen=True, slots=True)
class Head:
    """What ``feed.json`` says."""

    feed: str
    """A token of the run that publishes."""
    tensors: tuple[Tensor, ...]
    chain: tuple[Link, ...]
    """The last whole version and the deltas since, oldest first."""

    @property
    def newest(self) -> int:
        """The number of the newest version."""
        return self.chain[-1].number

    @classmethod
    def read(cls, where: str) -> Head:
        """Read the head of the feed in a directory.

        Raises:
            CheckpointError: There is none, or one of another format.
            CorruptCheckpointError: It is damaged.
            StorageError: The file system refused.
        """
        path = os.path.join(where, HEAD)
        try:
            text = _read(path)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"Expected a feed at {where}, got no {HEAD} there. Name the directory that was given to rt.publish, "
                "and wait for its first push."
            ) from None
        except OSError as error:
            raise storage_error(error, path=path) from error
        return _decoded(
            text,
            path,
            lambda found: cls(
                found["feed"],
                tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in found["tensors"]),
                tuple(Link(*one) for one in found["chain"]),
            ),
        )


def framed(record: Head | Version) -> bytes:
    """Return a record as its file holds it: a line with the checksum, then JSON."""
    text = json.dumps({"format": 1, **dataclasses.asdict(record)}).encode()
    return b"%08x\n" % crc32c(text) + text


def data_file(kind: str, number: int, token: str, *, rank: int | None = None) -> str:
    """Return the name of a file.

    >>> data_file("delta", 12, "0123456789abcdef", rank=3)
    'delta-00000012-00003.0123456789abcdef.bin'
    """
    ending = {"full": "safetensors", "delta": "bin", "version": "json"}[kind]
    return f"{kind}-{number:08d}{'' if rank is None else f'-{rank:05d}'}.{token}.{ending}"


def stale_names(where: str, *, keep: Sequence[str]) -> list[str]:
    """Return the files of a feed that are none of ``keep``: of older versions, or of a push that was killed."""
    kept = {HEAD, *keep}
    return [name for name in sorted(os.listdir(where)) if name not in kept and _OURS.fullmatch(name)]


def last_number(where: str) -> int:
    """Return the highest number of a version that the directory has a file of; 0: it has none."""
    found = [_OURS.fullmatch(name) for name in os.listdir(where)]
    return max((int(one[1]) for one in found if one and one[1]), default=0)


def _read(path: str) -> bytes:
    with open(disk.open_regular(path, os.O_RDONLY), "rb") as stream, on_disk("read", path):
        return stream.read()


def _damaged(path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"Expected {path} as it was written, got other bytes: the file is damaged. The next whole version replaces it: "
        "feed.push() of a runtime that publishes there anew."
    )


def _decoded(text: bytes, path: str, make: Callable[[dict[str, Any]], T]) -> T:
    line, _, body = text.partition(b"\n")
    try:
        if line != b"%08x" % crc32c(body):
            raise ValueError
        found = json.loads(body)
        written = found["format"]
    except (ValueError, KeyError, TypeError):
        raise _damaged(path) from None
    if written not in range(1, FORMAT + 1):
        cure = (
            "Update zerort here."
            if isinstance(written, int) and written > FORMAT
            else "Publish again with this version of zerort, into another directory."
        )
        raise CheckpointError(f"Expected a feed of format {FORMAT} or older at {path}, got format {written!r}. {cure}")
    try:
        return make(found)
    except (ValueError, KeyError, TypeError):
        raise _damaged(path) from None
