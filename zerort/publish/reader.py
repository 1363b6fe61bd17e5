"""`Reader`: the newest published version as arrays, in a process without MPI.

    update    read feed.json → what is new? → check every byte of it → map the whole version, or change our own copy

A whole version is mapped, privately: its pages come from the page cache, and only those that later deltas change are
copied. Sparse tensors are not in its file, but beside it, and come into memory. Files are checked before anything of
them is used, so the arrays are those of one version at any time.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerort.checkpoint.failure import storage_error
from zerort.checkpoint.files.directory import MOST_REPLACED
from zerort.checkpoint.format.safetensors import plan_file
from zerort.codec import apply_delta
from zerort.errors import CallError, CheckpointError, CorruptCheckpointError
from zerort.native import crc32c
from zerort.native.dtypes import numpy_dtype
from zerort.publish.records import Head, Link, Piece, Tensor, Version
from zerort.storage.files import disk
from zerort.storage.files.activity import on_disk
from zerort.typing import Array

__all__ = ["Reader"]


class Reader:
    """Follows what a trainer publishes with `Runtime.publish`. Needs no MPI and no other rank.

    Args:
        where: The directory that was given to ``rt.publish``.
        mapping: Other names: ``{"lm_head": "head.weight"}``; or several tensors as one, one below the other along the
            first axis: ``{"qkv": ("q", "k", "v")}``. Tensors that it does not name keep theirs.
        map_files: Map whole versions. False reads them into memory, for file systems that take files away from
            under their readers, as NFS does if the trainer is on another host.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        mapping: Mapping[str, str | Sequence[str]] | None = None,
        map_files: bool = True,
    ) -> None:
        self.where = os.path.abspath(os.fspath(where))
        self.version = 0
        """The version that the arrays hold; 0: none yet."""
        self.updates = 0
        """How many updates the trainer had done."""
        self._mapping = {
            name: (given,) if isinstance(given, str) else tuple(given) for name, given in (mapping or {}).items()
        }
        self._maps_files = map_files
        self._link: Link | None = None  # of that version; a number alone may be another's
        self._tensors: tuple[Tensor, ...] = ()
        self._flat: list[Array] = []  # by tensor, 1-D, writable
        self._arrays: dict[str, Array] = {}

    def update(self) -> dict[str, Array]:
        """Take over the newest version, and return its arrays by name.

        They are read-only, and the next update changes them in place: copy those that are to stay. `version` says which
        version they are; it is the same as before if nothing new was published.

        Raises:
            CheckpointError: There is no feed, one of another format or of another model, or the mapping does not fit.
            CorruptCheckpointError: A file is damaged. The arrays are those of `version`, which is whole.
            StorageError: The file system refused.
        """
        for _ in range(MOST_REPLACED):
            head = Head.read(self.where)
            try:
                self._follow(head)
            except FileNotFoundError as error:
                if Head.read(self.where) == head:
                    raise CorruptCheckpointError(
                        f"Expected {error.filename} of the feed at {self.where}, got nothing: it was deleted."
                    ) from None
                continue  # a newer whole version has taken its place meanwhile
            except OSError as error:
                raise storage_error(error, path=self.where) from error
            return dict(self._arrays)
        raise CheckpointError(
            f"Expected the versions in {self.where} to stay until they are read, got {MOST_REPLACED} new ones in a "
            "row. Publish less often, or with a larger full_every."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays, as they are now, as a safetensors file; it appears whole or not at all.

        Raises:
            CallError: Nothing was read yet.
            StorageError: The file system refused.
        """
        if not self.version:
            raise CallError("Expected a version to save, got none. Call update() first.")
        target = os.path.abspath(os.fspath(path))
        placed = [(name, array.dtype.name, array.shape, array.nbytes) for name, array in self._arrays.items()]
        head, order = plan_file(placed, {"format": "np", "version": str(self.version), "updates": str(self.updates)})
        draft = f"{target}.{secrets.token_hex(8)}.tmp"
        try:
            descriptor = disk.create(draft)
            try:
                disk.write(descriptor, head, path=draft)
                for name in order:
                    disk.write(descriptor, self._arrays[name].reshape(-1).view(np.uint8).data, path=draft)
                disk.sync(descriptor, path=draft)
            finally:
                os.close(descriptor)
            disk.rename(draft, target)
        except OSError as error:
            if os.path.lexists(draft):
                os.unlink(draft)
            raise storage_error(error, path=target) from error

    # -- from version to version -----------------------------------------------------------------------------------

    def _follow(self, head: Head) -> None:
        if self._tensors and head.tensors != self._tensors:
            odd = sorted(set(head.tensors) ^ set(self._tensors)) or [head.tensors[0]]
            raise CheckpointError(
                f"Expected further versions of the model that this reader has (version {self.version}), got another "
                f"model in {self.where}: they differ in {odd[0].name!r} ({odd[0].dtype}, shape {odd[0].shape}). Make a "
                "new Reader for it."
            )
        known = 0
        if self._link in head.chain:
            known = head.chain.index(self._link)
        else:
            self._take_full(head, head.chain[0])
        for link in head.chain[known + 1 :]:
            self._take_delta(link)

    def _take_full(self, head: Head, link: Link) -> None:
        version = Version.read(self.where, link)
        (name, nbytes), *others = version.files
        path = os.path.join(self.where, name)
        with open(disk.open_regular(path, os.O_RDONLY), "rb") as file, on_disk("read", path):
            if os.fstat(file.fileno()).st_size != nbytes:
                raise _damaged(path, f"{nbytes} bytes", f"{os.fstat(file.fileno()).st_size}")
            octets: Array = np.memmap(file, np.uint8, "c") if self._maps_files else np.fromfile(file, np.uint8)
        dense = [piece for piece in version.pieces if piece.file == 0]
        _check(path, octets, dense)
        starts: dict[int, int] = {}
        for piece in dense:
            begin = piece.offset - piece.first * (piece.nbytes // max(piece.numel, 1))
            starts[piece.tensor] = begin
        flat = [
            octets[starts[index] :][: math.prod(one.shape) * numpy_dtype(one.dtype).itemsize].view(
                numpy_dtype(one.dtype)
            )
            if index in starts
            else np.zeros(math.prod(one.shape), numpy_dtype(one.dtype))
            for index, one in enumerate(head.tensors)
        ]
        self._apply(version, flat, self._read_deltas(version, others, first=1))
        # Nothing of before is kept from here on.
        self._arrays, self._flat = _mapped(head.tensors, flat, self._mapping)
        self._link, self._tensors = link, head.tensors
        self.version, self.updates = link.number, version.updates

    def _take_delta(self, link: Link) -> None:
        version = Version.read(self.where, link)
        self._apply(version, self._flat, self._read_deltas(version, version.files, first=0))
        self._link, self.version, self.updates = link, link.number, version.updates

    def _read_deltas(self, version: Version, files: Sequence[tuple[str, int]], *, first: int) -> dict[int, Array]:
        """Return the contents of some files of a version, checked, by their numbers, of which the first is given."""
        contents = {}
        for number, (name, nbytes) in enumerate(files, first):
            path = os.path.join(self.where, name)
            with open(disk.open_regular(path, os.O_RDONLY), "rb") as file, on_disk("read", path):
                octets: Array = np.fromfile(file, np.uint8)
            if octets.nbytes != nbytes:
                raise _damaged(path, f"{nbytes} bytes", f"{octets.nbytes}")
            _check(path, octets, [piece for piece in version.pieces if piece.file == number])
            contents[number] = octets
        return contents

    @staticmethod
    def _apply(version: Version, flat: Sequence[Array], contents: Mapping[int, Array]) -> None:
        """Change elements as the deltas of a version say."""
        for piece in version.pieces:
            if piece.file in contents:
                target = flat[piece.tensor][piece.first : piece.first + piece.numel]
                apply_delta(target, contents[piece.file][piece.offset : piece.offset + piece.nbytes])


def _check(path: str, octets: Array, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        found = crc32c(octets[piece.offset : piece.offset + piece.nbytes])
        if found != piece.crc32c:
            where = f"{piece.nbytes} bytes at {piece.offset}"
            raise _damaged(path, f"checksum {piece.crc32c:08x} of {where}", f"{found:08x}")


def _damaged(path: str, expected: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"Expected {expected} in {path}, got {got}: the file is damaged. The next whole version replaces it."
    )


def _mapped(
    tensors: Sequence[Tensor], flat: Sequence[Array], mapping: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Array], list[Array]]:
    """Return read-only arrays under their names here, and for each tensor where its elements lie, writable."""
    places = {tensor.name: index for index, tensor in enumerate(tensors)}
    given = [source for sources in mapping.values() for source in sources]
    for source in given:
        if source not in places:
            raise CheckpointError(f"Expected mapping to name published tensors, got {source!r}, which is none of them.")
        if given.count(source) > 1:
            raise CheckpointError(f"Expected each published tensor once in mapping, got {source!r} twice.")
    wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in places if name not in given}
    for name, sources in mapping.items():
        if name in wanted:
            raise CheckpointError(f"Expected new names in mapping, got {name!r}, which another tensor has.")
        wanted[name] = sources
    arrays: dict[str, Array] = {}
    own = list(flat)
    for name, sources in wanted.items():
        parts = [tensors[places[source]] for source in sources]
        shape = parts[0].shape
        values = flat[places[sources[0]]]
        if len(parts) > 1:
            if any(not one.shape or (one.dtype, one.shape[1:]) != (parts[0].dtype, shape[1:]) for one in parts):
                found = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in parts)
                raise CheckpointError(
                    f"Expected tensors of one dtype that differ in their first axis alone for {name!r}, got {found}."
                )
            shape = (sum(one.shape[0] for one in parts), *shape[1:])
            values = np.concatenate([flat[places[source]] for source in sources])
            at = 0
            for source in sources:
                size = flat[places[source]].size
                own[places[source]] = values[at : at + size]
                at += size
        array: Any = values.reshape(shape).view(np.ndarray)
        array.flags.writeable = False
        arrays[name] = array
    return arrays, own
