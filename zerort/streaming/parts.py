"""`Part` of a chunk that streams through a pipeline, and the report of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.storage.stores.chunk_file import GRAIN_NBYTES
from zerort.storage.stores.store import Store
from zerort.typing import DtypeLike

__all__ = ["Part", "PipelineReport", "check_apart", "cut_evenly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a chunk takes from one value."""

    store: Store
    name: str
    """The value."""
    numel: int
    """Elements."""
    dtype: DtypeLike = "float32"
    offset: int = 0
    """The first byte."""
    read: bool = True
    """False leaves the memory as it is: all of it will be written."""
    write: bool = True
    """False does not write it back: it is only read."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """What a run did, and where its time went."""

    chunks: int
    depth: int
    """Slots at the end of the run."""
    read_nbytes: int
    written_nbytes: int
    seconds: float
    compute_seconds: float
    """Of `seconds`, in compute."""
    stall_seconds: float
    """Of `seconds`, waiting for reads or writes: what the overlap did not hide."""


def check_apart(chunks: Sequence[Sequence[Part]]) -> None:
    """Raise if a part touches what another one writes: it would be read before, or after, as the disk happens to be."""
    parts = sorted(
        (id(part.store), part.name, part.offset, part.offset + part.nbytes, part.write)
        for chunk in chunks
        for part in chunk
        if part.numel
    )
    furthest, written = 0, 0
    for at, (store, name, begin, end, write) in enumerate(parts):
        if at == 0 or parts[at - 1][:2] != (store, name):
            furthest = written = 0
        if begin < (furthest if write else written):
            raise CallError(
                f"Expected chunks that do not touch what others write, got two with byte {begin} of {name!r}. Cut them "
                "so that each byte is in one chunk."
            )
        furthest = max(furthest, end)
        written = max(written, end) if write else written


def cut_evenly(numel: int, *, most: int) -> list[tuple[int, int]]:
    """Cut elements into ranges of about equal length, ``(first, one past the last)``, that begin at whole grains.

    A chunk that begins in the middle of a grain costs a read of its rest; one that begins at a multiple of 256 Ki
    elements does so in no dtype.

    Args:
        numel: Elements.
        most: Of one range, at most; rounded down to whole grains, at least one.

    >>> cut_evenly(1_000_000, most=600_000)
    [(0, 524288), (524288, 1000000)]
    """
    grains = -(-numel // GRAIN_NBYTES)
    ranges = -(-grains // max(most // GRAIN_NBYTES, 1))
    marks = [min(grains * at // max(ranges, 1) * GRAIN_NBYTES, numel) for at in range(ranges + 1)]
    return list(itertools.pairwise(marks))
