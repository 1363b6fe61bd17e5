"""`GradientOrder`: from gradients that a framework makes ready to reductions that all ranks issue in one order.

    ready      a gradient is packed into its unit's bucket, or waits for it
    complete   all of a unit's gradients are there: the unit is reduced, when those before it in the order are
    agree      what is not complete is reduced with what it has; units that slept are asked for on all ranks

Ranks agree before the step; where every micro-step is reduced (``accumulate="sharded"``), when its backward pass ends.
The order is the same on every rank and holds the units that any rank used in the last step, or in that micro-step of
it; so a rank that did not use one reduces zeros for it, and one that nobody used costs nothing. It is the order in
which rank 0 completed them (decisions 0084, 0088).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerort.buffer import unit_title
from zerort.engine.attachment import Attachment, Verb
from zerort.engine.context import Context
from zerort.engine.model.bound_unit import BoundUnit, RowGradients
from zerort.engine.model.units import Units
from zerort.engine.step.facts.record import Record
from zerort.errors import UnitStateError
from zerort.typing import Array

__all__ = ["GradientOrder"]

_LATE = 2**31  # the place in the order of what rank 0 did not complete


@dataclass(eq=False, slots=True)
class _Account:
    """What a unit has of this step's gradients."""

    unit: BoundUnit
    spread: bool
    """Whether its gradients come from all over the backward pass: it then takes no bucket before it is complete."""
    index: int
    count: int
    """How many of its tensors take gradients; 0: of tables, one for each time that rows of them were gathered."""
    got: set[str] = field(default_factory=set)
    """Names that have their gradient in this micro-step."""
    waiting: dict[str, Any] = field(default_factory=dict)
    """Gradients that are not packed yet, in the framework's own form."""
    in_bucket: bool = False
    micro_steps: int = 0
    """Micro-steps that are complete, since the ranks have agreed last."""
    reduced: int = 0
    """Micro-steps that were handed to the runtime, since then."""
    touched: bool = False
    """Whether it had any gradient since then."""
    place: int = _LATE
    """When it was complete, counted from 0."""
    passed: int = 0
    """Micro-steps of this step that the runtime knows of."""
    used: bool = False
    """Whether any rank had a gradient of it in this step, as far as they have agreed."""

    def agreed(self) -> None:
        """Go on to what the ranks will agree on next."""
        self.got.clear()
        self.waiting.clear()
        self.in_bucket = self.touched = False
        self.micro_steps = self.reduced = 0
        self.place = _LATE

    def reset(self) -> None:
        self.agreed()
        self.passed, self.used = 0, False


