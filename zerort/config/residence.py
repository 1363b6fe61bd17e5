"""`Residence`: how values lie over the ranks, and in which memory; `ZERO` has the rows of ZeRO's stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from zerort.errors import CallError
from zerort.layout.placement import Placement

__all__ = ["ZERO", "Residence", "Tier", "TierName", "tier_of"]

TierName = Literal["device", "host", "nvme"]
"""A `Tier` as it may be typed."""


class Tier(Enum):
    """Which memory a value rests in while nobody computes with it."""

    DEVICE = "device"
    """The memory computing happens in: the GPU's, or the host's on a machine without one."""

    HOST = "host"
    """Host memory; pinned where there is a GPU."""

    NVME = "nvme"
    """Files on a local disk."""

    def __repr__(self) -> str:
        return f"Tier.{self.name}"

    def __str__(self) -> str:
        return self.name


def tier_of(given: Tier | TierName) -> Tier:
    """Return the tier that is meant by itself or by its name.

    >>> tier_of("nvme")
    Tier.NVME

    Raises:
        CallError: There is none.
    """
    found = next((tier for tier in Tier if given is tier or given == tier.value), None)
    if found is None:
        names = ", ".join(repr(tier.value) for tier in Tier)
        raise CallError(f"Expected a Tier ({_names(Tier)}) or its name ({names}), got {given!r}.")
    return found


@dataclass(frozen=True, slots=True)
class Residence:
    """Where one kind of value lives: how it lies over the ranks, and in which memory.

    >>> print(Residence(Placement.SHARDED, tier=Tier.NVME))
    SHARDED on NVME
    """

    placement: Placement
    """How the value lies over the group."""

    tier: Tier = Tier.DEVICE
    """The memory it rests in."""

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise CallError(f"Expected a Placement ({_names(Placement)}), got {self.placement!r}.")
        if not isinstance(self.tier, Tier):
            raise CallError(f"Expected a Tier ({_names(Tier)}), got {self.tier!r}.")

    def describe(self, *, gpus: bool) -> str:
        """Say the same of ranks that compute on GPUs, or on the host, where DEVICE and HOST are one memory.

        >>> Residence(Placement.SHARDED).describe(gpus=False)
        'SHARDED in memory'
        """
        return str(self) if gpus or self.tier is Tier.NVME else f"{self.placement} in memory"

    def __str__(self) -> str:
        return f"{self.placement} on {self.tier}"


ZERO: Final[Mapping[int, tuple[Placement, Placement, Placement]]] = MappingProxyType(
    {
        #   parameter             gradient              state
        0: (Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
        1: (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED),
        2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
        3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
    }
)
"""The placements of parameter, gradient and state, by ZeRO stage."""


def _names(choices: type[Enum]) -> str:
    return ", ".join(repr(choice) for choice in choices)
