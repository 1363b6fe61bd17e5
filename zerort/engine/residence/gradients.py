"""The summed gradient of a section between its reduction and the update: in memory, or put away elsewhere.

    SummedGradient     what the step reads: a column, the sums of its squares, the first element that is not finite
    measure            the sums of the squares of all of them, with one wait for a GPU
    OffloadedGradient  room for a reduction; when that is done: add what is there, write, and the room is free again
    Copies             those of the model, over which it is summed after the last reduction

The squares of what is put away are summed on the way, so that the norm is known without reading it back (decision
0029).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from zerort.buffer import ReduceInto
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.engine.residence.chunked_array import LEAST_NUMEL, ChunkedArray
from zerort.errors import StorageError
from zerort.optim import square_sums_of
from zerort.optim.kernels import bucket_kernels_for, kernels_for
from zerort.storage.files.blocks import PAGE_NBYTES
from zerort.storage.files.segments import round_up
from zerort.typing import Array, Device, Stream

__all__ = ["Copies", "OffloadedGradient", "SummedGradient", "SummedInMemory", "measure", "room_nbytes"]


class SummedGradient(Protocol):
    """What the step reads of a section's summed gradient."""

    @property
    def column(self) -> ChunkedArray:
        """This rank's range, or all of it if every rank updates all."""

    @property
    def sums(self) -> Array | None:
        """The sums of its squares, block by block, if they are known already; float64."""

    def first_nonfinite(self) -> int:
        """Return the first element that is NaN or infinite, or -1."""


@dataclass(frozen=True, slots=True)
class SummedInMemory:
    """A summed gradient in memory."""

    column: ChunkedArray

    @property
    def sums(self) -> None:
        """Nobody has summed up its squares."""
        return None

    def first_nonfinite(self) -> int:
        """Return the first element that is NaN or infinite, or -1."""
        found: int = kernels_for(self.column.memory).first_nonfinite(self.column.memory)
        return found


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the model, each of which has a sum of the same range."""

    group: Group
    """The ranks that hold this range, one of each copy."""
    moved: Counter[str]
    """Where moved bytes are counted, by collective."""
    numel: int
    """Elements of this rank's range that belong to tensors."""


