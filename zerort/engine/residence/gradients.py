"""The summed gradient of a section between its reduction and the update: in memory, or put away elsewhere.

    SummedGradient     what the step reads: a column, the sums of its squares, the first element that is not finite
    measure            the sums of the squares of all of them, with one wait for a GPU
    OffloadedGradient    room for a reduction; when that is done: sum up squares, write, and the room is free again

What is put away is summed up on the way, so that the norm is known without reading it back (decision 0029).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.errors import StorageError
from zerort.optim import square_sums, square_sums_of
from zerort.optim.kernels import kernels_for
from zerort.typing import Array, Device, Stream

__all__ = ["OffloadedGradient", "SummedGradient", "SummedInMemory", "measure"]


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


class OffloadedGradient:
    """A summed gradient that rests on a disk, or on the host of a GPU, until the update.

    Args:
        column: Where it rests.
        block: Elements over which squares are summed; None: all.
        slots: Memory that reductions go to.
        stream: Does what follows a reduction.
    """

    def __init__(self, column: ChunkedArray, *, block: int | None, slots: Slots, stream: Stream) -> None:
        self.column = column
        self.error: StorageError | None = None
        """What the disk had against the last one, on this rank alone: the step tells the others."""
        self._block = block
        self._slots = slots
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        """Forget the last one, and what the disk had against it."""
        self.error = None
        self.sums: Array = np.zeros(0)
        self._first = -1

    @property
    def room_nbytes(self) -> int:
        """Bytes of the memory that a reduction takes."""
        return self.column.size * self.column.dtype.itemsize

    def put(self, reduce_into: Callable[[Array], Ticket[Array]]) -> Ticket[Array]:
        """Start a reduction into a slot and put its result away; done when that is written, well or not.

        Args:
            reduce_into: Starts a reduction into the array that it is given.
        """
        slot = self._slots.lease(self.room_nbytes)
        reduction = reduce_into(slot.array(self.column.size, self.column.dtype))

        def put_away() -> Array:
            gradient = reduction.wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            self.sums, self._first = self.column.device.fetch(square_sums(gradient, self._block)), -1
            if not np.isfinite(self.sums).all():
                self._first = kernels_for(gradient).first_nonfinite(gradient)
            try:
                self.column.write(0, gradient).wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            except StorageError as error:
                self.error = error
            return np.empty(0, gradient.dtype)  # no view: it would keep the memory, which others need, until the step

        ticket: Ticket[Array] = self._stream.submit(put_away, name=f"put away {self.column.name}")
        slot.release(after=ticket)  # gpu-wait: no_order_of_streams_changes_a_walk [after=ticket -> ]
        return ticket

    def first_nonfinite(self) -> int:
        """Return the first element that is NaN or infinite, or -1."""
        return self._first


def measure(gradients: Sequence[SummedGradient], *, block: int | None, device: Device) -> list[Array]:
    """Return the sums of the squares of each: float64, on the host.

    Args:
        gradients: Some may have been summed up on their way to where they rest.
        block: Elements over which squares are summed; None: all.
        device: Of those that are in memory.
    """
    in_memory = [one.column.memory for one in gradients if one.sums is None]
    found = iter(square_sums_of(in_memory, block, device=device))
    return [next(found) if one.sums is None else one.sums for one in gradients]
