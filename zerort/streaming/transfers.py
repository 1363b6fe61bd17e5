"""`Transfer`: one array of a chunk on its way: where its values are kept, and which way they move.

    StoreTransfer     a range of a value of a store: read into a slot, written back from it       `Pipeline`
    ArrayTransfer     an array on the host or on a GPU: copied to where it is computed with,      `Staging`
                      unless it is there already, and copied back

A chunk is a list of transfers that are computed with together, a run is a list of chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files.blocks import GRAIN_NBYTES, PAGE_NBYTES
from zerort.storage.files.segments import round_up
from zerort.storage.stores.store import Store
from zerort.typing import Array, DtypeLike

__all__ = [
    "ArrayTransfer",
    "Chunks",
    "Place",
    "StoreTransfer",
    "Transfer",
    "check_apart",
    "cut_evenly",
    "do_touch",
    "lay_out",
    "slot_nbytes_of",
    "spans_on_host",
]

Place = Literal["device", "host"]
"""Where something is computed."""


class Transfer:
    """One array of a chunk; see the module."""

    __slots__ = ()

    alignment: ClassVar[int]
    """Bytes; the array begins at a multiple of this in a slot."""
    write: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        raise NotImplementedError

    @property
    def element(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        raise NotImplementedError

    @property
    def span(self) -> tuple[tuple[int, str], int, int]:
        """Which bytes these are: of what, the first, and one past the last."""
        raise NotImplementedError

    def moves_to(self, place: Place) -> bool:
        """Say whether the values are kept elsewhere, so that they need room in a slot."""
        raise NotImplementedError

    def room(self, place: Place) -> int:
        """Return the bytes that it takes in a slot."""
        return round_up(self.nbytes, self.alignment) if self.moves_to(place) else 0

    def array_in(self, memory: Any, place: Place) -> Any:
        """Return the array to compute with, given its room in a slot."""
        return memory[: self.nbytes].view(self.element)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTransfer(Transfer):
    """A range of a value of a store."""

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

    alignment: ClassVar[int] = PAGE_NBYTES  # so that disks move it without a copy

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.numel * self.element.itemsize

    @property
    def element(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return numpy_dtype(self.dtype)

    @property
    def span(self) -> tuple[tuple[int, str], int, int]:
        """The bytes of the value."""
        return (id(self.store), self.name), self.offset, self.offset + self.nbytes

    def moves_to(self, place: Place) -> bool:
        """Return True: nothing is computed in a store."""
        return True


@dataclass(frozen=True, slots=True)
class ArrayTransfer(Transfer):
    """An array on the host or on a GPU."""

    array: Any
    """1-D and contiguous, on the host (NumPy; copies run beside other work if it is pinned) or on the device."""
    read: bool = True
    """Whether its values are needed."""
    write: bool = True
    """Whether it is changed."""

    alignment: ClassVar[int] = 256  # where CUDA's own allocations begin

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        nbytes: int = self.array.nbytes
        return nbytes

    @property
    def element(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype

    @property
    def span(self) -> tuple[tuple[int, str], int, int]:
        """The addresses: those of hosts and GPUs are apart, as CUDA gives all of them one space."""
        array = self.array
        interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
        begin: int = interface["data"][0]
        return (0, ""), begin, begin + self.nbytes

    def moves_to(self, place: Place) -> bool:
        """Say whether it is elsewhere.

        >>> ArrayTransfer(np.ones(3)).moves_to("device"), ArrayTransfer(np.ones(3)).moves_to("host")
        (True, False)
        """
        return isinstance(self.array, np.ndarray) == (place == "device")

    def array_in(self, memory: Any, place: Place) -> Any:
        """Return its copy in a slot, or the array itself where it is computed with already."""
        return memory[: self.nbytes].view(self.element) if self.moves_to(place) else self.array


Chunks = Sequence[Sequence[Transfer]]


def slot_nbytes_of(chunks: Chunks, *, on: Place = "host") -> int:
    """Return the memory that the largest of these chunks takes in a slot.

    >>> slot_nbytes_of([[ArrayTransfer(np.zeros(3)), ArrayTransfer(np.zeros(100))]], on="device")
    1280
    """
    return max((sum(one.room(on) for one in chunk) for chunk in chunks), default=0)


def lay_out(chunk: Sequence[Transfer], memory: Array, *, on: Place = "host") -> list[Any]:
    """Return the arrays to compute with, one for each transfer of a chunk.

    Args:
        chunk: The transfers.
        memory: Of the slot that the chunk passes through.
        on: Where it is computed.
    """
    arrays, begin = [], 0
    for one in chunk:
        end = begin + one.room(on)
        arrays.append(one.array_in(memory[begin:end], on))
        begin = end
    return arrays


def check_apart(chunks: Chunks) -> None:
    """Raise if a transfer touches what another one writes: which comes first would depend on the disk, or the bus.

    >>> values = np.zeros(10)
    >>> check_apart([[ArrayTransfer(values[:6])], [ArrayTransfer(values[6:], write=False)]])
    >>> check_apart([[ArrayTransfer(values[:6])], [ArrayTransfer(values[5:], write=False)]])
    Traceback (most recent call last):
    zerort.errors.CallError: Expected chunks that do not touch what others write, got 8 bytes of chunk 1 that ...
    """
    spans = sorted((*one.span, one.write, number) for number, chunk in enumerate(chunks) for one in chunk if one.nbytes)
    for (_, name), group in itertools.groupby(spans, key=lambda span: span[0]):
        furthest = written = 0
        for _, begin, end, write, number in group:
            shared = min(furthest if write else written, end) - begin
            if shared > 0:
                where = f" ({name!r}, from byte {begin} on)" if name else ""
                raise CallError(
                    f"Expected chunks that do not touch what others write, got {shared} bytes of chunk {number}{where} "
                    "that are another's, too. Cut them so that each byte is in one chunk."
                )
            furthest, written = max(furthest, end), max(written, end) if write else written


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
    marks = [min(grains * number // max(ranges, 1) * GRAIN_NBYTES, numel) for number in range(ranges + 1)]
    return list(itertools.pairwise(marks))


def spans_on_host(chunks: Sequence[Sequence[ArrayTransfer]], *, written: bool) -> list[tuple[int, int]]:
    """Return the addresses on the host, ``(first, one past the last)``, that chunks write, or else read; in order."""
    return sorted(
        one.span[1:]
        for chunk in chunks
        for one in chunk
        if (one.write if written else one.read) and one.moves_to("device")
    )


def do_touch(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Say whether any of some spans has a byte of any of the others; both are in order.

    >>> do_touch([(0, 4), (8, 12)], [(4, 8), (12, 16)]), do_touch([(0, 4), (8, 12)], [(4, 9)])
    (False, True)
    """
    merged = sorted([(begin, end, 0) for begin, end in spans] + [(begin, end, 1) for begin, end in others])
    reach = [0, 0]  # how far either has come
    for begin, end, side in merged:
        if begin < min(reach[1 - side], end):
            return True
        reach[side] = max(reach[side], end)
    return False