class OffloadedGradient:
    """A summed gradient that rests on a disk, or on the host of a GPU, until the update.

    Args:
        column: Where it rests.
        block: Elements over which squares are summed; None: all.
        slots: Memory that reductions go to.
        stream: Does what follows a reduction.
        most_read: Elements that are read back at once, to be added to, in the room of a reduction; 0: in a slot of
            their own, for a step has one reduction, but for those of tied units.
        copies: Over which the sum is summed once more; None: there is one copy of the model.
    """

    array = None
    nbytes = 0
    sums_copies = True

    def __init__(
        self,
        column: ChunkedArray,
        *,
        block: int | None,
        slots: Slots,
        stream: Stream,
        most_read: int = 0,
        copies: Copies | None = None,
    ) -> None:
        self.column = column
        self._copies = copies
        self._most_read = most_read
        self.error: StorageError | None = None
        """What the disk had against the last one, on this rank alone: the step tells the others."""
        self._block = block
        self._slots = slots
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        """Forget the last one, and what the disk had against it."""
        self.error = None
        self._sums: dict[int, Array] = {}  # of squares, by chunk
        self._whole_sum: Array | None = None  # of all squares, in the order in which they are summed in memory
        self._nonfinite: dict[int, int] = {}  # the first element that is not finite, by chunk
        self._summed: set[int] = set()  # chunks that hold a sum, or will when what is queued is done
        self._is_total = False  # what came after the last reduction was done

    @property
    def sums(self) -> Array:
        """The sums of its squares, block by block; float64."""
        if self._whole_sum is not None:
            return self._whole_sum
        found = [self._sums[at] for at in sorted(self._sums)]
        return np.array([sum(one[0] for one in found)]) if self._block is None else np.concatenate(found)

    @property
    def room_nbytes(self) -> int:
        """Bytes of the memory that a reduction takes."""
        return self.room_for(self.column.size)

    def room_for(self, numel: int) -> int:
        """Return the same for another rank, which holds ``numel`` elements."""
        return room_nbytes(numel, self.column.dtype.itemsize, most_read=self._most_read)

    def put(self, reduce_into: ReduceInto, *, within: slice | None = None) -> Ticket[Array]:
        """Start a reduction into a slot and put its sum with those before away; done when it is written, well or not.

        Args:
            reduce_into: Starts a reduction into the array that it is given.
            within: Which elements it is of; None: all. The chunks that they lie in are read and written whole.
        """
        chunks = self._chunks_of(within)
        begin, end = self.column.cuts[chunks.start], self.column.cuts[chunks.stop]
        slot = self._slots.lease(self.room_for(end - begin))
        gradient = slot.array(end - begin, self.column.dtype)
        if within is None:
            reduction = reduce_into(gradient)
        else:
            gradient.view(np.uint8).fill(0)
            reduction = reduce_into(gradient[within.start - begin : within.stop - begin])
        added = sorted(self._summed.intersection(chunks))
        self._summed.update(chunks)
        beside = None
        if added and not self._most_read:
            most = max(self.column.cuts[at + 1] - self.column.cuts[at] for at in added)
            beside = self._slots.lease(most * self.column.dtype.itemsize)

        def put_away() -> Array:
            reduction.wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            try:
                if self.error is None:
                    room = slot.memory[round_up(gradient.nbytes, PAGE_NBYTES) :] if beside is None else beside.memory
                    self._add_sums(gradient, added, begin=begin, room=room)
                self._measure(gradient, chunks)
                self.column.write(begin, gradient).wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            except StorageError as error:
                self.error = error
            return np.empty(0, gradient.dtype)  # no view: it would keep the memory, which others need, until the step

        ticket: Ticket[Array] = self._stream.submit(put_away, name=f"put away {self.column.name}")
        slot.release(after=ticket)  # gpu-wait: no_order_of_streams_changes_a_walk [after=ticket -> ]
        if beside is not None:
            # not-gpu: slots are leased in turn: whoever gets this one has had the other, and waited for it
            beside.release(after=ticket)
        return ticket

    def total(self, summed: Array, *, name: str) -> Array:
        """Sum over copies of the model; return what that leaves in memory: nothing; see `GradientSink.total`."""
        if not self._is_total:
            self._is_total = True
            if self._copies is not None:
                self._sum_over_copies(self._copies, name)
        return summed

    def _sum_over_copies(self, copies: Copies, name: str) -> None:
        """Sum what was put away over copies of the model, chunk by chunk: read ahead, written behind (decision 0160).

        A disk that fails keeps nobody waiting: the rank takes part in all sums, and has an error afterwards.
        """
        slot = self._slots.lease(self.room_nbytes)
        whole = slot.array(self.column.size, self.column.dtype)
        chunks = [(first, whole[first:last]) for first, last in pairwise(self.column.cuts)]
        reads = [self._start(self.column.read, first, chunk) for first, chunk in chunks]
        writes = []
        for (first, chunk), read in zip(chunks, reads, strict=True):
            self._finish(read)
            reduction = copies.group.all_reduce(chunk, out=chunk, name=name, eager=False)
            self.column.device.order_after(reduction)  # gpu-wait: offloaded_gradients_are_summed_over_copies
            writes.append(self._start(self.column.write, first, chunk))
        copies.moved["all_reduce"] += copies.numel * whole.itemsize
        self._measure(whole, range(len(chunks)))
        for write in writes:
            self._finish(write)
        slot.release()

    def _start(self, move: Callable[[int, Array], Ticket[Array]], first: int, chunk: Array) -> Ticket[Array] | None:
        """Start to read or write a chunk; return None if the disk refuses at once."""
        try:
            return move(first, chunk)
        except StorageError as error:
            self.error = self.error or error
            return None

    def _finish(self, ticket: Ticket[Array] | None) -> None:
        """Wait for what was started, and remember what the disk had against it."""
        try:
            if ticket is not None:
                ticket.wait()  # gpu-wait: offloaded_gradients_are_summed_over_copies
        except StorageError as error:
            self.error = self.error or error

    def _chunks_of(self, within: slice | None) -> range:
        """Return the chunks that some elements lie in; None: all."""
        cuts = self.column.cuts
        if within is None:
            return range(len(cuts) - 1)
        if within.start == within.stop:
            return range(0)
        return range(bisect_right(cuts, within.start) - 1, bisect_left(cuts, within.stop))

    def _add_sums(self, gradient: Array, chunks: Sequence[int], *, begin: int, room: Array) -> None:
        """Add the sums so far of some chunks to ``gradient``, which lies at ``begin``, one by one through ``room``."""
        kernels = bucket_kernels_for(self.column.device)
        for at in chunks:
            first, last = self.column.cuts[at], self.column.cuts[at + 1]
            chunk = room[: (last - first) * gradient.itemsize].view(gradient.dtype)
            self.column.read(first, chunk).wait()  # gpu-wait: micro_steps_are_added_to_what_was_put_away
            kernels.add_into(gradient[first - begin : last - begin], chunk)

    def _measure(self, gradient: Array, chunks: range) -> None:
        """Sum up the squares of some chunks, which ``gradient`` holds side by side."""
        cuts = self.column.cuts
        pieces = [gradient[cuts[at] - cuts[chunks.start] : cuts[at + 1] - cuts[chunks.start]] for at in chunks]
        # Without blocks the order of a sum is that of its array: the norm has to be the one of gradients in memory.
        whole = [gradient] if self._block is None and len(chunks) == len(cuts) - 1 else []
        sums = square_sums_of([*pieces, *whole], self._block, device=self.column.device)
        self._whole_sum = sums.pop() if whole else None
        for at, piece, found in zip(chunks, pieces, sums, strict=True):
            self._sums[at] = found
            self._nonfinite.pop(at, None)
            if not np.isfinite(found).all():
                first = kernels_for(piece).first_nonfinite(piece)
                if first >= 0:  # else only the squares are too large
                    self._nonfinite[at] = cuts[at] + first

    def first_nonfinite(self) -> int:
        """Return the first element that is NaN or infinite, or -1."""
        return min(self._nonfinite.values(), default=-1)


def room_nbytes(numel: int, itemsize: int, *, most_read: int) -> int:
    """Return the bytes that a reduction takes until it is put away, with room to read back what it is added to.

    Args:
        numel: Elements of a rank's range.
        itemsize: Bytes of one.
        most_read: Elements of a chunk, at most; 0: nothing is read back.
    """
    if not most_read:
        return numel * itemsize
    return round_up(numel * itemsize, PAGE_NBYTES) + min(numel, max(most_read, LEAST_NUMEL)) * itemsize


def measure(gradients: Sequence[SummedGradient], *, block: int | None, device: Device) -> list[Array]:
    """Return the sums of the squares of each: float64, on the host.

    Args:
        gradients: Some may have been summed up on their way to where they rest.
        block: Elements over which squares are summed; None: all.
        device: Of those that are in memory.
    """
    known = [one.sums for one in gradients]
    in_memory = [one.column.memory for one, sums in zip(gradients, known, strict=True) if sums is None]
    found = iter(square_sums_of(in_memory, block, device=device))
    return [next(found) if sums is None else sums for sums in known]
