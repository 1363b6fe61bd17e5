"""`SlotMemory`: what a pipeline's slots are cut from where chunks go on from the host to a GPU.

Copies from and to pageable memory would hold up the thread that asks for them, so it is the runtime's host memory: all
ranks pin it, or none. Without a GPU nobody reserves any, and pipelines have memory of their own.
"""

from __future__ import annotations

from zerort.engine.residence.host_memory import HostMemory
from zerort.typing import Array

__all__ = ["SlotMemory"]


class SlotMemory:
    """Memory for the slots of one pipeline at a time.

    Args:
        host: Where it comes from.
        count: Slots that the pipeline may have.
    """

    def __init__(self, host: HostMemory, *, count: int) -> None:
        self._host = host
        self._count = count
        self._room: Array | None = None
        self.slot_nbytes = 0
        """Bytes of a slot, at most."""

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return 0 if self._room is None else self._room.nbytes

    def reserve(self, slot_nbytes: int) -> None:
        """Have room for larger slots, while no pipeline has any. Every rank calls this alike."""
        room, self._room, self.slot_nbytes = self._room, None, 0
        if room is not None:
            self._host.free(room)
        self._room = self._host.zeros(self._count * slot_nbytes, "uint8")
        self.slot_nbytes = slot_nbytes

    def of(self, slot_nbytes: int) -> Array | None:
        """Return the memory of a new pipeline; None if there is none for slots of so many bytes."""
        return None if slot_nbytes > self.slot_nbytes else self._room
