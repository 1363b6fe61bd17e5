"""`SectionSetup`: what all sections of a runtime have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from zerort.comm import Group
from zerort.config import Plan
from zerort.engine.ledger import Ledger
from zerort.engine.model.slot_set import SlotSet
from zerort.engine.options import RuntimeOptions
from zerort.engine.residence.choose import SectionTiers
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.tiers import Tiers
from zerort.layout import Cut
from zerort.layout.flat import ALIGNMENT

__all__ = ["BLOCK", "SectionSetup", "cut_over"]

BLOCK: Final = 1024
"""Elements. In deterministic mode norms are summed over blocks of this size, and no block is cut between ranks."""


def cut_over(size: int, *, weights: Sequence[float] | None, deterministic: bool, equal: bool) -> Cut:
    """Return how a runtime's sections are cut over ``size`` ranks.

    Args:
        size: The ranks that share a model.
        weights: How much of every shard each takes; None: alike.
        deterministic: Whether norms are summed over blocks that no cut may divide.
        equal: Whether shards are padded to one length.
    """
    granule = BLOCK if deterministic else ALIGNMENT
    return Cut(size=size, granule=granule, weights=None if weights is None else tuple(weights), equal=equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSetup:
    """What all sections of a runtime have in common."""

    plan: Plan
    group: Group
    """The ranks that shards are cut over."""
    replicas: Group | None
    """The ranks that hold the same shards of other copies of the model; None: there is one."""
    cut: Cut
    """How sections are cut over the ranks."""
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
        replicas: Group | None,
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
            replicas: The ranks that hold the same shards of other copies of the model; None: there is one.
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
            replicas=replicas,
            cut=cut_over(
                group.size,
                weights=options.weights,
                deterministic=options.deterministic,
                equal=group.prefers_equal_counts,
            ),
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
