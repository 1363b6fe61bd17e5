"""`Slots`: a few pieces of memory that are used again and again, the one that has been free the longest first.

    gathered units, gradient buckets     `lease`: ordered on the device; too few of them is an error with a cure
    chunks of a pipeline or a staging,   `take`: the caller waits for `Slot.busy`, on the host or on a stream of its own
    blocks of a bridged store

    persistent           memory is made when slots are reserved, all as large as the largest needs. Where it is shared,
                         all ranks reserve at once: ranks of a node write into each other's slots, or read them
    not persistent       memory is made at the lease, as large as the lease says, and dropped by `trim` after the step;
                         or the caller brings it. For ranks that read each other's own memory in place

Slots belong to one thread. Those of all ranks are leased and released in the order of the program, the same everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zerort.device.host.device import HostDevice
from zerort.device.ticket import Ticket
from zerort.errors import CallError, UnitStateError, ZerortError
from zerort.typing import Array, Device

__all__ = ["Slot", "Slots", "cut_from"]

_NOTHING: Array = np.empty(0, np.uint8)


class Slot:
    """One piece of memory, on lease or free."""

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
        """Let what comes next on the device wait for work that was still using the memory when it was released."""
        if self.busy is not None:
            with contextlib.suppress(ZerortError):  # it is told to whoever waits for the result
                self._owner.device.order_after(self.busy)  # gpu-wait: no_order_of_streams_changes_a_walk
            self.busy = None

    @contextlib.contextmanager
    def returned_on_error(self) -> Iterator[Slot]:
        """Give the slot back if the block fails, after what is `busy` in it by then; else the block does."""
        try:
            yield self
        except BaseException:
            self.release(after=self.busy)  # not-gpu: only where a call has failed
            raise

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
        allocate: Makes 1-D uint8 memory of a number of bytes.
        free: Gives such memory back; None: it ends with its last array.
        cure: What to do when there are too few, in errors.
        device: Whose memory `lease` orders; None: the host's.
        persistent: Whether slots have their memory all the time, or from a lease to the next `trim`.
    """

    def __init__(
        self,
        name: str,
        *,
        allocate: Callable[[int], Array],
        free: Callable[[Array], None] | None = None,
        cure: str = "Release slots sooner.",
        device: Device | None = None,
        persistent: bool = True,
    ) -> None:
        self.name = name
        self.device = HostDevice() if device is None else device
        self.slot_nbytes = 0
        self.leased_nbytes = 0
        self.peak_nbytes = 0
        """Most bytes that were on lease at once, as they were asked for."""
        self._cure = cure
        self._allocate = allocate
        self._free_memory = free
        self.persistent = persistent
        self._all: list[Slot] = []
        self._free: list[Slot] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    @property
    def nbytes(self) -> int:
        """Bytes that the slots take when all of them are on lease."""
        return self.count * self.slot_nbytes

    @property
    def available(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all)

    def reserve(self, nbytes: int, *, count: int) -> None:
        """Have at least ``count`` slots of at least ``nbytes``. Every rank calls this alike.

        Raises:
            UnitStateError: They have to become larger, and some are on lease.
        """
        if nbytes <= self.slot_nbytes and count <= self.count:
            return
        nbytes, count = max(nbytes, self.slot_nbytes), max(count, self.count)
        if nbytes > self.slot_nbytes:
            if leased := self.count - self.available:
                raise UnitStateError(
                    f"Expected no {self.name} in use while they grow, got {leased}. Register all units before the "
                    "first is gathered, or between steps."
                )
            for slot in self._free:
                if slot.busy is not None:
                    # not-gpu: a stream holds the arrays of its work
                    slot.busy.wait()  # not only for what comes next: the memory goes
            self.close()
        self.slot_nbytes = nbytes
        new = [Slot(self, self._allocate(nbytes) if self.persistent else _NOTHING) for _ in range(self.count, count)]
        self._all += new
        self._free = new + self._free  # first: nothing is under way in them

    def lease(self, nbytes: int, *, memory: Array | None = None) -> Slot:
        """Return the slot that has been free the longest, once whatever still used it is done.

        Args:
            nbytes: How many are needed.
            memory: What to use instead of the slot's own, if that is not persistent: 1-D, uint8.
        """
        with self.take(nbytes).returned_on_error() as slot:
            slot.wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            if not self.persistent:
                slot.memory = _NOTHING
                self.trim()  # first: what comes may then lie where that was
                slot.memory = self._allocate(nbytes) if memory is None else memory
        return slot

    def take(self, nbytes: int = 0) -> Slot:
        """Return the slot that has been free the longest; its memory may be used once `Slot.busy` is done."""
        if not self._free:
            raise UnitStateError(
                f"Expected a free one of {self.count} {self.name}, got all of them in use. {self._cure}"
            )
        slot = self._free.pop(0)
        slot.nbytes = nbytes
        self.leased_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.leased_nbytes)
        return slot

    def reorder(self) -> None:
        """Have free slots leased in the order in which they were made: ranks may have released them in other orders."""
        self._free.sort(key=self._all.index)

    def reclaim(self) -> None:
        """Take all slots back, also those on lease: a run has ended early, and nobody uses them any more."""
        self._free = list(self._all)
        self.leased_nbytes = 0

    def trim(self) -> None:
        """Let go of memory that is not persistent and that nobody uses, and of work that is done. Never waits."""
        for slot in self._free:
            if slot.busy is None or slot.busy.done():
                slot.busy = None
                if not self.persistent:
                    slot.memory = _NOTHING

    def close(self) -> None:
        """Give all free slots' memory back; nobody can lease any more until slots are reserved again."""
        if self._free_memory is not None:
            for slot in self._free:
                self._free_memory(slot.memory)
        self._all.clear()
        self._free.clear()
        self.slot_nbytes = 0

    def _take_back(self, slot: Slot) -> None:
        self.leased_nbytes -= slot.nbytes
        if slot in self._all:  # else they were closed meanwhile
            self._free.append(slot)


def cut_from(memory: Array) -> Callable[[int], Array]:
    """Return what makes the memory of slots from one array: each call returns the bytes behind those of the last.

    >>> allocate = cut_from(np.arange(10, dtype=np.uint8))
    >>> allocate(4), allocate(3)
    (array([0, 1, 2, 3], dtype=uint8), array([4, 5, 6], dtype=uint8))
    """
    begin = 0

    def allocate(nbytes: int) -> Array:
        nonlocal begin
        if begin + nbytes > memory.size:
            raise CallError(
                f"Expected {nbytes} of the {memory.size - begin} bytes that are left for slots, got too few."
            )
        begin += nbytes
        return memory[begin - nbytes : begin]

    return allocate
