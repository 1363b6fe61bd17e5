"""Collectives through the staging slabs, piece by piece: for arrays that the other ranks of a node cannot read.

A rank puts a piece of its source into its slab, all meet, and each takes its part of everybody's piece. The slabs have
two halves that take turns, so one meeting per piece is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from zerort import native
from zerort.comm.geometry import even_part
from zerort.comm.guard.call import Call
from zerort.typing import Array

__all__ = ["Slabs", "all_reduce_in_rounds", "move_in_rounds"]


class Slabs(Protocol):
    """What rounds need of a transport."""

    rank: int
    size: int

    def start_rounds(self) -> None:
        """Take the slabs' halves in step with the other ranks from here on."""

    def next_slab(self, dtype: np.dtype[Any]) -> Array:
        """Return the half of this rank's slab whose turn it is."""

    def slab_of(self, rank: int, dtype: np.dtype[Any]) -> Array:
        """Return the half of rank's slab whose turn it is."""


def move_in_rounds(slabs: Slabs, call: Call, meet: Callable[[], None]) -> None:
    """Serve ``call.geometry``; ``meet`` waits for all ranks."""
    table, source, out = call.geometry, call.source, call.out
    assert table is not None
    assert source is not None
    assert out is not None
    lanes = 1 if table.alike else slabs.size  # one piece for everybody, or one for each
    lane = 0 if table.alike else slabs.rank
    slabs.start_rounds()
    piece = slabs.slab_of(slabs.rank, out.dtype).size // lanes
    for done in range(0, table.longest, piece):
        mine = slabs.next_slab(out.dtype)
        for to, (first, count) in enumerate(table.gives[:lanes]):
            many = max(0, min(piece, count - done))
            mine[to * piece :][:many] = source[first + done :][:many]
        meet()
        pieces = [
            slabs.slab_of(rank, out.dtype)[lane * piece :][: max(0, min(piece, count - done))]
            for rank, (_, count) in enumerate(table.takes)
        ]
        if not table.reduces:
            for place, got in zip(table.places, pieces, strict=True):
                out[place + done :][: got.size] = got
        elif pieces[0].size:
            native.reduce_into(out[done:][: pieces[0].size], pieces, call.reduction)


def all_reduce_in_rounds(slabs: Slabs, call: Call, meet: Callable[[], None]) -> None:
    """Reduce every rank's source into every rank's out: a slab holds a piece of the one, and behind it of the other."""
    source, out = call.source, call.out
    assert source is not None
    assert out is not None
    slabs.start_rounds()
    piece = slabs.slab_of(slabs.rank, out.dtype).size // 2
    for done in range(0, call.numel, piece):
        many = min(piece, call.numel - done)
        mine = slabs.next_slab(out.dtype)
        mine[:many] = source[done:][:many]
        meet()
        everyone = [slabs.slab_of(rank, out.dtype) for rank in range(slabs.size)]
        first, count = even_part(many, slabs.size, slabs.rank)
        if count:
            parts = [slab[first : first + count] for slab in everyone]
            native.reduce_into(mine[piece + first :][:count], parts, call.reduction)
        meet()
        for rank, slab in enumerate(everyone):
            first, count = even_part(many, slabs.size, rank)
            out[done + first :][:count] = slab[piece + first :][:count]
