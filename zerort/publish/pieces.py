"""What a rank publishes: its elements of every tensor, in pieces that memory has room for; and what it published last.

A piece is read from wherever the parameters rest, converted to the published dtype, and compared with the bits of the
last version. Those lie in a mapped file without a name, in the feed's directory: this rank's range, in pages that the
kernel can write there and take away, not memory of the process.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerort.checkpoint import Value
from zerort.checkpoint.format.casts import FLOATS, convert
from zerort.checkpoint.format.extents import round_up
from zerort.checkpoint.format.safetensors import plan_file
from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.native.dtypes import numpy_dtype
from zerort.publish.records import Tensor
from zerort.typing import Array

__all__ = ["Base", "Part", "base_nbytes", "parts_of", "plan_full", "tensors_of"]

_PIECE_NUMEL = 1024**2
"""Elements that are worked on at once: they stay in the caches from the conversion to the checksum."""


_ALIGNMENT = 64
"""Parts lie at multiples of it."""


class Part(NamedTuple):
    """Elements of a tensor that this rank has, in the published dtype; valid until the next."""

    tensor: int
    first: int
    at: int
    """Where its bytes lie in the rank's `Base`."""
    data: Array


def tensors_of(values: Sequence[Value], dtype: str | None) -> tuple[Tensor, ...]:
    """Return what will be published, by value and place.

    Raises:
        CallError: Two tensors have one name.
    """
    tensors = [
        Tensor(extent.name, _published(value.layout.dtype, dtype), tuple(extent.shape))
        for value in values
        for extent in value.layout.extents
    ]
    for name, count in Counter(tensor.name for tensor in tensors).items():
        if count > 1:
            raise CallError(f"Expected tensors of different names to publish, got {name!r} twice. Rename one of them.")
    return tuple(tensors)


def parts_of(values: Sequence[Value], rank: int, dtype: str | None) -> Iterator[Part]:
    """Yield all that ``rank``, which is this one, has, in an order that is the same every time."""
    at, before = 0, 0
    converted: dict[str, Array] = {}
    for value in values:
        places = {extent.name: before + index for index, extent in enumerate(value.layout.extents)}
        before += len(places)
        wanted = numpy_dtype(_published(value.layout.dtype, dtype))
        own = value.partition.of(rank)
        for extent, in_extent, in_range in value.layout.overlaps(own.first, own.stop):
            for begin in range(0, in_range.stop - in_range.start, _PIECE_NUMEL):
                start = in_range.start + begin
                source = _read(value.mine, start, min(start + _PIECE_NUMEL, in_range.stop))
                data = source
                if source.dtype != wanted:
                    if wanted.name not in converted:
                        converted[wanted.name] = np.empty(_PIECE_NUMEL, wanted)
                    data = converted[wanted.name][: source.size]
                    convert(source, out=data)
                yield Part(places[extent.name], in_extent.start + begin, at, data)
                at += round_up(data.nbytes, _ALIGNMENT)


def base_nbytes(values: Sequence[Value], rank: int, dtype: str | None) -> int:
    """Return the bytes that a `Base` of these has."""
    total = 0
    for value in values:
        width = numpy_dtype(_published(value.layout.dtype, dtype)).itemsize
        own = value.partition.of(rank)
        for _, _, in_range in value.layout.overlaps(own.first, own.stop):
            whole, rest = divmod(in_range.stop - in_range.start, _PIECE_NUMEL)
            total += whole * round_up(_PIECE_NUMEL * width, _ALIGNMENT) + round_up(rest * width, _ALIGNMENT)
    return total


def plan_full(
    tensors: Sequence[Tensor], number: int, *, sparse: Collection[str] = ()
) -> tuple[bytes, list[int | None], int]:
    """Return the head of a whole version's file, where each tensor begins in it, and its bytes.

    Args:
        tensors: All.
        number: The version's.
        sparse: Those that are not in it.
    """
    nbytes = {one.name: math.prod(one.shape) * itemsize(one.dtype) for one in tensors}
    placed = [(one.name, one.dtype, one.shape, nbytes[one.name]) for one in tensors if one.name not in sparse]
    head, order = plan_file(placed, {"format": "np", "version": str(number)})
    starts, at = {}, len(head)
    for name in order:
        starts[name] = at
        at += nbytes[name]
    return head, [starts.get(one.name) for one in tensors], at


class Base:
    """The bits that this rank published last, in a mapped file that ends with the process.

    Args:
        where: The directory that it lies in.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._map: mmap.mmap | None = None

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes``; what was there before is gone.

        Raises:
            OSError: The disk has no room, or refused.
        """
        self.close()
        if nbytes:
            with tempfile.TemporaryFile(dir=self._where) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a page without room would end the process, later
                self._map = mmap.mmap(file.fileno(), nbytes)

    def of(self, part: Part) -> Array:
        """Return the bits that this part had when they were last written here; writable."""
        assert self._map is not None
        return np.frombuffer(self._map, part.data.dtype, part.data.size, part.at)

    def close(self) -> None:
        """Give the file back, as soon as nobody looks at it."""
        self._map = None


def _published(own: str, dtype: str | None) -> str:
    """Return the dtype in which a tensor is published: floats as asked for, all others as they are."""
    return dtype if dtype is not None and own in FLOATS else own


def _read(mine: Any, first: int, last: int) -> Array:
    if isinstance(mine, np.ndarray):
        return mine[first:last]
    out = np.empty(last - first, mine.dtype)
    mine.read(first, out).wait()
    return out
