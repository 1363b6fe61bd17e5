"""`GatheredForm`: the whole of one unit on this rank, from when it is fetched until nobody holds it.

    fetch     lease a slot if need be, start every section's parameters      also ahead of time, as far as there is room
    acquire   fetch, compare errors where ranks read from disks, finish      now it will be whole
    release   the last holder's gives the slot back, unless the unit is expected next: then it is as if fetched ahead

[Note: Shared slots] Ranks that share memory share their slots, and each reads its own part of a unit from its disk
straight into them, or decodes it there. So nobody may write into a slot that another rank still computes with: before a
shared slot is overwritten, all ranks must have passed a collective since it was released, and if none happened, `fetch`
runs a barrier. All ranks lease, release and meet in the same order, so they agree on when. Slots may be shared although
the group as a whole is not one memory: each of several hosts shares its own. Those of GPUs are private. What stays is
released later, on all ranks alike: units that are read from a disk are compared at each `acquire`, also if they stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final

from zerort.buffer import unit_title
from zerort.comm.agreed import agreed
from zerort.comm.guard.differing import RanksDiffer
from zerort.device import Ticket, joined
from zerort.device.slots import Slot
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.residence.parameters import Parameters
from zerort.errors import StorageError, UnitStateError, ZerortError

__all__ = ["GatheredForm", "end_step_of_gathers", "wait_for_gathers"]

_LINE: Final = 64  # bytes: sections of one slot start on a cache line


class GatheredForm:
    """The whole of one unit, on this rank.

    Args:
        context: What the runtime's parts share: slots, ranks.
        name: The unit's.
        sections: The unit's.
    """

    def __init__(self, context: Context, name: str, sections: tuple[Section, ...]) -> None:
        self._context = context
        self._name = name
        self._sections = sections
        self._can_fail = any(one.parameters.can_fail for one in sections)
        writes_alone = any(one.parameters.writes_alone for one in sections)
        is_host, shard = context.device.in_host_memory, context.mesh.shard
        self._shares_slots = (self._can_fail or writes_alone) and is_host
        if self.slot_nbytes and (self._shares_slots or (is_host and len(set(shard.hosts)) < shard.size)):
            context.run.in_one_order = True
        self._holders = 0  # who needs it: its unit, and units that are tied to that one
        self._may_stay = True  # when the last of them has gone
        self._slot: Slot | None = None
        self.fetched: Ticket[Any] | None = None
        """Before `acquire`: this rank's own reads. After it: the whole."""

    @property
    def _parameters(self) -> list[Parameters]:
        return [one.parameters for one in self._sections]

    @property
    def slot_nbytes(self) -> int:
        """Bytes that it takes in a slot; 0 if it needs none."""
        return sum(_room_of(section) for section in self._sections if section.parameters.needs_room)

    @property
    def is_held(self) -> bool:
        """Whether somebody has acquired it."""
        return self._holders > 0

    def fetch(self) -> bool:
        """Start to bring the parameters here if there is room; say whether they are, or will be."""
        if self.fetched is not None:
            return True
        need = self.slot_nbytes
        if need:
            if not self._context.slots.gathered.available:
                return False
            self._slot = self._context.slots.gathered.lease(need)
            if self._shares_slots and self._slot.idle_since == self._context.run.meetings:  # [Note: Shared slots]
                try:
                    # not-gpu: shared slots
                    self._context.mesh.shard.barrier(name=f"slot for {self._name or 'root unit'}"[:60]).wait()
                except RanksDiffer:
                    self._slot.release()
                    self._slot = None
                    raise
                self._context.run.meetings += 1
        cursor, begun = 0, []
        try:
            for section in self._sections:
                out = None
                if section.parameters.needs_room:
                    assert self._slot is not None
                    out = self._slot.memory[cursor : cursor + section.parameters.room_nbytes]
                    cursor += _room_of(section)
                begun.append(section.parameters.start(out))
        except BaseException:
            self.fetched = joined(begun, result=None)
            self.drop()
            raise
        self.fetched = joined(begun, result=None)
        return True

    def acquire(self) -> None:
        """Bring the parameters here, until as many `release`. Every rank calls this."""
        self._expect_no_difference()
        if not self.fetch():
            for other in self._context.prefetcher.unheld():
                other.drop()
                if self.fetch():
                    break
            else:
                self._context.slots.gathered.lease(self.slot_nbytes)  # which says that there is none, and the cure
        if not self._holders:
            if self._can_fail:
                self._agree()
            # not-gpu: `finish` of parameters gives a Ticket, and waits for nothing
            self.fetched = joined([one.finish() for one in self._parameters], result=None)
        self._holders += 1

    def _expect_no_difference(self) -> None:
        """Refuse to use slots after ranks have gathered different units: they may have leased different ones."""
        differences = self._context.mesh.shard.differences
        if not differences.is_known:
            return
        text = (
            f"Expected {unit_title(self._name)} to be gathered by hand before ranks use different units of a model, or "
            "after the step; got it in between. Without a step, after an evaluation: rt.discard_gradients()."
        )
        if differences.stance is not None:
            raise RanksDiffer(text)
        error = UnitStateError(text)
        self._context.complain(error)
        raise error

    def _agree(self) -> None:
        """Wait for what this rank reads, and raise what any rank has met, once for all sections: on every rank."""
        context = self._context
        name = f"gather {self._name or 'root unit'}"[:60]
        try:
            with agreed(context.mesh.shard, name, catching=StorageError, others=context.mesh.beyond):
                with context.ledger.stall("nvme"):
                    errors = [error for one in self._parameters if (error := one.local_error()) is not None]
                if errors:
                    raise errors[0]
                context.update_stream.check_written()  # else what is read may be older than a write that failed
        except ZerortError:
            self.drop()
            raise
        context.run.meetings += 1

    def release(self, *, stays: bool = False) -> None:
        """End one `acquire`.

        Args:
            stays: Whether it comes next again, and is left here as if it had been fetched ahead.
        """
        self._holders -= 1
        if not (stays and self._may_stay):
            self.drop()

    def drop(self) -> None:
        """Let it go when nobody holds it: a slot may serve another unit, and what is in it may have changed."""
        if self._holders:
            self._may_stay = False
            return
        self._may_stay = True
        fetched, slot, self.fetched, self._slot = self.fetched, self._slot, None, None
        if fetched is None:
            return
        # Nobody needs it; who does, gathers again. Whoever held it without a slot was told of any error.
        ignored = (Exception,) if slot is None else (StorageError, RanksDiffer)
        try:
            with contextlib.suppress(*ignored):
                # It may have been gathered ahead and not used: until then a slot is read, or a host's copy written to.
                # gpu-wait: a_gather_that_nobody_used_leaves_its_slot
                self._context.device.order_after(fetched)
        finally:  # a gather that failed gives its slot back, too: all ranks know of it
            if slot is not None:
                for section in self._sections:
                    section.parameters.release()
                slot.idle_since = self._context.run.meetings
                slot.release()

    def close(self) -> None:
        """Forget the memory: its owner closes."""
        self._slot = self.fetched = None


