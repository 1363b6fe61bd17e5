"""`SectionResidence`: in which memory each part of one section rests."""

from __future__ import annotations

from dataclasses import dataclass

from zerort.config import Plan, Tier
from zerort.errors import CallError

__all__ = ["SectionResidence"]


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
        """Return what a plan says of every section."""
        return cls(parameter=plan.parameter.tier, gradient=plan.gradient.tier, state=plan.state.tier)

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
