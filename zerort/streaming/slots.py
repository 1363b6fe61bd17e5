"""`Slots` of a pipeline: memory that takes turns; a `Slot` holds one chunk from its read until it is written."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from zerort.device import HostDevice, Lease, SlabPool, Ticket, joined
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files.segments import round_up
from zerort.streaming.parts import Part
from zerort.typing import Array, Memory

__all__ = ["Fed", "Slot", "Slots", "nbytes_of"]

_ALIGNMENT = 4096
"""Parts begin at pages, so that disks move them without a copy."""


def nbytes_of(chunk: Sequence[Part]) -> int:
    """Return the memory that a chunk takes: its parts, each from a page on."""
    return sum(round_up(part.nbytes, _ALIGNMENT) for part in chunk)


class Slot:
    """Memory for one chunk, and what is being written out of it."""

    __slots__ = ("failure", "lease", "writes")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.writes: list[Ticket[Any]] = []
        self.failure: BaseException | None = None
        """What a write raised."""

    def settle(self) -> None:
        """Wait for all that is being written, and raise the first error."""
        try:
            joined(self.writes, result=None).wait()  # gpu-wait: state_on_a_disk_streams
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.forget()

    def look(self) -> None:
        """Note what a write raised that has ended by now."""
        for ticket in self.writes:
            if ticket.done():
                try:
                    ticket.wait()  # not-gpu: it is done
                except Exception as error:
                    self.failure = error

    def forget(self) -> None:
        """Let go of writes that have ended; who was interrupted has to wait again for the others."""
        self.writes = [ticket for ticket in self.writes if not ticket.done()]

    def is_free(self) -> bool:
        """Say whether nothing is being written."""
        return all(ticket.done() for ticket in self.writes)


class Fed:
    """A chunk on its way: its slot, its arrays, and the reads that fill them."""

    __slots__ = ("arrays", "reads", "slot")

    def __init__(self, slot: Slot, chunk: Sequence[Part]) -> None:
        self.slot = slot
        self.arrays: list[Array] = []
        self.reads: list[Ticket[Any]] = []
        at = 0
        for part in chunk:
            self.arrays.append(slot.lease.array[at : at + part.nbytes].view(numpy_dtype(part.dtype)))
            at += round_up(part.nbytes, _ALIGNMENT)


class Slots:
    """The slots of a pipeline, made as they are first needed.

    Args:
        device: Whose memory; None takes the host's.
        slot_nbytes: Of one slot.
        most: How many there may be.
    """

    def __init__(self, device: Memory | None, *, slot_nbytes: int, most: int) -> None:
        self._own = HostDevice("slots") if device is None else None
        memory: Memory = self._own if self._own is not None else device  # type: ignore[assignment]
        self._pool = SlabPool(memory, slab_nbytes=max(slot_nbytes, 1), count=most, alignment=_ALIGNMENT)
        self._all: list[Slot] = []
        self._free: collections.deque[Slot] = collections.deque()
        self.slot_nbytes = slot_nbytes

    @property
    def nbytes(self) -> int:
        """The memory of the slots that exist."""
        return self._pool.counters().nbytes

    def take(self, *, most: int) -> Slot:
        """Return a slot that nobody computes in; one that is still being written only if there are ``most`` already."""
        if len(self._all) < most and not (self._free and self._free[0].is_free()):
            self._all.append(Slot(self._pool.lease()))
            return self._all[-1]
        return self._free.popleft()  # the one that has been written for longest

    def give_back(self, slot: Slot) -> None:
        """Let the next chunk have a slot, after what is being written out of it."""
        self._free.append(slot)

    def give_all_back(self) -> None:
        """Let go of all slots: nobody computes in them any more."""
        self._free = collections.deque(self._all)

    def failure(self) -> BaseException | None:
        """Return what a write out of any slot has raised, if it is known by now."""
        for slot in self._all:
            slot.look()
            if slot.failure is not None:
                return slot.failure
        return None

    def settle(self) -> None:
        """Wait for all that is being written out of any slot, and raise the first error."""
        try:
            # gpu-wait: what_a_run_has_written
            joined([ticket for slot in self._all for ticket in slot.writes], result=None).wait()
        finally:
            for slot in self._all:
                slot.look()
                slot.forget()

    def close(self) -> None:
        """Give the memory back."""
        for slot in self._all:
            slot.lease.release()
        self._all.clear()
        self._free.clear()
        self._pool.close()
        if self._own is not None:
            self._own.close()

    def __len__(self) -> int:
        return len(self._all)
