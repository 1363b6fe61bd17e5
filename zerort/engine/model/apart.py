"""`ApartGathers`: units that only some ranks use, gathered without slots, by all ranks, when one of them asks.

Where ranks share no memory a gather is a collective. As long as all ranks gather the same units, they do so through
slots, ahead of time. Once a gather differs, those of that step go on apart: each unit into memory of the rank's own, by
one all_gather for each section. A rank that asks for another unit, waits for a reduction, or has come to its step takes
part in it, with its range and a scratch array: nothing of its own changes but its count of bytes, so any thread can
(decision 0165). That memory, a section's whole for as long as it is copied or joined, is what `gathered_apart` of
`Runtime.memory` counts: at most two at once, one that this rank needs and one that it joins (decision 0191).

    same units on all ranks      slots, prefetch, reductions during backward               as ever
    another unit on some rank    all give way, then all join the units that any rank uses  until the step
    after the step               slots again; the order of gathers is watched anew

Not on GPUs, with `zr.Wire` for parameters, frozen codes, copies of the model, tables by rows, or `zr.Sparsity` between
hosts: there a difference is a mismatch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from zerort import trace
from zerort.comm.guard.differing import Join, RanksDiffer
from zerort.comm.guard.stance import GIVES_WAY, Stance
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.errors import StorageError
from zerort.typing import Array

__all__ = ["ApartGathers"]

_BACKWARD = 2**30
"""The turns of a backward pass: after all of forward's, from the last unit to the first."""

Copied = TypeVar("Copied")


class ApartGathers:
    """How the units of one runtime are gathered to be copied, on ranks that may use different ones.

    Args:
        context: What the runtime's parts share.
        units: All units of the runtime.
    """

    def __init__(self, context: Context, units: Units) -> None:
        self._context = context
        self._units = units
        self._turns: dict[str, int] = {}  # by unit, in the order in which they came
        self._known = -1
        self._is_usable = False

    def add_unit(self, unit: Unit) -> None:
        """Let ranks differ in whether they use a unit. Every rank calls this."""
        self._turns[unit.name] = len(self._turns)
        joins = self._context.mesh.shard.differences.joins
        for section in unit.sections:
            joins[_name_of(section)] = functools.partial(self._join, section)

    @property
    def is_usable(self) -> bool:
        """Whether all units of the runtime can be gathered apart; the same on every rank."""
        if self._known != len(self._units):
            self._known = len(self._units)
            self._is_usable = (
                self._context.mesh.replicate is None
                and self._context.mesh.shard.size > 1
                and self._turns.keys() >= self._units.keys()
                and all(_can_be_apart(section) for section in self._units.sections())
            )
        return self._is_usable

    def copy(self, unit: Unit, copy: Callable[[Array], Copied], *, in_backward: bool) -> list[Copied]:
        """Gather a unit only to copy it; return ``copy`` of each section. Ranks may call this for different units."""
        differences = self._context.mesh.shard.differences
        if not self.is_usable:
            return _copy(unit, copy)
        if not differences.is_known:
            try:
                with differences.having(GIVES_WAY):
                    return _copy(unit, copy)
            except RanksDiffer:
                pass
        turn = self._turns[unit.name]
        with differences.having(Stance(turn=_BACKWARD - turn if in_backward else turn)):
            return [self._gather(section, copy) for section in unit.sections]

    def _gather(self, section: Section, copy: Callable[[Array], Copied]) -> Copied:
        """Return a copy of a section's whole, which is gathered in memory of its own until then. Other ranks join."""
        context, group = self._context, self._context.mesh.shard
        with self._memory_for(section) as out:
            with context.ledger.stall("gather"), trace.span(f"gather {section.name} apart"):
                try:
                    mine = self._own_range(section, out)
                except StorageError as error:
                    context.complain(error)
                    raise
                context.ledger.moved["all_gather"] += _moved_nbytes(section)
                ticket = group.all_gather(mine, out=out, counts=section.partition.counts, name=_name_of(section))
                ticket.wait()  # not-gpu: gathers apart are the host's
            return copy(out)

    @contextlib.contextmanager
    def _join(self, section: Section) -> Iterator[Join]:
        """Take this rank's part in a gather of a section that others need, on the thread that makes its calls."""
        with self._memory_for(section) as out:
            mine = self._own_range(section, out)
            self._context.ledger.joined += _moved_nbytes(section)
            yield Join(mine, out, section.partition.counts)

    @contextlib.contextmanager
    def _memory_for(self, section: Section) -> Iterator[Array]:
        """Have memory for a section's whole while inside, and count it."""
        out = np.empty(section.layout.numel, section.parameters.dtype)
        with self._context.ledger.apart.held(out.nbytes):
            yield out

    def _own_range(self, section: Section, out: Array) -> Array:
        """Return this rank's range where it rests; from a disk it is read to its place in ``out``."""
        array = section.parameters.array
        if array.in_reach:
            return array.memory
        mine = out[section.partition.of(self._context.mesh.shard.rank).slice]
        array.read(0, mine).wait()  # not-gpu: between the host and a disk
        self._context.update_stream.check_written()  # else what was read may be older than a write that failed
        return mine


def _copy(unit: Unit, copy: Callable[[Array], Copied]) -> list[Copied]:
    with unit.gathered():
        return [copy(section.parameters.whole) for section in unit.sections]


def _can_be_apart(section: Section) -> bool:
    """Say whether others can take a section's ranges as they lie: not those of a table, whose rows may be late."""
    return section.table is None and (section.parameters.is_resident or section.parameters.can_gather_apart)


def _moved_nbytes(section: Section) -> int:
    return section.layout.end * section.parameters.dtype.itemsize


def _name_of(section: Section) -> str:
    return f"{section.name} apart"
