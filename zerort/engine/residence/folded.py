"""`OffloadedFold`: a gradient that is summed in a fixed tree while it rests on a disk, or on the host of a GPU.

    slices of a micro-step, in a slot      summed with each other, and with nodes that are read back chunk by chunk
    nodes that are left                    written, each to an array of its own (at most ⌊log₂ leaves⌋ + 1)
    after the last micro-step              one node, in the array that the update reads; copies of the model
                                           exchange theirs first, chunk by chunk

`FoldedShard` does the same in memory (decision 0111).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from zerort.buffer import Folding, Leaves, ReduceInto, insert, sum_over_copies
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.engine.residence.chunked_array import LEAST_NUMEL, ChunkedArray
from zerort.engine.residence.gradients import Copies, OffloadedGradient
from zerort.errors import StorageError
from zerort.optim.kernels import bucket_kernels_for
from zerort.storage.files.blocks import PAGE_NBYTES
from zerort.storage.files.segments import round_up
from zerort.typing import Array, Stream

__all__ = ["OffloadedFold", "TiedTrees", "folding_room_nbytes"]

TiedTrees = Sequence[tuple[slice, Callable[[], ReduceInto]]]
"""Ranges of a shard, and what completes another unit's tree of each, then reads its root: in order of registration."""


class OffloadedFold(OffloadedGradient):
    """A gradient that is summed in a fixed tree and rests elsewhere than in memory until the update.

    Args:
        columns: Where nodes of the tree rest, as many as there may be at once; the sum ends in the first.
        leaves: All leaves, dealt in turn.
        block: Elements over which squares are summed; None: all.
        slots: Memory that slices arrive in.
        stream: Does what follows a reduction.
        most_read: Elements that are read back at once, to be added to.
        tied: Other units' gradients of its tensors, each with a tree of its own beside: added to the sum.
        copies: Of the model: each folds its own leaves; None: there is one.
    """

    def __init__(
        self,
        columns: Sequence[ChunkedArray],
        leaves: Leaves,
        *,
        block: int | None,
        slots: Slots,
        stream: Stream,
        most_read: int,
        tied: TiedTrees = (),
        copies: Copies | None = None,
    ) -> None:
        self._columns = tuple(columns)
        self._tied = tied
        self._leaves = leaves
        super().__init__(columns[0], block=block, slots=slots, stream=stream, most_read=most_read, copies=copies)

    def reset(self) -> None:
        """Forget the last one, and what the disk had against it."""
        super().reset()
        self._folding = Folding(self._leaves, 0 if self._copies is None else self._copies.group.rank)
        self._nodes: dict[tuple[int, int], ChunkedArray | Array] = {}

    def room_for(self, numel: int) -> int:
        """Return the bytes of the memory that a reduction takes on a rank that holds ``numel`` elements."""
        itemsize = self.column.dtype.itemsize
        leaves = self._leaves
        return folding_room_nbytes(
            numel, itemsize, ranks=leaves.ranks, most_read=self._most_read, exchanged=leaves.exchanged
        )

    def put(self, reduce_into: ReduceInto, *, within: slice | None = None) -> Ticket[Array]:
        """Start to bring the slices of a micro-step here, fold them and put the nodes away; done when that is."""
        assert within is None  # other units' gradients have sinks of their own
        leaves, size = self._folding.next_micro_step(), self.column.size
        is_last = self._folding.micro_steps == self._leaves.most and self._copies is None  # else they have more
        slot = self._slots.lease(self.room_nbytes)
        arrival = reduce_into(slot.array(len(leaves) * size, self.column.dtype))

        def put_away() -> Array:
            slices = arrival.wait()  # gpu-wait: the_fixed_tree
            try:
                if self.error is None:
                    room = slot.memory[round_up(slices.nbytes, PAGE_NBYTES) :]
                    self._fold(leaves, slices.reshape(len(leaves), size), room, is_last=is_last)
            except StorageError as error:
                self.error = error
            return np.empty(0, slices.dtype)  # no view: it would keep the memory, which others need, until the step

        ticket: Ticket[Array] = self._stream.submit(put_away, name=f"fold {self.column.name}")
        slot.release(after=ticket)  # gpu-wait: the_fixed_tree [after=ticket -> ]
        return ticket

    def total(self, summed: Array, *, name: str) -> Array:
        """Complete the sum where it rests: copies of the model, other units' gradients; see `GradientSink.total`."""
        if not self._is_total:
            super().total(summed, name=name)
            self._summed.update(range(len(self.column.cuts) - 1))
            for within, complete in self._tied:
                super().put(complete(), within=within).wait()  # gpu-wait: trees_of_tied_units_are_added
        return summed

    def read_into(self, out: Array | None = None) -> Ticket[Array]:
        """Start to read the sum, once it is complete."""
        assert out is not None
        return self.column.read(0, out)

    def _sum_over_copies(self, copies: Copies, name: str) -> None:
        """Exchange this copy's nodes for those of others and sum them in the tree, chunk by chunk.

        A disk that fails keeps nobody waiting: the rank takes part in all exchanges, and has an error afterwards.
        """
        kernels, leaves = bucket_kernels_for(self.column.device), self._leaves
        slot = self._slots.lease(self.room_nbytes)
        for at, (first, last) in enumerate(pairwise(self.column.cuts)):
            spare = _side_by_side(slot.memory, leaves.exchanged, last - first, self.column.dtype)

            def pair(left: Array, right: Array, spare: list[Array] = spare) -> Array:
                kernels.add_into(left, right)
                spare.append(right)
                return left

            nodes = {node: spare.pop() for node in leaves.nodes_of_copy(copies.group.rank)}
            for node, chunk in nodes.items():
                column = self._nodes.get(node)  # None: it could not be put away
                if isinstance(column, ChunkedArray):
                    self._finish(self._start(column.read, first, chunk))
            root = sum_over_copies(copies.group, nodes, leaves=leaves, room=spare.pop, pair=pair, name=name)
            self._measure(root, range(at, at + 1))
            self._finish(self._start(self.column.write, first, root))
        slot.release()

    def _fold(self, leaves: range, slices: Array, room: Array, *, is_last: bool) -> None:
        kernels = bucket_kernels_for(self.column.device)

        def pair(left: ChunkedArray | Array, right: ChunkedArray | Array) -> ChunkedArray | Array:
            assert not isinstance(right, ChunkedArray)  # leaves come in order: the later one is in the slot
            if isinstance(left, ChunkedArray):
                for first, last in pairwise(left.cuts):
                    chunk = room[: (last - first) * right.itemsize].view(right.dtype)
                    left.read(first, chunk).wait()  # gpu-wait: the_fixed_tree
                    kernels.add_into(right[first:last], chunk)
                return right
            kernels.add_into(left, right)
            return left

        for leaf, piece in zip(leaves, slices, strict=True):
            insert(self._nodes, (0, leaf), piece, total=self._leaves.total, pair=pair)
        taken = {id(one) for one in self._nodes.values() if isinstance(one, ChunkedArray)}
        free = iter([column for column in self._columns if id(column) not in taken])
        for node, part in self._nodes.items():
            if not isinstance(part, ChunkedArray):
                if is_last:
                    self._measure(part, range(len(self.column.cuts) - 1))
                column = next(free)
                column.write(0, part).wait()  # gpu-wait: the_fixed_tree
                self._nodes[node] = column


def _side_by_side(memory: Array, count: int, numel: int, dtype: np.dtype[Any]) -> list[Array]:
    """Return arrays of so many elements each, from the begin of pages on."""
    step = round_up(numel * dtype.itemsize, PAGE_NBYTES)
    return [memory[at * step : at * step + numel * dtype.itemsize].view(dtype) for at in range(count)]


def folding_room_nbytes(numel: int, itemsize: int, *, ranks: int, most_read: int, exchanged: int) -> int:
    """Return the bytes that the slices of a micro-step take until they are put away, with room to read nodes back.

    Args:
        numel: Elements of a rank's range.
        itemsize: Bytes of one.
        ranks: Slices of a micro-step, at most.
        most_read: Elements of a chunk, at most.
        exchanged: Chunks of nodes in hand at once, while copies of the model exchange theirs; 0: there is one.
    """
    chunk = min(numel, max(most_read, LEAST_NUMEL)) * itemsize
    return max(round_up(ranks * numel * itemsize, PAGE_NBYTES) + chunk, exchanged * round_up(chunk, PAGE_NBYTES))
