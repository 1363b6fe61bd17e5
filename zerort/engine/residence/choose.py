"""`SectionResidence`: in which memory each part of one section rests; `reach_of`: which tiers computing reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerort.config import Plan, Tier
from zerort.errors import CallError
from zerort.layout import Placement
from zerort.typing import Device

__all__ = ["SectionResidence", "reach", "reach_of"]


def reach(*, on_gpus: bool) -> frozenset[Tier]:
    """Return the tiers whose values are computed with where they lie: without a GPU, all memory."""
    return frozenset({Tier.DEVICE} if on_gpus else {Tier.DEVICE, Tier.HOST})


def reach_of(device: Device) -> frozenset[Tier]:
    """Return the tiers that a device reaches."""
    return reach(on_gpus=not device.in_host_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionResidence:
    """Where the parts of one section rest. The plan's tiers, unless a budget decides section by section."""

    parameter: Tier
    gradient: Tier
    state: Tier
    state_resident_nbytes: int = 0
    """Of state that rests on NVME, so many of a rank's first bytes stay in memory all the same; in whole chunks."""

    @classmethod
    def of(cls, plan: Plan) -> SectionResidence:
        """Return what a plan says of every section.

        Parameters and gradients that each rank holds whole stay where computing happens; state may be on a GPU's host.
        """
        asked = cls(parameter=plan.parameter.tier, gradient=plan.gradient.tier, state=plan.state.tier)
        if plan.parameter.placement is not Placement.SHARDED:
            asked = replace(asked, parameter=Tier.DEVICE)
        if plan.gradient.placement is not Placement.SHARDED:
            asked = replace(asked, gradient=Tier.DEVICE)
        return asked

    def __post_init__(self) -> None:
        for part in ("parameter", "gradient", "state"):
            if not isinstance(getattr(self, part), Tier):
                raise CallError(f"Expected a Tier for the {part}, got {getattr(self, part)!r}.")
        if type(self.state_resident_nbytes) is not int or self.state_resident_nbytes < 0:
            raise CallError(f"Expected state_resident_nbytes to be 0 or more, got {self.state_resident_nbytes!r}.")

    @property
    def streams(self) -> bool:
        """Whether a part of it streams through memory in chunks."""
        return Tier.NVME in (self.parameter, self.gradient, self.state)

    def is_offloaded(self, reach: frozenset[Tier]) -> bool:
        """Say whether a part of it rests elsewhere than where computing happens, given the tiers that it reaches."""
        return not reach.issuperset((self.parameter, self.gradient, self.state))
