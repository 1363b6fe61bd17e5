"""`assemble`: from what every rank has written and linked to the one `Manifest` of a save.

heads      what each rank said before it wrote      ┐
written    where its extents are in its file        ├──> tensors by kind and name, extents in their order
links      files taken over from its store          ┘
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

from zerort.checkpoint.files.directory import data_name
from zerort.checkpoint.files.links import Links
from zerort.checkpoint.files.writer import WrittenExtent
from zerort.checkpoint.format.extents import plan_shard
from zerort.checkpoint.format.manifest import DataFile, Manifest, StoredExtent, StoredTensor, version_of
from zerort.checkpoint.value import JSON, Value
from zerort.typing import Array

__all__ = ["Head", "assemble"]


class Head(NamedTuple):
    """What a rank tells the others before it writes."""

    token: str
    """What names of this save's files have in common; rank 0's counts."""
    host: str
    """Where the rank runs."""
    nbytes: int
    """Bytes of its file, before they are compressed."""
    progress: JSON
    """What it needs to go on."""
    phases: list[Any]
    """How its values lie in their pages, one by one."""
    linked: list[Any]
    """For some values, by index, the ranges that are taken over as files."""
    taken: int
    """Bytes of these that the next step writes to other files."""


def assemble(
    values: Sequence[Value],
    heads: Sequence[Head],
    written: Array,
    files: Sequence[DataFile],
    links: Sequence[Links],
    *,
    meta: JSON,
    is_compressed: bool,
) -> Manifest:
    """Return the manifest of a save.

    Args:
        values: What is saved, as rank 0 holds it.
        heads: Every rank's.
        written: Every rank's `WrittenExtent`s as rows, rank after rank.
        files: All data files.
        links: What each rank has linked.
        meta: What is the same on every rank.
        is_compressed: Whether extents are compressed.
    """
    rows: dict[tuple[str, str], list[StoredExtent]] = {
        (value.kind, extent.name): [] for value in values for extent in value.layout.extents
    }
    kinds = [value.kind for value in values]
    indices = {file.name: index for index, file in enumerate(files)}
    places = iter(written.tolist())
    for rank, head in enumerate(heads):
        index = indices.get(data_name(rank, heads[0].token), -1)
        for one in plan_shard(values, rank, phases=head.phases, linked=dict(head.linked)).extents:
            place = WrittenExtent(*next(places))
            row = StoredExtent(index, place.offset, one.first, one.numel, place.crc32c, place.stored_nbytes, place.way)
            rows[kinds[one.value], one.name].append(row)
        for link in links[rank].extents:
            index = indices[links[rank].files[link.file].name]
            row = StoredExtent(index, link.offset, link.first, link.numel, link.crc32c)
            rows[kinds[link.value], link.name].append(row)
    tensors: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in kinds}
    for value in values:
        for extent in value.layout.extents:
            extents = tuple(sorted(rows[value.kind, extent.name], key=lambda row: row.first))
            tensors[value.kind][extent.name] = StoredTensor(value.layout.dtype, extent.shape, extents)
    return Manifest(
        format=version_of(tensors, is_compressed=is_compressed),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        zerort=_zerort_version(),
        ranks=len(heads),
        meta=meta,
        progress=tuple(head.progress for head in heads),
        files=tuple(files),
        tensors=tensors,
    )


@functools.cache  # metadata keeps what it reads of every directory on the path, anew whenever one of them changes
def _zerort_version() -> str:
    try:
        return metadata.version("zerort")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree on the path, not installed
