"""`SectionSetup`: what all sections of a runtime have in common. May import: comm, config, layout, engine.*."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from zerort.comm import Group
from zerort.config import Plan
from zerort.engine.host_memory import HostMemory
from zerort.engine.ledger import Ledger
from zerort.engine.options import RuntimeOptions
from zerort.engine.section_tiers import SectionTiers
from zerort.engine.slot_set import SlotSet
from zerort.engine.tiers import Tiers
from zerort.layout.flat import ALIGNMENT

__all__ = ["BLOCK", "SectionSetup"]

BLOCK: Final = 1024
"""Elements. In deterministic mode norms are summed over blocks of this size, and no block is cut between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSetup:
    """What all sections of a runtime have in common."""

    plan: Plan
    group: Group
    """The ranks that shards are cut over."""
    weights: tuple[float, ...] | None
    alignment: int
    """Elements. Shards start at multiples of it."""
    gradient_dtype: str | None
    micro_steps: int
    deterministic: bool
    slots: SlotSet
    ledger: Ledger
    norm_block: int | None
    """Elements over which squares are summed before the sums meet those of other ranks; None: all of a shard."""
    tiers: Tiers
    """What rests on a disk."""
    tiers_of: Callable[[str], SectionTiers]
    """Where the parts of a section rest, by its name; the same on every rank."""
    host: HostMemory
    """What rests on the host, where computing happens on a GPU."""

    @classmethod
    def build(
        cls,
        group: Group,
        options: RuntimeOptions,
        *,
        plan: Plan,
        micro_steps: int,
        slots: SlotSet,
        ledger: Ledger,
        tiers: Tiers,
        host: HostMemory,
        tiers_of: Callable[[str], SectionTiers] | None,
    ) -> SectionSetup:
        """Return what a runtime's options mean for its sections.

        Args:
            group: The ranks that shards are cut over.
            options: How the runtime trains.
            plan: What lives where.
            micro_steps: Rounds of gradients that are summed on this rank.
            slots: Memory that takes turns.
            ledger: Where moved bytes are counted.
            tiers: What rests on a disk.
            host: What rests on the host, where computing happens on a GPU.
            tiers_of: Where the parts of a section rest, by its name; None: as the plan says.
        """
        planned = SectionTiers.of(plan)
        return cls(
            plan=plan,
            group=group,
            weights=None if options.weights is None else tuple(options.weights),
            alignment=BLOCK if options.deterministic else ALIGNMENT,
            gradient_dtype=options.gradient_dtype,
            micro_steps=micro_steps,
            deterministic=options.deterministic,
            slots=slots,
            ledger=ledger,
            norm_block=BLOCK if options.deterministic else None,
            tiers=tiers,
            host=host,
            tiers_of=(lambda name: planned) if tiers_of is None else tiers_of,
        )
