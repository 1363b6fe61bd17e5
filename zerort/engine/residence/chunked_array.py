"""`ChunkedArray`: a 1-D array of this rank, cut into chunks: the first in memory, the others as values of a store.

    cuts      0 ───────── 4096 ───────── 8192 ───────── 11000
    chunk     │ 0: memory    │ 1: memory    │ 2: "block0 float32/exp_avg/2"

Everything that an update touches is one: each kind of state, master weights, parameters, gradients. One that is in
memory as a whole is an array with one chunk (decision 0027). Nothing else knows what holds a chunk; `backings.py` makes
them, `zerort.testing.contracts.residence` says what all of them hold. Next in reading order: `parameters.py`.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort.comm.arrays import address_of_any
from zerort.device import Done, HostDevice, Ticket, joined
from zerort.errors import CallError
from zerort.native import crc32c
from zerort.typing import Array, Device, Reserve

if TYPE_CHECKING:
    from zerort.checkpoint.value import LinkableFile
    from zerort.storage.session import StorageSession
    from zerort.streaming import StoreTransfer

__all__ = ["LEAST_NUMEL", "ChunkedArray", "colocate", "cut_chunks"]

LEAST_NUMEL = 2048
"""Elements. Chunks begin at multiples of it: a page of every dtype, so that disks move them without a copy."""


class ChunkedArray:
    """One 1-D array, chunk by chunk.

    Args:
        name: What its values are called in a store, before the chunk's number.
        cuts: Where chunks begin, in elements, and the end of the last.
        memory: The first chunks, 1-D: all of them, or ``cuts[resident]`` elements.
        resident: How many chunks are in memory; None: all.
        storage: Where the others rest; `create` makes them.
        device: Whose memory it is, if that is not the host's.
        reserve: The addresses that all ranks' ranges have on this one, of which ``memory`` is a part.
        first: Where it begins in these, in elements.
    """

    def __init__(
        self,
        name: str,
        cuts: Sequence[int],
        memory: Array,
        *,
        resident: int | None = None,
        storage: StorageSession | None = None,
        device: Device | None = None,
        reserve: Reserve | None = None,
        first: int = 0,
    ) -> None:
        self.name = name
        self.device: Device = HostDevice() if device is None else device
        """On which it is computed with."""
        self.cuts = tuple(cuts)
        self.memory = memory
        self.resident = len(cuts) - 1 if resident is None else resident
        self._storage = storage
        self.reserve = reserve
        """Where the same values of another partition are to be, if there is such a place: what is in both stays."""
        self.first = first
        """Where it begins there."""
        self.grain: int | None = None
        """Bytes of a stored chunk that are checked together, for `create`; None: as is best for whole chunks."""
        assert memory.size == self.cuts[self.resident]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return self.memory.dtype

    @property
    def size(self) -> int:
        """Elements, in memory and elsewhere."""
        return self.cuts[-1]

    @property
    def has_offloaded(self) -> bool:
        """Whether some of it is not in memory."""
        return self.memory.size < self.size

    @property
    def is_stored(self) -> bool:
        """Whether chunks of it are values of a store, if they have elements; the same on every rank."""
        return self.resident < len(self.cuts) - 1

    @property
    def in_reach(self) -> bool:
        """Whether all of it is in the memory that computing happens in; the same on every rank."""
        return not self.is_stored and isinstance(self.memory, np.ndarray) == self.device.in_host_memory

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes that are not in memory."""
        return (self.size - self.memory.size) * self.dtype.itemsize

    def create(self) -> None:
        """Make the values that are not in memory: zeros.

        Raises:
            StorageError: There is no room, or the file system refused.
        """
        for at in self._offloaded_chunks():
            assert self._storage is not None
            self._storage.store.create(self._value(at), self._numel(at) * self.dtype.itemsize, grain=self.grain)

    def delete(self) -> None:
        """Delete the values that `create` has made, all or some.

        Raises:
            StorageError: The file system refused.
        """
        for at in self._offloaded_chunks():
            assert self._storage is not None
            with contextlib.suppress(CallError):  # it was not made
                self._storage.store.delete(self._value(at))

    def give_back(self, *, keep: ChunkedArray) -> None:
        """Let the memory go that the same values of another partition, at the same addresses, do not use."""
        if self.reserve is not None:
            last = keep.first + keep.memory.size
            self.reserve.give_back(self.first, self.first + self.memory.size, keep=(keep.first, last))

    def _offloaded_chunks(self) -> Iterator[int]:
        return (at for at in range(len(self.cuts) - 1) if self.is_chunk_offloaded(at))

    def is_chunk_offloaded(self, at: int) -> bool:
        """Say whether a chunk is not in memory. Nothing of one that has no elements is anywhere."""
        return at >= self.resident and self._numel(at) > 0

    def resident_chunk(self, at: int) -> Array:
        """Return a chunk that is in memory, where it lies."""
        return self.memory[self.cuts[at] : self.cuts[at + 1]]

    def is_resident_chunk(self, at: int, array: Array) -> bool:
        """Say whether ``array`` is a chunk where it lies, and not a copy of it on its way."""
        return not self.is_chunk_offloaded(at) and address_of_any(array) == address_of_any(self.resident_chunk(at))

    def chunk_transfer(self, at: int, *, read: bool = True, write: bool = True) -> StoreTransfer:
        """Return a chunk that is not in memory, for a pipeline."""
        from zerort.streaming import StoreTransfer

        assert self._storage is not None
        return StoreTransfer(
            store=self._storage.store,
            name=self._value(at),
            numel=self._numel(at),
            dtype=self.dtype,
            read=read,
            write=write,
        )

    # -- any range: gathers, gradients, checkpoints ------------------------------------------------------------------

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Fill ``out`` with the elements from ``first`` on."""
        tickets = []
        for at, here, there in self._overlaps(first, out.size):
            if at < 0:
                tickets.append(self._copy(self.memory[here], out[there]))
            else:
                assert self._storage is not None
                tickets.append(self._storage.read(self._value(at), out[there], offset=here.start * self.dtype.itemsize))
        return joined(tickets, result=out)

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Put ``source`` at the elements from ``first`` on; nobody changes it until the Ticket is done."""
        tickets = []
        for at, here, there in self._overlaps(first, source.size):
            if at < 0:
                tickets.append(self._copy(source[there], self.memory[here]))
            else:
                assert self._storage is not None
                offset = here.start * self.dtype.itemsize
                tickets.append(self._storage.write(self._value(at), source[there], offset=offset))
        return joined(tickets, result=source)

    def read_parts(self, parts: Sequence[tuple[int, int]], out: Array) -> Ticket[Array]:
        """Fill ``out`` with several ranges of elements, one behind the other.

        Args:
            parts: Where each begins and ends: ascending, apart.
            out: 1-D, of the host.
        """
        return self._move_parts(parts, out, write=False)

    def write_parts(self, parts: Sequence[tuple[int, int]], source: Array) -> Ticket[Array]:
        """Put ``source`` into several ranges of elements, and leave it alone until then; see `read_parts`."""
        return self._move_parts(parts, source, write=True)

    def _move_parts(self, parts: Sequence[tuple[int, int]], array: Array, *, write: bool) -> Ticket[Array]:
        width, tickets, done = self.dtype.itemsize, [], 0
        stored: dict[int, list[tuple[int, int]]] = {}  # by chunk: what follows in `array`, one behind the other
        for first, last in parts:
            for at, here, there in self._overlaps(first, last - first):
                if at < 0:
                    place = array[done + there.start : done + there.stop]
                    tickets.append(
                        self._copy(place, self.memory[here]) if write else self._copy(self.memory[here], place)
                    )
                else:
                    stored.setdefault(at, []).append((here.start * width, (here.stop - here.start) * width))
            done += last - first
        end = done
        for at in reversed(stored):  # from the last on: what is in memory comes before all of them
            begin = end - sum(count for _, count in stored[at]) // width
            assert self._storage is not None
            move = self._storage.write_parts if write else self._storage.read_parts
            tickets.append(move(self._value(at), array[begin:end], stored[at]))
            end = begin
        return joined(tickets, result=array)

    def put(self, first: int, source: Array) -> None:
        """Write an array of the host to the elements from ``first`` on, here and now.

        Raises:
            StorageError: The file system refused.
        """
        if self.in_reach:
            self.device.put(source, out=self.memory[first : first + source.size])
        else:
            self.write(first, source).wait()  # not-gpu: between the host and a disk, or arrays of the host

    def _copy(self, source: Array, out: Array) -> Ticket[Array]:
        if isinstance(source, np.ndarray) and isinstance(out, np.ndarray):
            np.copyto(out, source)
            return Done(out)
        ticket: Ticket[Array] = self.device.copy(source, out=out)
        return ticket

    def resident_range(self, first: int, stop: int, *, cuts: Sequence[int] | None = None) -> ChunkedArray:
        """Return the elements from ``first`` to ``stop``, which are in memory, as an array of their own."""
        cuts = (0, stop - first) if cuts is None else cuts
        return ChunkedArray(self.name, cuts, self.memory[first:stop], device=self.device)

    def linkable_files(self, directory: str) -> list[LinkableFile]:
        """Return the files of chunks that can have a second name in a directory."""
        from zerort.checkpoint.value import LinkableFile

        if self._storage is None:
            return []
        return [
            LinkableFile(self.cuts[at], extent)
            for at in self._offloaded_chunks()
            for extent in self._storage.file_extents(self._value(at), directory)
        ]

    def read_chunk(self, at: int) -> Array:
        """Return a chunk: where it lies in memory, or a copy of what rests elsewhere."""
        if not self.is_chunk_offloaded(at):
            return self.resident_chunk(at)
        # not-gpu: between the host and a disk
        return self.read(self.cuts[at], np.empty(self._numel(at), self.dtype)).wait()

    def checksum(self, numel: int) -> tuple[int, int]:
        """Return the crc32c of the first ``numel`` elements, and their bytes."""
        total = 0
        for at, first in enumerate(self.cuts[:-1]):
            if first < numel:
                chunk = self.read_chunk(at)[: numel - first]
                total = crc32c(self.device.fetch(chunk).view(np.uint8), total)
        return total, numel * self.dtype.itemsize

    def _overlaps(self, first: int, numel: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (chunk, where in it, where in the range); chunk -1 is all that is in memory."""
        last = first + numel
        if first < self.memory.size:
            end = min(last, self.memory.size)
            yield -1, slice(first, end), slice(0, end - first)
        at = max(bisect_right(self.cuts, first) - 1, self.resident)
        while at < len(self.cuts) - 1 and self.cuts[at] < last:
            begin, end = max(first, self.cuts[at]), min(last, self.cuts[at + 1])
            if begin < end:
                yield at, slice(begin - self.cuts[at], end - self.cuts[at]), slice(begin - first, end - first)
            at += 1

    def _numel(self, at: int) -> int:
        return self.cuts[at + 1] - self.cuts[at]

    def _value(self, at: int) -> str:
        return f"{self.name}/{at}"


def cut_chunks(numel: int, *, most: int) -> tuple[int, ...]:
    """Return where chunks of about equal length begin, and the end of the last.

    Args:
        numel: Elements of all chunks together.
        most: Of one chunk, at most; rounded down to a multiple of 2048, at least that.

    >>> cut_chunks(10_000, most=5000), cut_chunks(100, most=5000), cut_chunks(0, most=5000)
    ((0, 2048, 6144, 10000), (0, 100), (0, 0))
    """
    if numel <= most:
        return 0, numel
    granules = -(-numel // LEAST_NUMEL)
    chunks = max(-(-granules // max(most // LEAST_NUMEL, 1)), 1)
    return (*(granules * at // chunks * LEAST_NUMEL for at in range(chunks)), numel)


def colocate(array: Array, place: Array, *, device: Device) -> Array:
    """Return an array in the same memory as ``place``, the host's or the device's: itself, or a copy."""
    if isinstance(array, np.ndarray) == isinstance(place, np.ndarray):
        return array
    if isinstance(place, np.ndarray):
        return device.fetch(array)
    copy: Array = device.scratch(array.size, array.dtype)
    device.put(array, out=copy)
    return copy
