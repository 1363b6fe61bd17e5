"""How many bytes the optimizer state of a section takes, from shapes alone: for `requirements.py`."""

from __future__ import annotations

import math
from fractions import Fraction

from zerort.engine.model.division import Division
from zerort.layout import FlatLayout, itemsize
from zerort.layout.dtypes import TRAINABLE
from zerort.optim import StateSpec

__all__ = ["fixed_nbytes", "state_columns", "state_nbytes"]


def state_columns(part: Division) -> tuple[Fraction, ...]:
    """Return the bytes per element of master weights and of each kind of state that has one element per parameter's."""
    kinds = {spec.name: spec.width for name in part.tensors for spec in _states_of(part, name) if spec.shape is None}
    masters = () if part.master is None else (Fraction(itemsize(part.master.dtype)),)
    return (*kinds.values(), *masters)


def _states_of(part: Division, name: str) -> tuple[StateSpec, ...]:
    assert part.optimizers is not None
    return part.optimizers[name].states_in(TRAINABLE[part.dtype].updated_in, part.tensors[name].shape)


def fixed_nbytes(part: Division) -> int:
    """Return the bytes of state that has a shape of its own."""
    return sum(
        itemsize(spec.dtype) * math.prod(spec.shape)
        for name in part.tensors
        for spec in _states_of(part, name)
        if spec.shape is not None
    )


def state_nbytes(part: Division, layout: FlatLayout, owned: tuple[int, int]) -> int:
    """Return the bytes of state and master weights of a range of a section."""
    first, last = owned
    nbytes = fixed_nbytes(part) + (0 if part.master is None else itemsize(part.master.dtype) * (last - first))
    having: dict[tuple[str, Fraction], list[str]] = {}
    for extent in layout.extents:
        for spec in _states_of(part, extent.name):
            if spec.shape is None:
                having.setdefault((spec.name, spec.width), []).append(extent.name)
    for (_, width), names in having.items():
        if len(names) == len(layout.extents):
            nbytes += int(width * (last - first))
        else:  # kept without the others, and without padding
            overlaps = layout.overlaps(first, last)
            numel = sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names)
            nbytes += int(width * numel)
    return nbytes
