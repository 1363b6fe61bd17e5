"""What coding has lost of gradients (`Wire(feedback=True)`), in checkpoints: one whole value for each rank that sends.

    as many ranks as saved     each gets its own back, to the bit
    another number             each rank gets an equal part of the sum of all
    another divisor            scaled, so that a step makes up for what those before have lost
    a checkpoint without       nothing is lost yet: zeros

Next: `snapshot.py`, which has these beside parameters and state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zerort.checkpoint import Value
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.layout import Partition
from zerort.native import cast_into
from zerort.typing import Array

__all__ = ["Divided", "LoadedResiduals", "residuals_of"]


def residuals_of(section: Section, group: Group) -> Iterator[Value]:
    """Yield every rank's residual of a section as a value of its own, which that rank has all of."""
    if section.residual is None:
        return
    layout = replace(section.layout, dtype="bfloat16")
    for rank in range(group.size):
        partition = Partition.of_counts([layout.numel * (one == rank) for one in range(group.size)])
        mine = section.residual if rank == group.rank else section.residual[:0]
        yield Value(kind=_kind(rank), layout=layout, partition=partition, mine=mine)


def _kind(sender: int) -> str:
    return f"residual {sender}"


class Divided(NamedTuple):
    """What becomes of gradients, and so of residuals, on their way to the update."""

    divisor: int
    """What their sum is divided by; 0: by weights, which do not depend on the number of ranks."""
    copies: int
    """Copies of the model, whose sums are added; a checkpoint holds the residuals of one."""

    @classmethod
    def by_steps_of(cls, context: Context) -> Divided:
        """Return what steps of a runtime divide by."""
        copies = context.world.size // context.mesh.shard.size
        return cls(0 if context.run.is_weighted else context.denominator, copies)

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> Divided:
        """Return what the steps before a checkpoint have divided by."""
        return cls(int(meta.get("divisor", 0)), int(meta.get("copies", 1)))

    def describe(self) -> dict[str, int]:
        """Return what a checkpoint holds of it."""
        return self._asdict()

    def scale_to(self, other: Divided) -> float:
        """Return what residuals are multiplied by where the next steps divide otherwise."""
        divisors = other.divisor / self.divisor if self.divisor and other.divisor else 1.0
        return divisors * self.copies / other.copies


class _Sum:
    """What is written into it, by any thread, is added.

    In float64, where sums of bfloat16 have the same bits in any order unless one is 2^40 times another.
    """

    def __init__(self, numel: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.size = numel
        self.total: Array = np.zeros(numel, np.float64)
        self._lock = threading.Lock()

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Refuse: a load only writes."""
        raise NotImplementedError

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Add to the elements from ``first`` on."""
        with self._lock:
            self.total[first : first + source.size] += source
        return Done(source)


class LoadedResiduals:
    """What a checkpoint's residuals are read into.

    Args:
        units: Those that are loaded.
        group: The ranks that send.
        senders: How many there were when the checkpoint was written; 0: it has none.
        scale: What they are multiplied by.
    """

    def __init__(self, units: Units, group: Group, *, senders: int, scale: float) -> None:
        self._group = group
        self._senders = senders
        self._scale = scale
        self._sections = [one for one in units.sections() if one.residual is not None]
        self._sums: list[_Sum] = []  # of this rank's range of each section, if there were other senders
        if senders not in (0, group.size):
            self._sums = [_Sum(section.partition.counts[group.rank]) for section in self._sections]

    def values(self) -> Iterator[Value]:
        """Yield what is read."""
        if self._senders == self._group.size:
            for section in self._sections:
                yield from residuals_of(section, self._group)
        for section, mine in zip(self._sections, self._sums, strict=False):
            layout = replace(section.layout, dtype="float32")
            for sender in range(self._senders):
                yield Value(kind=_kind(sender), layout=layout, partition=section.partition, mine=mine)

    def spread(self) -> None:
        """Give every rank its residual, once all have read. Every rank calls this."""
        for at, section in enumerate(self._sections):
            residual = section.residual
            assert residual is not None
            if not self._senders:
                residual.view(np.uint16).fill(0)
            elif self._sums:
                part = (self._sums[at].total * (self._scale / self._group.size)).astype(np.float32)
                # not-gpu: codes are refused on GPUs
                whole = self._group.all_gather(part, counts=section.partition.counts, name="load residuals").wait()
                cast_into(residual, whole)
            elif self._scale != 1:
                wide = np.empty(residual.size, np.float32)
                cast_into(wide, residual)
                wide *= np.float32(self._scale)
                cast_into(residual, wide)
