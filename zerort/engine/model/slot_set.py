"""`SlotSet`: memory that units use in turn: gathered units, gradients in flight, gradients being offloaded."""

from __future__ import annotations

from dataclasses import dataclass

from zerort.comm import Group
from zerort.device.slots import Slots

__all__ = ["SlotSet"]


@dataclass(frozen=True, slots=True)
class SlotSet:
    """A runtime's slots."""

    gathered: Slots
    """The gathered form of units that are not gathered where they rest; one memory for all ranks of a node."""
    buckets: Slots
    """Gradients from the first that comes to the end of their reduction."""
    summed: Slots
    """Summed gradients on their way to where they rest."""

    @classmethod
    def build(cls, group: Group) -> SlotSet:
        """Make the slots of ranks that share a model; memory comes when it is reserved or leased."""
        device = group.device
        is_host = device.in_host_memory
        return cls(
            gathered=Slots(
                "gather slots",
                device=device,
                cure="Release units sooner, or open the runtime with a larger prefetch.",
                allocate=lambda nbytes: (
                    group.empty_shared([nbytes] + [0] * (group.size - 1), "uint8", name="slot").full
                ),
                free=group.release_local,
            ),
            buckets=Slots(
                "gradient buckets",
                device=device,
                cure="Reduce units before the next one's gradients come, or open the runtime with more buckets.",
                allocate=(
                    (lambda nbytes: device.empty(nbytes, "uint8"))
                    if group.reads_in_place
                    else (lambda nbytes: group.empty(nbytes, "uint8", name="bucket"))
                ),
                free=group.release_local,
                persistent=not group.reads_in_place,
            ),
            summed=Slots(
                "slots for summed gradients",
                device=device,
                cure="Open the runtime with more buckets.",
                allocate=(
                    (lambda nbytes: device.empty(nbytes, "uint8", alignment=4096))
                    if is_host
                    else (lambda nbytes: group.empty(nbytes, "uint8", name="summed"))
                ),
                free=group.release_local,
                persistent=not is_host,  # a GPU would stop for each allocation
            ),
        )

    def trim(self) -> None:
        """Give back what only a step's gradients need."""
        self.buckets.trim()
        self.summed.trim()

    def close(self) -> None:
        """Give everything back."""
        for slots in (self.gathered, self.buckets, self.summed):
            slots.close()
