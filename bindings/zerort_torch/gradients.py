"""`Gradients`: from parameters whose gradient is ready to reductions that all ranks issue in one order.

    ready      a gradient is packed into its unit's bucket, or waits for it, and leaves the parameter
    complete   all of a unit's gradients are there: the unit is reduced, when those before it in the order are
    before the step   what is not complete is reduced with what it has; units that slept are asked for on all ranks

The order is the same on every rank and holds the units that any rank used in the last step; so a rank that did not use
one reduces zeros for it, and one that nobody used costs nothing. It is the order in which rank 0 completed them
(decision 0084).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from zerort.buffer import unit_title
from zerort.engine import Attachment, Runtime
from zerort.errors import UnitStateError
from zerort_torch.memory import as_array, on_torchs_stream
from zerort_torch.unit import TorchUnit

__all__ = ["Gradients", "gradients_of"]

_LATE = 2**31  # the place in the order of what rank 0 did not complete


@dataclass(eq=False, slots=True)
class _Account:
    """What a unit has of this step's gradients."""

    unit: TorchUnit
    spread: bool
    """Whether its gradients come from all over the backward pass: it then takes no bucket before it is complete."""
    index: int
    got: set[str] = field(default_factory=set)
    """Names that have their gradient in this micro-step."""
    waiting: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients that are not packed yet."""
    in_bucket: bool = False
    rounds: int = 0
    """Micro-steps that are complete."""
    ended: int = 0
    """Micro-steps that were handed to the runtime."""
    touched: bool = False
    """Whether it had any gradient in this step."""
    place: int = _LATE
    """When it was complete, counted from 0."""

    def reset(self) -> None:
        self.got.clear()
        self.waiting.clear()
        self.in_bucket = self.touched = False
        self.rounds = self.ended = 0
        self.place = _LATE


class Gradients(Attachment):
    """The gradients of all sharded models of one runtime."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._accounts: list[_Account] = []
        self._order: list[_Account] = []
        self._next = 0  # which of the order is to be reduced next
        self._completed = 0
        self._most = 1  # buckets that the widest unit takes at once
        self._backward = -1  # number of the backward pass that is under way, or was the last
        self._backwards = 0  # how many there were since the last step; counted where a step has several
        self._warned = False

    def add_unit(self, unit: TorchUnit, *, spread: bool) -> None:
        """Take gradients of ``unit`` from now on; every rank adds the same ones, between steps."""
        if not unit.trained:
            return
        account = _Account(unit, spread, len(self._accounts))
        self._accounts.append(account)
        self._order.insert(0, account)  # backward goes from the last to the first
        self._most = max(self._most, self._buckets(account))
        for local, weight in unit.trained.items():
            weight.resting.on_gradient = self._on_gradient
            weight.live.register_post_accumulate_grad_hook(self._hook(account, local))

    @property
    def units(self) -> list[TorchUnit]:
        """The units whose gradients it takes, in the order in which they came."""
        return [account.unit for account in self._accounts]

    @property
    def pending(self) -> bool:
        """Whether this rank had a gradient since the last step."""
        return any(account.touched for account in self._accounts)

    def _hook(self, account: _Account, local: str) -> Callable[[torch.Tensor], None]:
        counts = self._rt.micro_steps > 1

        def ready(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if counts and (number := torch._C._current_graph_task_id()) != self._backward:
                self._backward, self._backwards = number, self._backwards + 1
            with self.around():
                self._take(account, local, gradient)

        return ready

    # -- during backward -------------------------------------------------------------------------------------------

    def _take(self, account: _Account, local: str, gradient: torch.Tensor) -> None:
        if account.rounds >= self._rt.micro_steps:
            error = UnitStateError(
                f"Expected at most {self._rt.micro_steps} backward() through {unit_title(account.unit.name)} per step, "
                "got one more. A step averages over ranks and micro-steps, one backward() each: add up the losses of "
                "one and call backward() once; call rt.step() first, or open the runtime with micro_steps=."
            )
            self._rt.complain(error)
            raise error
        account.touched = True
        if self._may_pack(account):
            account.in_bucket = True
            self._pack(account, local, gradient)
        elif local in account.waiting:
            account.waiting[local] = account.waiting[local] + gradient
        else:
            account.waiting[local] = gradient
        account.got.add(local)
        if len(account.got) == len(account.unit.trained):
            self._complete(account)

    def _complete(self, account: _Account) -> None:
        account.got.clear()
        account.unit.end_stay()
        account.rounds += 1
        if account.rounds < self._rt.micro_steps:
            self._end_round(account)
            return
        account.place, self._completed = self._completed, self._completed + 1
        while self._next < len(self._order) and self._order[self._next].rounds == self._rt.micro_steps:
            self._end_round(self._order[self._next])
            self._next += 1

    def _may_pack(self, account: _Account) -> bool:
        """Say whether a gradient can go to its bucket now: one more unit must always find room after it."""
        need = self._buckets(account)
        if not need or account.in_bucket:
            return True
        return not account.spread and self._rt.context.slots.buckets.available >= need + self._most

    def _pack(self, account: _Account, local: str, gradient: torch.Tensor) -> None:
        """Hand a gradient to the runtime, which keeps it as long as it reads it: nobody else need."""
        assert account.unit.unit is not None
        account.unit.unit.add(local, as_array(gradient, self._rt.device), donate=True)

    def _end_round(self, account: _Account) -> None:
        assert account.unit.unit is not None
        while account.waiting:
            local, gradient = account.waiting.popitem()
            self._pack(account, local, gradient)
        account.unit.unit.reduce()
        account.in_bucket = False
        account.ended += 1

    def _buckets(self, account: _Account) -> int:
        assert account.unit.unit is not None
        buckets = [section.bucket for section in account.unit.unit.sections]
        return sum(bucket is not None and bucket.leaves_slots_busy for bucket in buckets)

    def begin_forward(self) -> None:
        """Close the micro-step before, if its bits must not mix with the next one's."""
        if self._rt.context.options.deterministic and self._rt.micro_steps > 1:
            latest = max((account.rounds + bool(account.got) for account in self._accounts), default=0)
            with self.around():
                for account in self._accounts:
                    if account.rounds < latest:
                        self._complete(account)

    def _on_gradient(self) -> None:
        """Warn somebody who looks for a gradient that has gone into the sum."""
        if self._warned or not self.pending:
            return
        self._warned = True
        warnings.warn(
            "The gradients of a sharded model were looked at, or cleared, between backward() and rt.step(): .grad is "
            "None there, and the step will use them. To clip them: zr.open(clip_norm=…), not clip_grad_norm_; their "
            "norm: rt.step().grad_norm; to drop them: rt.discard_gradients(), not zero_grad().",
            RuntimeWarning,
            stacklevel=4,
        )

    # -- around the step -------------------------------------------------------------------------------------------

    def around(self) -> AbstractContextManager[None]:
        """Return what the runtime is entered within; see `zerort.engine.Attachment`."""
        return on_torchs_stream(self._rt.device)

    def complete(self, verb: Literal["step", "discard"]) -> None:
        """Reduce what is left, alike on every rank; see `zerort.engine.Attachment`."""
        held = [account.unit.name for account in self._accounts if account.unit.is_held]
        if held:
            error = UnitStateError(f"Expected {verb} after forward and outside zt.gathered(), got {held} in use.")
            self._rt.complain(error)
            raise error
        for account in self._order[self._next :]:
            self._finish(account)
        facts = [fact for account in self._accounts for fact in (account.touched, account.place)]
        told = self._rt.world.all_gather(np.array([self._backwards, *facts], np.int64), name="gradients").wait()
        told = told.reshape(self._rt.size, -1)
        everyone = told[:, 1:].reshape(self._rt.size, len(self._accounts), 2)
        used = everyone[:, :, 0].max(0, initial=0)
        for account in self._accounts:
            if used[account.index] and account.ended == 0:
                self._finish(account)
        mine = {account.unit.unit for account in self._accounts}
        others = any(unit.reduced for unit in self._rt.units.values() if unit not in mine)
        if verb == "step" and not used.any() and not others:
            raise UnitStateError(
                "Expected gradients before step(), got none since the last one on any rank. Call loss.backward() first."
            )
        if not used.any():
            return
        backwards = int(told[:, 0].max())
        if verb == "step" and 0 < backwards < self._rt.micro_steps:
            raise UnitStateError(
                f"Expected {self._rt.micro_steps} backward() before step(), got {backwards}: a step averages over "
                f"micro_steps={self._rt.micro_steps}, and the update would be as much too small. Call backward() for "
                "each of them, or drop what is there: rt.discard_gradients()."
            )
        places = everyone[0, :, 1]
        self._order = sorted(
            (account for account in self._accounts if used[account.index]),
            key=lambda account: (places[account.index], -account.index),
        )

    def _finish(self, account: _Account) -> None:
        while account.ended < self._rt.micro_steps:
            self._end_round(account)

    def forget(self) -> None:
        """Start the next step; see `zerort.engine.Attachment`."""
        self._next = self._completed = self._backwards = 0
        self._warned = False
        for account in self._accounts:
            account.reset()
            account.unit.mark_changed()


def gradients_of(rt: Runtime) -> Gradients:
    """Return what collects the gradients of ``rt``'s sharded models; made and attached at the first call."""
    for one in rt.attachments:
        if isinstance(one, Gradients):
            return one
    made = Gradients(rt)
    rt.attachments.append(made)
    return made
