"""What a framework binding may use of the engine: this module, `zerort`, `zerort.errors` and `zerort.typing`.

    binding = Binding(rt, to_array=…, stream=…)          one for each framework and runtime
    with binding.agreed("shard"): …                      checks: one rank's error is every rank's
    unit = binding.register("block0", arrays)            a `BoundUnit`; `kind=` is a class of your own
    unit.acquire(); unit.release()                       around the framework's forward; holders are counted
    binding.gradients.ready(unit, "w", gradient, …)      as soon as backward has it; reduced in one order on all ranks
    binding.attach(attachment)                           asked before each step (`Attachment`): facts, values, errors

``docs/write-a-binding.md`` builds a whole binding of this. A test holds bindings to it: no other import of zerort, no
attribute of an attribute of the runtime's (decision 0098).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from zerort.buffer import Views, gathering, unit_title
from zerort.buffer.views import stale_text
from zerort.comm.agreed import agreed
from zerort.comm.arrays import Tensors, accept_tensors
from zerort.data import Order
from zerort.engine.attachment import Attachment, Verb, complete_all, within
from zerort.engine.batches.counted import counted
from zerort.engine.batches.taking import Taking, take
from zerort.engine.model.apart import ApartGathers
from zerort.engine.model.bound_unit import BoundUnit, RowGradients, TensorPlace
from zerort.engine.model.gradients.order import GradientOrder
from zerort.engine.model.tensors import Frozen, TensorSpec
from zerort.engine.persist.packed_values import PackedValues
from zerort.engine.rows.checks import check_rows
from zerort.engine.rows.exchange import unique_rows
from zerort.engine.runtime import Runtime
from zerort.engine.step.discard import discard_gradients, forget_gradients
from zerort.engine.step.facts.rates import rate_of
from zerort.engine.step.facts.record import Record
from zerort.errors import ZerortError
from zerort.native.dtypes import BFLOAT16
from zerort.optim import ElementwiseOptimizer, Optimizer, StateSpec, check_lr
from zerort.optim.checks import check_number
from zerort.optim.kernels import kernels_for
from zerort.typing import Array

__all__ = [
    "BFLOAT16",
    "Attachment",
    "Binding",
    "BoundUnit",
    "ElementwiseOptimizer",
    "Frozen",
    "GradientOrder",
    "PackedValues",
    "Record",
    "RowGradients",
    "StateSpec",
    "Taking",
    "TensorPlace",
    "Tensors",
    "Verb",
    "Views",
    "accept_tensors",
    "attachment_of",
    "check_lr",
    "check_number",
    "gathering",
    "kernels_for",
    "samples_taken",
    "stale_text",
    "take_ahead",
    "unique_rows",
    "unit_title",
]

Kind = TypeVar("Kind", bound=BoundUnit)
Attached = TypeVar("Attached", bound=Attachment)


class Binding:
    """One framework's hold on one runtime.

    Args:
        rt: The runtime.
        to_array: Returns a tensor of the framework as an array over the same memory.
        stream: Returns what the runtime is entered within, for a framework with a current stream of its own.
        call_at_end: Has a function called when the backward pass that is under way ends; None: the framework cannot,
            and a pass ends where the next one begins, or with the step.
    """

    def __init__(
        self,
        rt: Runtime,
        *,
        to_array: Callable[[Any], Array] = lambda tensor: tensor,
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
        call_at_end: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.rt = rt
        self.stream = stream
        self.gradients = GradientOrder(rt.context, rt.units, to_array=to_array, around=stream, call_at_end=call_at_end)
        """Takes gradients as they become ready, and reduces them in one order on all ranks."""
        self.attach(self.gradients)
        self._apart = ApartGathers(rt.context, rt.units)

    # -- the runtime -----------------------------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Have an attachment asked before every step from now on. Every rank attaches the same, in the same order."""
        self.rt.attachments.append(attachment)

    def attached(self, kind: type[Attached]) -> list[Attached]:
        """Return what of class ``kind`` is attached, in order."""
        return [one for one in self.rt.attachments if isinstance(one, kind)]

    def detach(self, attachment: Attachment) -> None:
        """End an `attach`. Every rank calls this alike, between steps."""
        self.rt.attachments.remove(attachment)

    def complete_gradients(self) -> None:
        """Have all gradients of this step reduced now, before the step asks for it. Every rank calls this."""
        rt = self.rt
        with within(rt.attachments):
            try:
                complete_all(rt.world, rt.attachments, "step")
            except ZerortError:
                forget_gradients(rt.context, rt.units)  # as a step that fails does
                raise

    def clear_gradients(self) -> None:
        """Drop this step's gradients, if any rank has some; if none has, not the batch of `Runtime.join` either.

        Every rank calls this, or ``rt.discard_gradients()``.
        """
        rt = self.rt
        rt.context.check_open("clear_gradients")
        has_some = self.gradients.pending or rt.context.run.join.handed_in
        with within(rt.attachments):
            discard_gradients(rt.context, rt.units, keeps_batch=not has_some)

    def check_open(self, verb: str) -> None:
        """Raise `ClosedError` for ``verb`` if the runtime is closed."""
        self.rt.context.check_open(verb)

    def agreed(self, name: str, *, catching: type[Exception] = Exception) -> AbstractContextManager[None]:
        """Return a block without collectives in which an error on one rank is raised on every rank, at its end."""
        return agreed(self.rt.world, name, catching=catching)

    def complain(self, error: Exception) -> None:
        """Tell the other ranks of an error that this rank is about to raise alone: their next collective raises it."""
        self.rt.complain(error)

    @property
    def own_micro_batches(self) -> int:
        """How many of this rank's micro-batches of this step are its own: `Runtime.join` repeats the others."""
        return sum(counted(self.rt.context))

    # -- units -----------------------------------------------------------------------------------------------------

    def expect(
        self,
        units: Mapping[str, Mapping[str, TensorSpec]],
        *,
        frozen: Mapping[str, Frozen],
        rows: Mapping[str, Sequence[str]] | None = None,
        lazy: bool = False,
    ) -> None:
        """Announce all units before the first is registered; see `Runtime.expect`. Without a budget nothing happens."""
        if self.rt.context.budget is not None:
            self.rt.expect(units, frozen=frozen, rows=rows, lazy=lazy)

    def check_rows(self, name: str, tables: Mapping[str, TensorSpec], *, lazy: bool = False) -> None:
        """Refuse tables that cannot be registered with ``rows=``, before anything is. No communication.

        Args:
            name: Of the unit.
            tables: What they are, by local name.
            lazy: As in `register`.

        Raises:
            CallError: A table, or its optimizer, cannot.
            PlanError: The plan, or an option of the runtime, cannot.
        """
        check_rows(self.rt.context.row_settings, name, tuple(tables), tables, frozen=(), shared=(), lazy=lazy)

    def register(
        self,
        name: str,
        params: Mapping[str, Array | TensorSpec],
        *,
        frozen: Frozen = False,
        broadcast: bool = False,
        rows: Sequence[str] = (),
        lazy: bool = False,
        make: Callable[..., Kind] = BoundUnit,  # type: ignore[assignment]
    ) -> Kind:
        """Hand a unit's parameters to the runtime; see `Runtime.register`. Every rank calls this.

        Args:
            name: What it is called.
            params: Arrays by name; none for modules all of whose parameters are tied to other units.
            frozen: Which take no gradient.
            broadcast: Take rank 0's values.
            rows: Tables of which `BoundUnit.gather_rows` brings some rows, and whose gradients are `RowGradients`.
            lazy: Rows without a gradient stay as they are.
            make: Makes the result: a class of the binding's own, derived from `BoundUnit`, which takes
                ``(unit, name=, around=)``.
        """
        with self.stream():
            unit = None
            if params:
                unit = self.rt.register(name, params, frozen=frozen, broadcast=broadcast, rows=rows, lazy=lazy)
            made = make(unit, name=name, around=self.stream)
            if unit is not None:
                self._apart.add_unit(unit)
                made.apart = self._apart
            return made

    # -- values beside units ---------------------------------------------------------------------------------------

    def packed(self, arrays: Mapping[str, Array]) -> PackedValues:
        """Return arrays of the host by name in the form that a checkpoint holds, for `Attachment.values`."""
        return PackedValues(arrays, self.rt.mesh.shard)

    # -- learning rates --------------------------------------------------------------------------------------------

    def rate_of(self, settings: Optimizer) -> float:
        """Return the learning rate of the next update for the tensors with these settings."""
        return rate_of(self.rt.context, settings, update=self.rt.updates + 1)

    def set_rate(self, settings: Optimizer, rate: float) -> None:
        """Update tensors with these settings at ``rate`` from now on. Every rank calls this with the same one."""
        self.rt.context.run.lr_overrides[id(settings)] = rate


def attachment_of(rt: Runtime, kind: type[Attached], make: Callable[[Runtime], Attached]) -> Attached:
    """Return the runtime's attachment of class ``kind``; the first call makes it, and attaches it."""
    for one in rt.attachments:
        if isinstance(one, kind):
            return one
    made = make(rt)
    rt.attachments.append(made)
    return made


def take_ahead(rt: Runtime, order: Order, *, epochs: int | None, shares: Sequence[float] | None) -> Taking:
    """Return a loop over an order for a loader that pulls batches before they are used; see `Runtime.take`."""
    taking = take(rt.context, order, epochs=epochs, shares=shares, runs_ahead=True)
    if rt.context.peaks is not None:
        from zerort.engine.sizing.predicting import warn_unless_fits  # here: few runs need it

        warn_unless_fits(rt.context, rt.units, batch=taking.batch / rt.micro_steps)
    return taking


def samples_taken(rt: Runtime, order: Order) -> int:
    """Return how many samples of an order the runtime's steps have used."""
    return rt.context.run.cursors[order.name].taken
