"""Name the three ways a value can lie over a group, and the collective that leads from one to another.

    from / to     REPLICATED       SHARDED           PARTIAL
    REPLICATED    none             slice             -
    SHARDED       all_gather       none              -
    PARTIAL       all_reduce       reduce_scatter    none

A dash is a move that does not exist: a partial sum comes out of a computation, never out of another placement. The
picture and `TRANSITIONS` are the same table; `buffer/redistribute.py` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from zerort.errors import PlanError

__all__ = ["TRANSITIONS", "Collective", "Placement", "transition"]


class Placement(Enum):
    """How one value lies over the ranks of a group."""

    REPLICATED = "replicated"
    """Every rank holds the whole value, and all hold the same."""

    PARTIAL = "partial"
    """Every rank holds a whole-sized summand; the value is the sum over the ranks."""

    SHARDED = "sharded"
    """Every rank holds its own range of the value, as a `Partition` says."""

    def __repr__(self) -> str:
        return f"Placement.{self.name}"

    def __str__(self) -> str:
        return self.name


class Collective(Enum):
    """What has to happen between the ranks to get from one placement to another."""

    ALL_GATHER = "all_gather"
    """Every rank receives the ranges of all others."""

    REDUCE_SCATTER = "reduce_scatter"
    """Every rank receives the sum over its own range."""

    ALL_REDUCE = "all_reduce"
    """Every rank receives the whole sum."""

    SLICE = "slice"
    """Every rank keeps its own range of what it already has; nothing is sent."""

    NONE = "none"
    """The value is already there."""

    def __repr__(self) -> str:
        return f"Collective.{self.name}"

    def __str__(self) -> str:
        return self.name


TRANSITIONS: Final[Mapping[tuple[Placement, Placement], Collective]] = MappingProxyType(
    {
        # from                  to                       needs
        (Placement.SHARDED, Placement.REPLICATED): Collective.ALL_GATHER,
        (Placement.PARTIAL, Placement.SHARDED): Collective.REDUCE_SCATTER,
        (Placement.PARTIAL, Placement.REPLICATED): Collective.ALL_REDUCE,
        (Placement.REPLICATED, Placement.SHARDED): Collective.SLICE,
        (Placement.REPLICATED, Placement.REPLICATED): Collective.NONE,
        (Placement.PARTIAL, Placement.PARTIAL): Collective.NONE,
        (Placement.SHARDED, Placement.SHARDED): Collective.NONE,
    }
)


def transition(source: Placement, *, to: Placement) -> Collective:
    """Look up the collective that turns one placement into another.

    Args:
        source: How the value lies now.
        to: How it should lie.

    Returns:
        The collective all ranks of the group have to call.

    Raises:
        PlanError: If the table holds no such move.

    >>> transition(Placement.PARTIAL, to=Placement.SHARDED)
    Collective.REDUCE_SCATTER
    """
    collective = TRANSITIONS.get((source, to))
    if collective is None:
        legal = ", ".join(f"{one} → {other}" for one, other in TRANSITIONS if one is not other)
        raise PlanError(
            f"Expected one of the moves {legal}, got {source} → {to}. "
            "A partial sum comes out of a computation, not out of a move: start from a PARTIAL value, "
            "or ask for REPLICATED or SHARDED."
        )
    return collective
