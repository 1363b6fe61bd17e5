"""Say where every element lives, with integers only.

The rest of the house reads its plans from here: what a placement is and which collective leads from one to another
(`placement`), where a parameter sits in a flat buffer (`flat`), which rank holds which range of it (`partition`), and
the rule by which both are made (`cut`).
There is no memory and no communication in this room, so the same values serve as buffer layout, checkpoint index,
resharder and byte forecast.

    placement.py                REPLICATED, SHARDED, PARTIAL, and the collective between two of them
    extent.py  flat.py          where a tensor lies in a flat buffer
    partition.py  cut.py        which rank holds which range, and the rule by which ranges are cut
    ranges.py  integers.py      half-open ranges; checks and rounding of integers
    blocks.py                   the same of tensors that are blocks of bytes
    dtypes.py                   what a dtype is trained and summed in

    parameters ── FlatLayout ──> [0, numel) ── Partition ──> rank 0 | rank 1 | … | rank size-1

Every range is half open: ``[first, stop)``.
"""

from __future__ import annotations

from zerort.layout.cut import Cut
from zerort.layout.dtypes import ITEMSIZES, itemsize
from zerort.layout.extent import Extent, Overlap
from zerort.layout.flat import FlatLayout
from zerort.layout.partition import Partition
from zerort.layout.placement import TRANSITIONS, Collective, Placement, transition
from zerort.layout.ranges import Move, Piece, Range

__all__ = [
    "ITEMSIZES",
    "TRANSITIONS",
    "Collective",
    "Cut",
    "Extent",
    "FlatLayout",
    "Move",
    "Overlap",
    "Partition",
    "Piece",
    "Placement",
    "Range",
    "itemsize",
    "transition",
]
