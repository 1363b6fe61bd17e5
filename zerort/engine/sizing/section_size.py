"""`SectionSize`: the bytes that one section takes on one rank, part by part, and how much of them a tier holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from zerort.config import Tier
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import cut_chunks

__all__ = ["PARTS", "SectionSize"]

PARTS: Final = ("parameter", "gradient", "state")
"""What a section consists of, from hot to cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSize:
    """Bytes that one section takes on one rank."""

    unit: str
    """The unit it belongs to."""
    name: str = ""
    """Its own name."""
    parameter: int
    """Parameters at rest."""
    gradient: int = 0
    """Gradients at rest, `tied_sums` included."""
    state: int = 0
    """Optimizer state at rest, master weights included."""
    whole: int = 0
    """Parameters of all ranks together: what its gathered form takes; 0 if every rank holds them all the time."""
    is_decoded: bool = False
    """Whether it rests as codes: then its gathered form is apart from these, wherever they are."""
    decoded_from: int = 0
    """Codes of all ranks that come to its gathered form to be decoded, unless they are in reach."""
    codes: int = 0
    """Codes of all ranks' parameters, while they travel; 0 if these travel as they are."""
    copied: int = 0
    """Parameters of all ranks together, if they stay on each host between gathers where ranks do not share memory."""
    sent: int = 0
    """Codes of gradients that the rank sends and gets, while they travel; 0 if these travel as they are."""
    residual: int = 0
    """What coding has lost of gradients, if it is kept: in memory all the time."""
    bucket: int = 0
    """Gradients of the whole section, while they are collected in a slot; 0 if they are collected where they rest."""
    reductions: int = 1
    """How many reductions are summed where gradients rest, in a step."""
    shards: int = 1
    """How many shards of gradients rest at once: nodes of a fixed tree."""
    gradient_moves: tuple[int, int] = (0, 1)
    """How many of them a step reads back before the update, and puts away, if they are offloaded."""
    tied_sums: int = 0
    """Other units' gradients of its tensors, each in a fixed tree of its own."""
    exchanged: int = 0
    """Chunks of a fixed tree's nodes in hand at once, while copies of the model exchange them; 0: there is one."""
    arriving: int = 0
    """Slices of gradients that arrive unsummed in a micro-step, in a slot; 0 if they are summed on their way."""
    is_tied: bool = False
    """Whether other units' gradients are added to them."""
    is_held: bool = False
    """Whether its slot is still read after its reduction has begun."""
    numel: int = 0
    """Elements that the rank updates."""
    columns: Mapping[str, tuple[int | Fraction, ...]] = field(default_factory=dict)
    """Bytes per element of each array that streams if a part does, by part."""
    row_width: int = 0
    """Elements of a row of a table that is updated by rows, whose pages pass through a window; 0: it is none."""
    reads_parameter: bool = True
    """Whether an update reads parameters; else they are what master weights round to."""
    fixed: int = 0
    """Of the state, what stays in memory whatever the tier: one small array per tensor."""
    movable: frozenset[str] = frozenset(PARTS)
    """The parts that can leave memory."""
    stays: bool = False
    """Whether all of it stays where computing happens, whatever a plan says: it is not updated chunk by chunk."""

    @property
    def is_trained(self) -> bool:
        """Whether its parameters are updated."""
        return "gradient" in self.columns

    def on_disk(self, tiers: SectionResidence, *, chunk_numel: int) -> dict[str, int]:
        """Return how much of each part rests on a disk.

        Args:
            tiers: Where the parts rest.
            chunk_numel: Elements of a chunk, at most: what stays of state are whole chunks.
        """
        nbytes = {part: getattr(self, part) * (getattr(tiers, part) is Tier.NVME) for part in PARTS}
        if nbytes["state"]:
            each = sum(self.columns["state"])
            cuts = cut_chunks(self.numel, most=chunk_numel)
            resident = int(max(each * at for at in cuts if each * at <= tiers.state_resident_nbytes))
            nbytes["state"] -= self.fixed + resident
        return nbytes