def _room_of(section: Section) -> int:
    """Return the bytes that a gathered section takes in a slot: one that is empty takes a line, to have a slot, too."""
    return max(-(-section.parameters.room_nbytes // _LINE), 1) * _LINE


def wait_for_gathers(context: Context, sections: Iterable[Section]) -> None:
    """Wait until nobody reads parameters of ``sections`` any more, and all of them are written: they are to change."""
    context.prefetcher.drop_unused()
    context.staging.finish()  # gpu-wait: a_checkpoint_is_of_what_was_written
    for section in sections:
        section.parameters.wait()  # gpu-wait: values_are_assigned_behind_a_gather


def end_step_of_gathers(context: Context, *, is_discarded: bool = False) -> None:
    """Start a new step's gathers, on all ranks alike: slots, and what is gathered ahead. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        is_discarded: Whether the step was given up: then the next one is expected to be as the one before it.
    """
    differences = context.mesh.shard.differences
    if differences.is_known:
        context.prefetcher.forget()
        differences.forget()
        context.run.meetings += 1  # all have met in the step
    elif is_discarded:
        context.prefetcher.restart()
    else:
        context.prefetcher.end_step()
    if context.run.in_one_order:
        # Not only where ranks are known to differ: one that came for a unit that was gathered ahead meets nobody, and
        # those that passed over it have released its slot later without knowing that.
        context.slots.gathered.reorder()