class GradientOrder(Attachment):
    """The gradients of all units of one framework in one runtime.

    Args:
        context: What the runtime's parts share.
        units: All units of the runtime.
        to_array: Returns a gradient of the framework as an array over the same memory.
        around: Returns what the runtime is entered within: the framework's stream.
        call_at_end: Has a function called when the backward pass that is under way ends; None: the framework cannot.
    """

    def __init__(
        self,
        context: Context,
        units: Units,
        *,
        to_array: Callable[[Any], Array],
        around: Callable[[], AbstractContextManager[object]],
        call_at_end: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._context = context
        self._units = units
        self._to_array = to_array
        self._around = around
        self._accounts: dict[BoundUnit, _Account] = {}
        self._call_at_end = call_at_end
        reduces_all = context.micro_steps > 1 and not context.keeps_whole_gradients
        self._span = 1 if reduces_all else context.micro_steps  # micro-steps from one agreement to the next
        self._orders: list[list[_Account]] = [[] for _ in range(context.micro_steps // self._span)]
        self._agreements = 0  # since the last step
        self._next = 0  # which of the order is to be reduced next
        self._completed = 0
        self._micro_step = 0  # since the ranks have agreed last, where bits of two must not mix
        self._most = 1  # buckets that the widest unit takes at once
        self._pass = -1  # number of the backward pass that is under way, or was the last
        self._passes = 0  # how many there were since the last step; counted where a step has several
        self.before_agreement: list[Callable[[int], None]] = []
        """Called, with the number of micro-steps, before ranks agree on gradients; nothing is reduced before that."""
        self._everyone: Array = np.zeros((1, 0, 2), np.int64)  # by rank and unit: touched, place
        self._most_passes = 0  # on any rank

    def add_unit(self, unit: BoundUnit, *, spread: bool = False) -> None:
        """Take gradients of ``unit`` from now on; every rank adds the same ones, between steps.

        Args:
            unit: The unit; without trainable tensors nothing happens.
            spread: Its gradients come from all over a backward pass.
        """
        if not unit.trainable:
            return
        account = _Account(unit, spread, len(self._accounts), 0 if unit.has_tables else len(unit.trainable))
        self._accounts[unit] = account
        for order in self._orders:
            order.insert(0, account)  # backward goes from the last to the first
        self._most = max(self._most, unit.slots_in_flight)

    @property
    def units(self) -> Iterable[BoundUnit]:
        """The units whose gradients it takes, in the order in which they came."""
        return self._accounts.keys()

    @property
    def pending(self) -> bool:
        """Whether this rank had a gradient since the last step."""
        return any(account.touched or account.used for account in self._accounts.values())

    @property
    def _order(self) -> list[_Account]:
        return self._orders[self._agreements]

    @property
    def _is_agreed(self) -> bool:
        """Whether the ranks have agreed on all of this step: somebody looked at its gradients before it."""
        return self._agreements == len(self._orders)

    @property
    def _agrees_in_backward(self) -> bool:
        return self._span < self._context.micro_steps

    # -- during backward -------------------------------------------------------------------------------------------

    def ready(self, unit: BoundUnit, local: str, gradient: Any, *, backward: int) -> None:
        """Take a gradient; one that comes twice in a micro-step is summed.

        Args:
            unit: Whose it is.
            local: The tensor's name in the unit.
            gradient: As the framework has it; two of them can be added with ``+``. Of a table: `RowGradients`.
            backward: A number that tells one backward pass from the next.
        """
        account = self._accounts[unit]
        with self._around():
            if backward != self._pass:
                self._begin_pass(backward)
            self._take(account, local, gradient)

    def _begin_pass(self, number: int) -> None:
        self._pass, self._passes = number, self._passes + 1
        if self._agrees_in_backward:
            if self._has_begun:  # nobody has told that the last one ended
                self._agree()
            if self._call_at_end is not None:
                self._call_at_end(self._end_pass)
        for account in self._accounts.values():
            if account.got and not account.count:  # no more of a table's rows come for the pass before
                self._complete(account)

    def _end_pass(self) -> None:
        with self._around():
            if self._has_begun:
                self._agree()

    def agree_on_pass(self) -> bool:
        """End a backward pass, also one without gradients, if ranks agree on each; say whether they did."""
        if not self._agrees_in_backward or self._is_agreed:
            return False
        with self._around():
            self._agree()
        return True

    def _take(self, account: _Account, local: str, gradient: Any) -> None:
        limit = self._context.micro_steps
        if self._is_agreed or account.micro_steps >= self._span:
            self._fail(
                UnitStateError(
                    f"Expected at most {limit} backward() through {unit_title(account.unit.name)} per step, "
                    "got one more. A step averages over ranks and micro-steps, one backward() each: add up the losses "
                    "of one and call backward() once; call rt.step() first, or open the runtime with micro_steps=."
                )
            )
        account.touched = True
        while account.micro_steps < self._micro_step:  # it slept in those
            self._end_micro_step(account)
            account.micro_steps += 1
        if self._context.run.join.drops():
            pass  # dropped here: what is packed later may be of a batch before
        elif self._may_pack(account):
            account.in_bucket = True
            self._pack(account, local, gradient)
        elif local in account.waiting:
            account.waiting[local] = account.waiting[local] + gradient
        else:
            account.waiting[local] = gradient
        account.got.add(local)
        if len(account.got) == account.count:
            self._complete(account)

    def _complete(self, account: _Account) -> None:
        account.got.clear()
        account.unit.on_gradients_complete()
        account.micro_steps += 1
        if account.micro_steps < self._span:
            self._end_micro_step(account)
            return
        account.place, self._completed = self._completed, self._completed + 1
        if self.before_agreement:
            return
        while self._next < len(self._order) and self._order[self._next].micro_steps == self._span:
            self._end_micro_step(self._order[self._next])
            self._next += 1

    def _may_pack(self, account: _Account) -> bool:
        """Say whether a gradient can go to its bucket now: one more unit must always find room after it."""
        need = account.unit.slots_in_flight
        if not need or account.in_bucket:
            return True
        return not account.spread and self._context.slots.buckets.available >= need + self._most

    def _pack(self, account: _Account, local: str, gradient: Any) -> None:
        """Hand a gradient to the runtime, which keeps it as long as it reads it: nobody else need."""
        account.unit.add_gradient(local, gradient if isinstance(gradient, RowGradients) else self._to_array(gradient))

    def _end_micro_step(self, account: _Account) -> None:
        self._skip_to(account, self._agreements * self._span)
        while account.waiting:
            self._pack(account, *account.waiting.popitem())
        account.unit.reduce()
        account.in_bucket = False
        account.reduced += 1
        account.passed += 1

    def _skip_to(self, account: _Account, micro_step: int) -> None:
        """Let a unit go on without the micro-steps in which no rank had a gradient of it."""
        while account.passed < micro_step:
            account.unit.skip_micro_step()
            account.passed += 1

    def begin_forward(self) -> None:
        """Close the micro-step before, if its bits must not mix with the next one's. Call it before each forward."""
        if self._context.leaves is not None and self._context.micro_steps > 1:
            accounts = [account for account in self._accounts.values() if account.touched]
            self._micro_step = max((account.micro_steps + bool(account.got) for account in accounts), default=0)
            with self._around():
                for account in accounts:
                    if account.micro_steps < self._micro_step:
                        self._complete(account)

    # -- around the step -------------------------------------------------------------------------------------------

    def around(self) -> AbstractContextManager[object]:
        """Return what the runtime is entered within; see `Attachment`."""
        return self._around()

    def announce(self, verb: Verb, record: Record) -> None:
        """Reduce the units of the order, and tell which this rank used, if that is not told yet; see `Attachment`."""
        held = [account.unit.name for account in self._accounts.values() if account.unit.is_held]
        if held:
            self._fail(UnitStateError(f"Expected {verb} after forward and outside gathered(), got {held} in use."))
        if not self._agrees_in_backward:
            if not self._is_agreed:
                self._tell(record)
            return
        all_drop = False
        while not (self._is_agreed or all_drop):  # who drops agrees with those that are still in a backward pass
            all_drop = self._agree(drops=verb == "discard")

    @property
    def _has_begun(self) -> bool:
        """Whether this rank has gradients that the ranks have not agreed on: others may wait for it to do so."""
        return any(account.touched for account in self._accounts.values())

    def _agree(self, *, drops: bool = False) -> bool:
        """Reduce one micro-step's gradients that are left, of all that any rank used in it. Every rank calls this.

        Returns whether all ranks drop their gradients.
        """
        record = Record()
        self._tell(record)
        record.add("drops gradients", drops, "and")
        heard = record.exchange(self._context.world, name="gradients")
        self._take_agreement()
        return bool(heard["drops gradients"][0])

    def _tell(self, record: Record) -> None:
        """Reduce what is left of the order, and add to a record what this rank used."""
        for prepare in self.before_agreement:
            prepare(self._span)
        for account in self._order[self._next :]:
            self._finish(account)
        facts = np.array([(one.touched, one.place) for one in self._accounts.values()], np.int64)
        record.add("backward passes", self._passes, "max", then=self._take_passes)
        record.add("gradients", facts.reshape(-1), "each", then=self._take_everyone)

    def _take_passes(self, most: Array) -> None:
        self._most_passes = int(most[0])

    def _take_everyone(self, everyone: Array) -> None:
        self._everyone = everyone.reshape(len(everyone), len(self._accounts), 2)

    def _take_agreement(self) -> None:
        """Reduce what any rank used, and take rank 0's order for the same micro-steps of the next step."""
        touched = self._everyone[:, :, 0].max(0, initial=0)
        for account in self._accounts.values():
            if touched[account.index] and account.reduced < self._span:
                self._finish(account)
        if touched.any():
            places = self._everyone[0, :, 1]
            self._orders[self._agreements] = sorted(
                (account for account in self._accounts.values() if touched[account.index]),
                key=lambda account: (places[account.index], -account.index),
            )
        for account in self._accounts.values():
            account.used |= bool(touched[account.index])
            account.agreed()
        self._agreements += 1
        self._next = self._completed = self._micro_step = 0

    def complete(self, verb: Verb) -> None:
        """Reduce what any rank used; refuse a step that lacks backward passes; see `Attachment`."""
        if not self._agrees_in_backward and not self._is_agreed:
            self._take_agreement()
        used = [account for account in self._accounts.values() if account.used]
        if verb == "step":
            for account in self._accounts.values():
                if account.used or account.passed:  # or it was in the order, and nobody had a gradient of it
                    self._skip_to(account, self._context.micro_steps)
        if not used:
            if verb == "step" and not self._others_reduced():
                raise UnitStateError(
                    "Expected gradients before step(), got none since the last one on any rank. Call loss.backward() "
                    "first."
                )
            return
        passes, due = self._most_passes, self._context.micro_steps
        if verb == "step" and 0 < passes < due:
            raise UnitStateError(
                f"Expected {due} backward() before step(), got {passes}: a step averages over micro_steps={due}, and "
                "the update would be as much too small. Call backward() for each of them, or drop what is there: "
                "rt.discard_gradients()."
            )

    def _others_reduced(self) -> bool:
        """Say whether units that somebody else registered have gradients; the step says what is missing of them."""
        others = (unit for unit in self._units.values() if not any(one.is_of(unit) for one in self._accounts))
        return any(unit.has_gradients for unit in others)

    def _finish(self, account: _Account) -> None:
        while account.reduced < self._span:
            self._end_micro_step(account)

    def forget(self) -> None:
        """Start the next step; see `Attachment`."""
        self._next = self._completed = self._micro_step = self._passes = self._agreements = 0
        for account in self._accounts.values():
            account.reset()
            account.unit.on_step()

    def _fail(self, error: Exception) -> None:
        self._context.complain(error)
        raise error
