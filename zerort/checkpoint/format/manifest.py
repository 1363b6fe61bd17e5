"""`Manifest`: what a checkpoint holds and where: one JSON file, whole or not there, and checked to the byte.

    {"format":"zerort-checkpoint","version":1,"crc32c":"90ab12cd",
    "body":{"created":…,"zerort":…,"ranks":8,"meta":{…},"progress":[…],"files":[[name,nbytes],…],
            "kinds":{kind:{tensor:[dtype,shape,[[file,offset,first,numel,crc32c],…]],…},…}}}

An extent that is compressed (version 2) has a sixth number: the bytes that it takes in the file. One that is sparse
(version 3) has a seventh, `SPARSE`: these bytes are the elements that are not zero, and a bitmap (`codec/sparse.py`).

The checksum is that of the whole file with eight zeros in its own place, so that a flipped bit in a step counter is
found like one in a weight. The first line keeps its form in all versions to come (decision 0025).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from zerort.checkpoint.format.schema import COUNT, Each, Where, expect
from zerort.checkpoint.value import JSON
from zerort.errors import CheckpointError, CorruptCheckpointError
from zerort.layout import ITEMSIZES, itemsize
from zerort.native import crc32c

__all__ = [
    "FORMAT",
    "SPARSE",
    "VERSION",
    "DataFile",
    "Manifest",
    "StoredExtent",
    "StoredTensor",
    "decode",
    "encode",
    "version_of",
]

FORMAT: Final = "zerort-checkpoint"
VERSION: Final = 3
"""The newest version of the format that is read. Each checkpoint is written in the oldest that can hold it, which older
readers know: 1, unless extents are compressed or sparse."""
COMPRESSED_VERSION: Final = 2
SPARSE: Final = 1
"""How an extent is stored that is a bitmap and values."""

DATA_NAME: Final = re.compile(r"shard-[0-9]{5,}(-[0-9]{5,})?\.[0-9a-f]{16}\.bin")
"""The names of data files; nothing else is ever opened, or deleted, on a manifest's word."""

MOST_EXTENT_NBYTES: Final = 4 * 1024**2
"""The most bytes of an extent, which is read and checked as a whole: no manifest can ask for more memory than that."""

_HEAD = re.compile(rb'\{"format":"zerort-checkpoint","version":([0-9]{1,9}),"crc32c":"([0-9a-f]{8})",\n')

_BODY: Final = {
    "created": str,
    "zerort": str,
    "ranks": COUNT,
    "meta": dict,
    "progress": list,
    "files": [(Where(lambda name: type(name) is str and DATA_NAME.fullmatch(name) is not None, "a data file"), COUNT)],
    "kinds": Each(
        Each(
            (
                Where(lambda dtype: type(dtype) is str and dtype in ITEMSIZES, "a dtype"),
                [COUNT],
                [Where(lambda row: _is_extent(row), "an extent: file, offset, first, numel, crc32c")],
            )
        )
    ),
}
"""What a manifest looks like; whether its parts fit together is seen when it is built."""


def _is_extent(row: Any) -> bool:
    fields = len(StoredExtent._fields)
    return type(row) is list and fields - 2 <= len(row) <= fields and all(map(COUNT.test, row))


