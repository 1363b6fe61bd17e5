"""`SlotSet`: memory that units use in turn: gathered units and their codes, gradients in flight or being offloaded.

How many slots a unit needs is said here, for those who reserve them and for those who forecast that.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerort.comm import Group
from zerort.device.slots import Slots
from zerort.typing import Array

__all__ = ["SlotSet", "bucket_slots", "gather_slots", "summed_slots"]


@dataclass(frozen=True, slots=True)
class SlotSet:
    """A runtime's slots."""

    gathered: Slots
    """The gathered form of units that are not gathered where they rest; one memory for all ranks of a node."""
    buckets: Slots
    """Gradients from the first that comes to the end of their reduction."""
    summed: Slots
    """Summed gradients on their way to where they rest."""
    codes: Slots
    """Codes of parameters that are being gathered; each rank's own."""
    sent: Slots
    """Codes of gradients that are being reduced; each rank's own."""

    @classmethod
    def build(cls, group: Group, *, reduces_micro_steps: bool) -> SlotSet:
        """Make the slots of ranks that share a model; memory comes when it is reserved or leased.

        Args:
            group: These ranks.
            reduces_micro_steps: Whether a step reduces each bucket several times. Then buckets are windows, which the
                ranks read without a call of the system, and stay; else they come with a gradient and go with its sum
                (decisions 0033, 0161).
        """
        device = group.device
        is_host = device.in_host_memory
        in_passing = group.reads_in_place and not reduces_micro_steps

        def for_codes(nbytes: int) -> Array:
            """Return memory of this rank's own; GPUs get it all, or none of them does."""
            if is_host:
                alone: Array = device.empty(nbytes, "uint8")
                return alone
            return group.zeros(nbytes, "uint8", name="codes")

        return cls(
            gathered=Slots(
                "gather slots",
                device=device,
                cure="Release units sooner, or open the runtime with a larger prefetch.",
                allocate=lambda nbytes: (
                    group.zeros_shared([nbytes] + [0] * (group.size - 1), "uint8", name="slot").full
                ),
                free=group.release_local,
            ),
            buckets=Slots(
                "gradient buckets",
                device=device,
                cure="Reduce units before the next one's gradients come, or open the runtime with more buckets.",
                allocate=(
                    (lambda nbytes: device.empty(nbytes, "uint8"))
                    if in_passing
                    else (lambda nbytes: group.zeros(nbytes, "uint8", name="bucket"))
                ),
                free=group.release_local,
                persistent=not in_passing,
            ),
            summed=Slots(
                "slots for summed gradients",
                device=device,
                cure="Open the runtime with more buckets.",
                allocate=(
                    (lambda nbytes: device.empty(nbytes, "uint8", alignment=4096))
                    if is_host
                    else (lambda nbytes: group.zeros(nbytes, "uint8", name="summed"))
                ),
                free=group.release_local,
                persistent=not is_host,  # a GPU would stop for each allocation
            ),
            codes=Slots(
                "slots for codes of parameters",
                device=device,
                allocate=for_codes,
                free=None if is_host else group.release_local,
            ),
            sent=Slots(
                "slots for codes of gradients",
                device=device,
                allocate=for_codes,
                free=None if is_host else group.release_local,
            ),
        )

    def trim(self) -> None:
        """Give back what only a step's gradients need."""
        self.buckets.trim()
        self.summed.trim()

    def close(self) -> None:
        """Give everything back."""
        for slots in (self.gathered, self.buckets, self.summed, self.codes, self.sent):
            slots.close()


def gather_slots(units: int, *, prefetch: int) -> int:
    """Return how many slots are needed to gather a unit with those that hold its tied parameters.

    Args:
        units: How many of these take a slot.
        prefetch: Units that are gathered ahead.
    """
    return max(prefetch + 1, units)


def bucket_slots(sections: int, tied: int, *, in_flight: int) -> int:
    """Return how many gradient buckets are needed to reduce a unit while those before are under way.

    Args:
        sections: Of the unit, those that take a bucket.
        tied: Tensors of other units that it has gradients of.
        in_flight: Units that may be reduced at once.
    """
    return max(in_flight + sections - 1, sections + tied)


def summed_slots(*, buckets: int, is_tied: bool) -> int:
    """Return how many slots are needed to offload a summed gradient.

    Args:
        buckets: Gradient buckets that may be in flight at once.
        is_tied: Whether other units' gradients are added to it: what is there is then read back into a slot beside.
    """
    return max(buckets, 2) if is_tied else buckets
