"""`Value`: what this rank holds of one kind of value, such as the parameters or one moment of the optimizer.

A value comes with the integers that say where everything lies: its `FlatLayout` names the tensors, its `Partition` the
ranks. So a checkpoint is written by tensor name, and read back under any other layout and partition. What rests below
memory (`OffloadedArray`) passes through it block by block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from zerort.device import Ticket
from zerort.errors import CallError
from zerort.layout import FlatLayout, Partition
from zerort.native import address_of, crc32c
from zerort.storage.files.extents import FileExtent
from zerort.typing import Array

__all__ = [
    "JSON",
    "PAGE_NBYTES",
    "Linkable",
    "LinkableFile",
    "OffloadedArray",
    "Value",
    "as_json",
    "check_values",
    "describe_values",
]

PAGE_NBYTES: Final = 4096
"""Data files are a multiple of this, so that O_DIRECT reads and writes whole pages to the end."""

JSON = Any
"""What ``json.dumps`` takes: None, bool, int, float, str, and lists and dicts of these."""


@runtime_checkable
class OffloadedArray(Protocol):
    """A 1-D array of which not all is in memory. Any thread may read and write it."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""

    @property
    def size(self) -> int:
        """Elements."""

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Fill ``out`` with the elements from ``first`` on."""

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Put ``source`` at the elements from ``first`` on."""


class LinkableFile(NamedTuple):
    """A file of a store that holds elements of a range."""

    first: int
    """The element at which the store's value begins, counted in the range."""
    extent: FileExtent
    """The part of that value that lies in the file."""


@runtime_checkable
class Linkable(OffloadedArray, Protocol):
    """Values of which some, or all, are in files that a checkpoint can take over as they are."""

    def linkable_files(self, directory: str) -> Sequence[LinkableFile]:
        """Return the files that can have a second name in a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One kind of value of some tensors: what this rank holds of it."""

    kind: str
    """``"parameter"``, ``"exp_avg"``, …; a tensor name occurs once per kind in a checkpoint."""
    layout: FlatLayout
    """Where each tensor lies in the flat buffer; its dtype is that of `mine`."""
    partition: Partition
    """Which rank holds which range of the buffer."""
    mine: Array | OffloadedArray
    """This rank's range: 1-D, ``partition.counts[rank]`` elements. A load fills it in place."""
    sparse: frozenset[str] = frozenset()
    """Tensors of which many elements are zero: where that is shorter, a bitmap and the others are stored."""
    is_partial: bool = False
    """Whether a checkpoint may hold more tensors of this kind than are asked for, also where a load is strict."""
    is_frozen: bool = False
    """Whether no step changes it: then files that are linked need no room for others."""

    @property
    def array(self) -> Array:
        """This rank's range, which is known to be in memory."""
        assert isinstance(self.mine, np.ndarray)
        return self.mine

    @property
    def phase(self) -> int:
        """Where the range begins in its page of memory, in bytes; 0 for what is not in memory."""
        return address_of(self.mine) % PAGE_NBYTES if isinstance(self.mine, np.ndarray) else 0


def check_values(values: Sequence[Value], *, rank: int, size: int, writable: bool) -> None:
    """Raise unless the values can be saved or loaded by this rank of a group of ``size``.

    Raises:
        CallError: A value does not fit its layout, its partition or the group, or a tensor is there twice.
    """
    seen: set[tuple[str, str]] = set()
    for value in values:
        if not isinstance(value.kind, str) or not value.kind:
            raise CallError(f"Expected the kind of a value to be a non-empty str, got {value.kind!r}.")
        if value.partition.size != size or value.partition.numel != value.layout.numel:
            raise CallError(
                f"Expected the partition of {value.kind!r} to cut {value.layout.numel} elements for {size} ranks, got "
                f"{value.partition.numel} elements for {value.partition.size}. Build it from layout.numel, group.size."
            )
        _check_mine(value, value.partition.counts[rank], writable=writable)
        for extent in value.layout.extents:
            if (value.kind, extent.name) in seen:
                raise CallError(
                    f"Expected each tensor once per kind, got {extent.name!r} twice as {value.kind!r}. Give tensors of "
                    "different units different full names."
                )
            seen.add((value.kind, extent.name))


def _check_mine(value: Value, numel: int, *, writable: bool) -> None:
    mine: Any = value.mine
    is_array = isinstance(mine, np.ndarray)
    if not (mine.ndim == 1 and mine.flags.c_contiguous if is_array else isinstance(mine, OffloadedArray)):
        got = f"shape {mine.shape}, strides {mine.strides}" if is_array else type(mine).__name__
        raise CallError(f"Expected {value.kind!r} as a contiguous 1-D NumPy array, got {got}. Pass the flat shard.")
    if str(mine.dtype) != value.layout.dtype or mine.size != numel:
        raise CallError(
            f"Expected this rank's range of {value.kind!r} to be {numel} elements of {value.layout.dtype}, got "
            f"{mine.size} of {mine.dtype}. Pass the range that the partition gives this rank."
        )
    if writable and is_array and not mine.flags.writeable:
        raise CallError(f"Expected {value.kind!r} to be writable, got a read-only array. Pass the array to be filled.")


def describe_values(values: Sequence[Value]) -> list[list[Any]]:
    """Return what has to be the same on every rank, short enough to be shown: a row per value.

    A row is the kind, the dtype, how many tensors and elements, and a checksum of every name, shape, place and count,
    and of which tensors are sparse.
    """
    rows = []
    for value in values:
        places = [[extent.name, extent.shape, extent.offset] for extent in value.layout.extents]
        digest = crc32c(json.dumps([places, value.partition.counts, sorted(value.sparse)]).encode())
        rows.append([value.kind, value.layout.dtype, len(places), value.layout.numel, f"{digest:08x}"])
    return rows


def as_json(value: JSON, *, what: str) -> JSON:
    """Return the value as it will be read back, or say why JSON cannot hold it.

    Raises:
        CallError: It holds something that JSON does not know: an array, NaN, an object.
    """
    try:
        return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CallError(
            f"Expected {what} as JSON knows it (None, bool, finite numbers, str, list, dict), got: {error}. "
            "Turn arrays into lists and NaN into None."
        ) from None