class StoredExtent(NamedTuple):
    """Where a piece of one tensor is stored."""

    file: int
    """The index of its data file."""
    offset: int
    """Its first byte in that file."""
    first: int
    """Its first element, counted in the tensor."""
    numel: int
    """Elements."""
    crc32c: int
    """The checksum of its bytes in the file."""
    stored_nbytes: int = 0
    """How many these are if it is compressed or sparse; else 0."""
    way: int = 0
    """How: `SPARSE`, or 0, as byte planes in a zstd frame."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one kind, as it was saved."""

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[StoredExtent, ...]
    """In the order of the tensor's elements, which they cover exactly."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.numel * itemsize(self.dtype)

    @property
    def stored_nbytes(self) -> int:
        """Return the bytes of its extents in their files."""
        width = itemsize(self.dtype)
        return sum(extent.stored_nbytes or extent.numel * width for extent in self.extents)

    @property
    def is_sparse(self) -> bool:
        """Say whether some of it is stored as a bitmap and values."""
        return any(extent.way == SPARSE for extent in self.extents)


class DataFile(NamedTuple):
    """A file of the checkpoint."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and where."""

    format: int
    """The version of the format that it was written in."""
    created: str
    """When, in ISO 8601, UTC."""
    zerort: str
    """The version of zerort that wrote it."""
    ranks: int
    """How many ranks saved it."""
    meta: Mapping[str, JSON]
    """What was the same on every rank: step, loss scale, optimizer, plan."""
    progress: tuple[JSON, ...]
    """What was each saving rank's own, by rank: random state, data position."""
    files: tuple[DataFile, ...]
    tensors: Mapping[str, Mapping[str, StoredTensor]]
    """By kind and full name."""
    digest: int = 0
    """The checksum of the manifest itself; ranks compare it."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())


def encode(manifest: Manifest) -> bytes:
    """Return the text of ``manifest.json``; the digest of the value given is not looked at."""
    body = {
        "created": manifest.created,
        "zerort": manifest.zerort,
        "ranks": manifest.ranks,
        "meta": manifest.meta,
        "progress": manifest.progress,
        "files": manifest.files,
        "kinds": {
            kind: {name: [tensor.dtype, tensor.shape, _rows(tensor)] for name, tensor in tensors.items()}
            for kind, tensors in manifest.tensors.items()
        },
    }
    rest = b'"body":' + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
    digest = crc32c(rest, crc32c(_head(manifest.format, 0)))
    return _head(manifest.format, digest) + rest


def _rows(tensor: StoredTensor) -> list[Sequence[int]]:
    return [one if one.way else one[:-1] if one.stored_nbytes else one[:-2] for one in tensor.extents]


def version_of(tensors: Mapping[str, Mapping[str, StoredTensor]], *, is_compressed: bool) -> int:
    """Return the oldest version of the format that has what extents need.

    Args:
        tensors: By kind and name.
        is_compressed: Whether some may be compressed.
    """
    stored = (one for named in tensors.values() for tensor in named.values() for one in tensor.extents)
    if any(one.way == SPARSE for one in stored):
        return VERSION
    return COMPRESSED_VERSION if is_compressed else 1


def _head(version: int, digest: int) -> bytes:
    return f'{{"format":"{FORMAT}","version":{version},"crc32c":"{digest:08x}",\n'.encode()


def decode(text: bytes, *, path: str) -> Manifest:
    """Read and check the text of a ``manifest.json``.

    Args:
        text: All of the file.
        path: The file, for messages.

    Raises:
        CorruptCheckpointError: Its bytes are not those that were written.
        CheckpointError: It is not a manifest of ours, or of a newer format.
    """
    head = _HEAD.match(text)
    if head is None:
        raise CheckpointError(
            f"Expected {path} to begin as a manifest of zerort does, got {text[:40]!r}. It belongs to another "
            "program, or is damaged: name the directory of a checkpoint, or take an older checkpoint."
        )
    version, digest = int(head[1]), int(head[2], 16)
    found = crc32c(memoryview(text)[head.end() :], crc32c(_head(version, 0)))
    if found != digest:
        raise CorruptCheckpointError(
            f"Expected checksum {digest:08x} for {path}, got {found:08x}: the manifest is damaged, so nothing in this "
            "checkpoint can be trusted. Take an older checkpoint."
        )
    if version > VERSION:
        raise CheckpointError(
            f"Expected a checkpoint of format {VERSION} or older, got format {version} in {path}. "
            "Load it with the newer zerort that wrote it."
        )
    try:
        document = json.loads(text, parse_constant=_refuse)
        expect(document, {"body": _BODY}, at="manifest")
        return _build(document["body"], version=version, digest=digest)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"Expected {path} to hold what format {version} says, got: {type(error).__name__}: {error}. Nothing was "
            "changed. It was not written by zerort, or by a faulty one: take an older checkpoint."
        ) from None


def _refuse(constant: str) -> float:
    raise ValueError(f"Expected finite numbers, got {constant}")


def _build(body: Any, *, version: int, digest: int) -> Manifest:
    """Return what a body says that looks as it should; here it is seen whether its parts fit together."""
    files = tuple(DataFile(name, nbytes) for name, nbytes in body["files"])
    _expect(len({file.name for file in files}) == len(files), "data files: one is there twice")
    _expect(len(body["progress"]) == body["ranks"] > 0, "progress of every rank")
    return Manifest(
        format=version,
        created=body["created"],
        zerort=body["zerort"],
        ranks=body["ranks"],
        meta=body["meta"],
        progress=tuple(body["progress"]),
        files=files,
        tensors={
            kind: {name: _tensor(row, files, version, what=f"{kind} {name!r}") for name, row in tensors.items()}
            for kind, tensors in body["kinds"].items()
        },
        digest=digest,
    )


def _tensor(row: Any, files: Sequence[DataFile], version: int, *, what: str) -> StoredTensor:
    dtype, shape, rows = row
    tensor = StoredTensor(dtype, tuple(shape), tuple(StoredExtent(*extent) for extent in rows))
    width, end = itemsize(dtype), 0
    for extent in tensor.extents:
        nbytes = extent.numel * width
        _expect(extent.numel > 0 and extent.first == end, f"extents of {what}")
        _expect(nbytes <= MOST_EXTENT_NBYTES, f"extents of {what}: one of {nbytes} bytes")
        _expect(extent.file < len(files), f"extents of {what}: there is no file {extent.file}")
        _expect(extent.stored_nbytes < nbytes, f"compressed extents of {what}")
        is_known = extent.way == 0 or (extent.way == SPARSE and version >= 3 and extent.stored_nbytes > 0)
        _expect(is_known, f"sparse extents of {what}")
        stored = extent.stored_nbytes or nbytes
        _expect(extent.offset + stored <= files[extent.file].nbytes, f"extents of {what} in their file")
        _expect(extent.offset % width == 0, f"aligned extents of {what}")
        end += extent.numel
    _expect(end == tensor.numel, f"every element of {what}")
    return tensor


def _expect(holds: bool, what: str) -> None:  # noqa: FBT001 (an assertion)
    if not holds:
        raise ValueError(f"no valid {what}")
