"""`counted`: which of a rank's micro-batches count: each that is its own, once.

    virtual_shards=3, 2 ranks     rank 0 computes its one leaf twice            [True, False]
    rt.join, out of batches       the last batch again until all are done       [False]

Gradients of the others are dropped where they are handed in or summed (`Unit.add`, `TreeSum`); weights and means ask
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerort.engine.context import Context

__all__ = ["counted", "has_spare_leaf", "is_several"]


def counted(context: Context) -> list[bool]:
    """Return for each of this rank's micro-steps whether it counts."""
    owns, due = context.run.join.owns or [True], context.micro_steps
    owns = owns if len(owns) == due else owns[:1] * due  # one batch is a whole step's
    return [own and at < len(context.own_micro_batches) for at, own in enumerate(owns)]


def has_spare_leaf(context: Context) -> bool:
    """Say whether some rank computes a leaf of `virtual_shards` again; the same on every rank."""
    return context.leaves is not None and context.leaves.total % context.leaves.size > 0


def is_several(values: Any) -> bool:
    """Say whether numbers were given one for each micro-batch: a sequence, or a 1-D array or tensor."""
    return (isinstance(values, Sequence) and not isinstance(values, (str, bytes))) or getattr(values, "ndim", 0) == 1
