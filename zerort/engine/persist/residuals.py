"""What coding has lost of gradients (`Wire(feedback=True)`), in checkpoints: one whole value for each sender.

    as many senders as saved   each gets its own back, to the bit, whichever ranks code for it now
    another number             each gets an equal part of the sum of all
    another divisor or scale   scaled, so that a step makes up for what those before have lost
    a checkpoint without       nothing is lost yet: zeros

Senders are ranks, hosts or virtual shards (`engine/wire/sending.py`). Next: `snapshot.py`, which has these beside
parameters and state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zerort.buffer import Residual
from zerort.checkpoint import Value
from zerort.device import Done, Ticket
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["Divided", "LoadedResiduals", "saved_residuals"]


def saved_residuals(context: Context, sections: Iterable[Section]) -> Iterator[Value]:
    """Yield every sender's residual of some sections as a value of its own, over all ranks: this rank's part of it."""
    senders = context.senders
    for section in sections:
        if section.residual is not None:
            assert senders is not None
            for sender in range(senders.count):
                counts = senders.counts(sender, section.layout.numel)
                yield _value_of(section, section.residual, sender, counts)


def _value_of(section: Section, residual: Residual, sender: int, counts: list[int]) -> Value:
    layout = replace(section.layout, dtype=residual.dtype.name)
    is_mine = sender in residual.senders
    mine = residual.arrays[residual.senders.index(sender)] if is_mine else np.empty(0, residual.dtype)
    if not isinstance(mine, np.ndarray):
        mine = ChunkedArray(_kind(sender), (0, mine.size), mine, device=residual.device)
    return Value(kind=_kind(sender), layout=layout, partition=Partition.of_counts(counts), mine=mine)


def _kind(sender: int) -> str:
    return f"residual {sender}"


class Divided(NamedTuple):
    """What becomes of gradients, and so of residuals, on their way to the update."""

    divisor: int
    """What their sum is divided by; 0: by weights, which do not depend on the number of ranks."""
    loss_scale: float = 1.0
    """What losses are multiplied by, and gradients divided by."""

    @classmethod
    def by_steps_of(cls, context: Context) -> Divided:
        """Return what steps of a runtime divide by."""
        return cls(0 if context.run.is_weighted else context.denominator, context.loss_scale)

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> Divided:
        """Return what the steps before a checkpoint have divided by."""
        return cls(int(meta.get("divisor", 0)), float((meta.get("loss_scale") or {}).get("scale", 1.0)))

    def describe(self) -> dict[str, int]:
        """Return what a checkpoint holds of it, beside the state of a loss scale."""
        return {"divisor": self.divisor}

    def scale_to(self, other: Divided) -> float:
        """Return what residuals are multiplied by where the next steps divide otherwise."""
        divisors = other.divisor / self.divisor if self.divisor and other.divisor else 1.0
        return divisors * other.loss_scale / self.loss_scale


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
    """What a checkpoint's residuals are read into. Every copy of the model reads for itself.

    Args:
        context: The runtime's.
        units: Those that are loaded.
        senders: How many there were when the checkpoint was written; 0: it has none.
    """

    def __init__(self, context: Context, units: Units, *, senders: int) -> None:
        self._group = context.mesh.shard
        self._first_rank = context.mesh.copy * self._group.size
        self._sending = context.senders
        self._saved = senders
        self._sections = [(one, one.residual) for one in units.sections() if one.residual is not None]
        self._sums: list[_Sum] = []  # of this rank's range of each section, if there were other senders
        if self._sections and senders not in (0, self._now):
            self._sums = [_Sum(section.partition.counts[self._group.rank]) for section, _ in self._sections]

    @property
    def _now(self) -> int:
        return 0 if self._sending is None else self._sending.count

    def values(self) -> Iterator[Value]:
        """Yield what is read."""
        if self._sending is not None and self._saved == self._now:
            ranks = slice(self._first_rank, self._first_rank + self._group.size)
            for section, residual in self._sections:
                for sender in range(self._now):
                    counts = self._sending.counts(sender, section.layout.numel)[ranks]
                    if any(counts):
                        yield _value_of(section, residual, sender, counts)
        for (section, _), mine in zip(self._sections, self._sums, strict=False):
            layout = replace(section.layout, dtype="float32")
            for sender in range(self._saved):
                yield Value(kind=_kind(sender), layout=layout, partition=section.partition, mine=mine)

    def spread(self, scale: float) -> None:
        """Give every sender its residual, once all ranks have read. Every rank calls this.

        Args:
            scale: What they are multiplied by.
        """
        for at, (section, residual) in enumerate(self._sections):
            if not self._saved:
                residual.clear()
            elif self._sums:
                part = (self._sums[at].total * (scale / self._now)).astype(np.float32)
                # not-gpu: arrays of the host
                whole = self._group.all_gather(part, counts=section.partition.counts, name="load residuals").wait()
                residual.assign(whole[residual.stretch])
            else:
                residual.scale(scale)
