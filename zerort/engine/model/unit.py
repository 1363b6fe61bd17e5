"""`Unit`: parameters that are gathered and released together, and whose gradients are reduced together.

    RELEASED ── gather ──> GATHERED ── release ──> RELEASED            parameters
    EMPTY ── contribute … reduce ──> REDUCED ── step ──> EMPTY       gradients, once per micro-step

A verb in the wrong state raises `UnitStateError` with the verb that comes first. An error that one rank alone makes is
told to the others, who raise it at their next collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final, NoReturn

import numpy as np

from zerort import trace
from zerort.buffer import Views, gathering, unit_title
from zerort.device import Ticket, joined
from zerort.engine.context import Context
from zerort.engine.model.assignment import Place, assign_values
from zerort.engine.model.gather import GatheredForm
from zerort.engine.model.section import Section
from zerort.engine.model.tensors import check_gradient
from zerort.errors import CallError, UnitStateError
from zerort.typing import Array

__all__ = ["Unit"]

RELEASED, GATHERED = "RELEASED", "GATHERED"

# What a verb needs, where it leads, and what to do if the unit is elsewhere.
_MOVES: Final = {
    "gather": (RELEASED, GATHERED, "Release it first: leave its `with unit.gathered():` block."),
    "release": (GATHERED, RELEASED, "Gather it first: `with unit.gathered():`."),
}


class Unit:
    """Parameters that are gathered and released together. Made by `Runtime.register`.

    Args:
        context: What the runtime's parts share.
        name: Unique in the runtime.
        sections: Its tensors, by dtype and trainability.
        places: Where each of its names lies: (unit that holds it, full name).
    """

    def __init__(
        self, context: Context, name: str, *, sections: tuple[Section, ...], places: dict[str, tuple[Unit | None, str]]
    ) -> None:
        self._context = context
        self.name = name
        self.sections = sections
        self._section_of = {extent.name: section for section in sections for extent in section.layout.extents}
        self._places: dict[str, tuple[Unit, str]] = {
            local: (home or self, full) for local, (home, full) in places.items()
        }
        self._tied_owners = tuple({id(unit): unit for unit, _ in self._places.values() if unit is not self}.values())
        self._sources = 1  # units whose gradients end up here: itself, and those that are tied to it
        self._state = RELEASED
        self.form = GatheredForm(context, name, sections)
        """Its gathered form."""
        self._views: Views | None = None
        self._turns = 0  # calls of reduce since the last step, of all sources
        self._contributed: set[str] = set()  # in this micro-step, one by one

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, tied ones included."""
        return tuple(self._places)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of its parameters that take gradients, tied ones included."""
        return tuple(name for name, (home, full) in self._places.items() if home._section_of[full].bucket is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of its gathered form."""
        return sum(section.layout.nbytes for section in self.sections)

    @property
    def tied_owner_count(self) -> int:
        """How many other units hold parameters that are tied to this one's."""
        return len(self._tied_owners)

    def place_of(self, name: str) -> tuple[Unit, str]:
        """Return the unit that holds a parameter of this one, and its full name."""
        return self._places[name]

    # -- gathering -------------------------------------------------------------------------------------------------

    def gather(self) -> Ticket[Views]:
        """Start to bring the whole unit here and return the Ticket of its tensors. Every rank calls this."""
        self._move("gather")
        self._context.prefetcher.note(self.name)
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_state", RELEASED)
            for unit in (*self._tied_owners, self):
                unit.form.acquire()
                undo.callback(unit.form.release)
            undo.pop_all()
        views = Views(
            self.name,
            {local: home._section_of[full].parameters.view(full) for local, (home, full) in self._places.items()},
        )
        self._views = views
        arrivals = [unit.form.fetched for unit in (*self._tied_owners, self) if unit.form.fetched is not None]
        self._context.prefetcher.fetch()
        return joined(arrivals, result=views)

    def release(self) -> None:
        """Let the gathered form go. Views of it raise `StaleViewError` from now on."""
        self._move("release")
        if self._views is not None:
            self._views.expire()
            self._views = None
        for unit in (self, *self._tied_owners):
            unit.form.release()

    @gathering
    def gathered(self) -> Iterator[Views]:
        """Gather the unit for the length of a ``with`` block, which gets its tensors by name: read-only, not copied."""
        ticket = self.gather()
        try:
            with self._context.ledger.stall("gather"):
                views = self._context.device.order_after(ticket)  # gpu-wait: no_order_of_streams_changes_a_walk
            with trace.span(f"compute {self.name}"):
                yield views
        finally:
            self.release()

    def assign(self, values: Mapping[str, Array], *, broadcast: bool = False) -> None:
        """Set parameters by name, master weights included. Every rank calls this between steps; see `assign_values`."""
        places = {
            local: Place(home.name, home._section_of[full], full, is_gathered=home.is_gathered)
            for local, (home, full) in self._places.items()
        }
        assign_values(self._context, self.name, places, values, broadcast=broadcast)

    # -- gradients -------------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Array]:
        """Return writable arrays for this micro-step's gradients, where they are collected: nothing is copied later.

        Write all of them, then call `reduce` without arguments. Their values are undefined until written.
        """
        if self._tied_owners or self._sources > 1:
            self._fail(
                UnitStateError(
                    f"Expected gradients() of a unit without ties, got {unit_title(self.name)}. Use reduce()."
                )
            )
        self._expect_room_for_gradients()
        found = {}
        for section in self.sections:
            if section.bucket is not None:
                found.update(section.bucket.views())
        return {local: found[full] for local, (_, full) in self._places.items() if full in found}

    def contribute(self, name: str, gradient: Array) -> None:
        """Add one tensor's gradient to this micro-step; the unit is reduced when all of its tensors have theirs."""
        self.add(name, gradient)
        self._contributed.add(name)
        if self._contributed.issuperset(self.trainable):
            self.reduce()

    def reduce(self, gradients: Mapping[str, Array] | None = None) -> None:
        """End this micro-step: sum the unit's gradients over the ranks, once the last micro-step is there.

        Returns at once; the sum is made while the caller computes on. Tensors without a gradient count as zero, and if
        no rank has one, they and their state stay as they are.

        Args:
            gradients: By name; None or some of them if others came by `gradients` or `contribute`.
        """
        self._expect_room_for_gradients()
        if not isinstance(gradients, (Mapping, type(None))):
            self._fail(CallError(f"Expected gradients by name, as a mapping; got {type(gradients).__name__}."))
        with trace.span(f"pack {self.name}"):
            for name, gradient in (gradients or {}).items():
                self.add(name, gradient)
        self._contributed.clear()
        for unit in (self, *self._tied_owners):
            unit._end_turn()

    def add(self, name: str, gradient: Array, *, donate: bool = False) -> None:
        """Add one tensor's gradient to this micro-step, which `reduce` ends; one that comes twice is summed.

        Args:
            name: Whose it is.
            gradient: The whole of it.
            donate: The array is the runtime's from now on, which may use it where it lies instead of copying it.
        """
        home, full = self._places.get(name, (None, ""))
        if home is None:
            self._fail(
                CallError(
                    f"Expected one of {', '.join(map(repr, self._places))} of {unit_title(self.name)}; got {name!r}."
                )
            )
        section = home._section_of[full]
        if section.bucket is None:
            self._fail(
                CallError(
                    f"Expected gradients of trainable tensors, got one of {name!r} ({unit_title(self.name)}), which is "
                    "frozen. Leave it out, or register it without frozen=."
                )
            )
        home._expect_room_for_gradients()
        gradient = np.asarray(gradient) if isinstance(gradient, np.generic) else gradient  # of a scalar parameter
        try:
            check_gradient(
                self.name,
                name,
                gradient,
                shape=section.layout.of(full).shape,
                dtypes=section.gradient_dtypes,
                device=self._context.device,
            )
            section.bucket.add(full, gradient, donate=donate)
        except Exception as error:
            self._fail(error)

    def _expect_room_for_gradients(self) -> None:
        if self._turns >= self._context.micro_steps * self._sources:
            self._fail(
                UnitStateError(
                    f"Expected at most {self._context.micro_steps} reduce() of {unit_title(self.name)} per step, got "
                    "one more. Call rt.step() first, or open the runtime with micro_steps=."
                )
            )

    def _end_turn(self) -> None:
        """Count one source's gradients; close the micro-step when all sources' are in, and fire with the last."""
        self._turns += 1
        if self._turns % self._sources:
            return
        last = self._turns == self._context.micro_steps * self._sources
        for section in self.sections:
            if section.bucket is not None:
                section.bucket.end_round()
                if last:
                    with trace.span(f"reduce {self.name}"):
                        section.bucket.fire()
        if last:
            self._context.tiers.prefetch_update()

    def join_tied_owners(self) -> None:
        """Let the units that hold tied parameters wait for this one's gradients, too. Every rank calls this."""
        for owner in self._tied_owners:
            owner._sources += 1
            for section in owner.sections:
                if section.bucket is not None:
                    section.make_bucket(resident=True)

    # -- the step --------------------------------------------------------------------------------------------------

    @property
    def gradient_trouble(self) -> str:
        """What is missing of this step's gradients, as a sentence; empty if nothing is, or if there are none at all."""
        turns, due = self._turns, self._context.micro_steps * self._sources
        if turns in (0, due):
            if not any(section.bucket.filling for section in self.sections if section.bucket is not None):
                return ""
            return f"Expected reduce() of {unit_title(self.name)} after its gradients were handed in, got step()."
        return (
            f"Expected {due} reduce() of {unit_title(self.name)} before step(), got {turns}. "
            "Reduce every micro-step, and every unit that is tied to it."
        )

    @property
    def reduced(self) -> bool:
        """Whether this step's gradients are on their way."""
        return self._turns == self._context.micro_steps * self._sources

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were handed in since the last step."""
        return self._turns > 0

    @property
    def is_gathered(self) -> bool:
        """Whether somebody is inside its `gathered`."""
        return self._state == GATHERED

    def forget_gradients(self) -> None:
        """Start anew after a step, done or not."""
        self._turns = 0
        self._contributed.clear()
        for section in self.sections:
            if section.bucket is not None:
                section.bucket.reset()

    def withdraw(self) -> None:
        """Close a unit that could not be registered: what it has put into a store goes, too."""
        for section in self.sections:
            section.withdraw()

    def close(self) -> None:
        """Give the memory back."""
        if self._views is not None:
            self._views.expire()
        self.form.close()
        for section in self.sections:
            section.close()

    def _move(self, verb: str) -> None:
        self._context.check_open(verb)
        if verb == "gather":
            self._context.tiers.check_whole(verb)
        needs, leads, cure = _MOVES[verb]
        if self._state != needs:
            title = unit_title(self.name)
            self._fail(UnitStateError(f"{title[0].upper()}{title[1:]} cannot {verb}: it is {self._state}. {cure}"))
        self._state = leads

    def _fail(self, error: Exception) -> NoReturn:
        """Raise here, and let the other ranks raise, too."""
        self._context.complain(error)
        raise error

    def __repr__(self) -> str:
        numel = sum(int(np.prod(e.shape)) for section in self.sections for e in section.layout.extents)
        return f"Unit({self.name!r}, {self._state}, {numel:,} parameters)"
