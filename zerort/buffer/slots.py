"""`Slots`: a few pieces of memory that take turns, the same ones in the same order on every rank.

    gather slots      where the gathered form of a SHARDED buffer goes, while a unit computes
    bucket slots      where gradients are collected, while a reduction reads them

    lasting           made by all ranks at once when they are reserved, all as large as the largest needs: ranks of a
                      node write into each other's slots, or read each other's windows
    not lasting       made when they are leased, as large as the lease says, and gone after the step; or brought along
                      by whoever leases. For ranks that read each other's own memory in place

Slots are leased and released in the order of the program, which is the same everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zerort.device import HostDevice, Ticket
from zerort.errors import UnitStateError, ZerortError
from zerort.typing import Array, Device

__all__ = ["Slot", "Slots"]

_NOTHING: Array = np.empty(0, np.uint8)


class Slot:
    """One piece of memory on lease."""

    __slots__ = ("_owner", "busy", "idle_since", "memory", "nbytes")

    def __init__(self, owner: Slots, memory: Array) -> None:
        self._owner = owner
        self.memory = memory  # 1-D, uint8
        self.nbytes = 0  # what the lease asked for
        self.busy: Ticket[Any] | None = None
        """Work that still reads or writes the memory after its release."""
        self.idle_since = -1
        """The count of the ranks' meetings when it was last released, for owners who keep one."""

    def array(self, numel: int, dtype: np.dtype[Any]) -> Array:
        """Return the slot's first ``numel`` elements: 1-D."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def wait(self) -> None:
        """Let what comes next wait for work that was still using the memory when it was released."""
        if self.busy is not None:
            with contextlib.suppress(ZerortError):  # it is told to whoever waits for the result
                self._owner.device.order_after(self.busy)  # gpu-wait: no_order_of_streams_changes_a_walk
            self.busy = None

    def release(self, *, after: Ticket[Any] | None = None) -> None:
        """Give the slot back.

        Args:
            after: Work that must be done before anyone else may have it.
        """
        self.busy = after
        self._owner._take_back(self)


class Slots:
    """A number of slots, which grow to what the largest user of them reserves.

    Args:
        name: What they are for, in errors.
        allocate: Makes 1-D uint8 memory of a number of bytes; if it is lasting, every rank calls it at once.
        free: Gives such memory back.
        cure: What to do when there are too few, in errors.
        device: Whose memory it is; None: the host's.
        lasting: Whether slots have their memory all the time, or from a lease to the next `rest`.
    """

    def __init__(
        self,
        name: str,
        *,
        cure: str,
        allocate: Callable[[int], Array],
        free: Callable[[Array], None],
        device: Device | None = None,
        lasting: bool = True,
    ) -> None:
        self.name = name
        self.device = HostDevice() if device is None else device
        self.count = 0
        self.slot_nbytes = 0
        self.leased_nbytes = 0
        self.peak_nbytes = 0
        """Most bytes that were on lease at once, as they were asked for."""
        self._cure = cure
        self._allocate = allocate
        self._free_memory = free
        self.lasting = lasting
        self._free: list[Slot] = []
        self._leased = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the slots take when all of them are on lease."""
        return self.count * self.slot_nbytes

    def reserve(self, nbytes: int, *, count: int) -> None:
        """Have at least ``count`` slots of at least ``nbytes``. Every rank calls this alike, while none is on lease."""
        if nbytes <= self.slot_nbytes and count <= self.count:
            return
        if self._leased:
            raise UnitStateError(
                f"Expected no {self.name} in use while they grow, got {self._leased}. Register all units before the "
                "first is gathered, or between steps."
            )
        nbytes, count = max(nbytes, self.slot_nbytes), max(count, self.count)
        for slot in self._free:
            if slot.busy is not None:
                # not-gpu: a stream holds the arrays of its work
                slot.busy.wait()  # not only for what comes next: the memory goes
        self.close()
        self.slot_nbytes, self.count = nbytes, count
        self._free = [Slot(self, self._allocate(nbytes) if self.lasting else _NOTHING) for _ in range(count)]

    def lease(self, nbytes: int, *, memory: Array | None = None) -> Slot:
        """Return the slot that has been free the longest, once whatever still used it is done.

        Args:
            nbytes: How many are needed.
            memory: What to use instead of the slot's own, if that is not lasting: 1-D, uint8.
        """
        if not self._free:
            raise UnitStateError(
                f"Expected a free one of {self.count} {self.name}, got all of them in use. {self._cure}"
            )
        slot = self._free.pop(0)
        self._leased += 1
        slot.nbytes = nbytes
        self.leased_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.leased_nbytes)
        slot.wait()  # gpu-wait: no_order_of_streams_changes_a_walk
        if not self.lasting:
            slot.memory = _NOTHING
            self.rest()  # first: what comes may then lie where that was
            slot.memory = self._allocate(nbytes) if memory is None else memory
        return slot

    def rest(self) -> None:
        """Let go of memory that does not last and that nobody uses, and of work that is done. Never waits."""
        for slot in self._free:
            if slot.busy is None or slot.busy.done():
                slot.busy = None
                if not self.lasting:
                    slot.memory = _NOTHING

    @property
    def available(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def close(self) -> None:
        """Give all free slots' memory back."""
        for slot in self._free:
            self._free_memory(slot.memory)
        self._free.clear()
        self.slot_nbytes = self.count = 0

    def _take_back(self, slot: Slot) -> None:
        self._leased -= 1
        self.leased_nbytes -= slot.nbytes
        self._free.append(slot)
