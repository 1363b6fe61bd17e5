"""`UnitGradients`: a unit's gradients from backward to the step: handed in, counted by micro-step, reduced.

    EMPTY ── contribute … reduce ──> REDUCED ── step ──> EMPTY       once per micro-step

A unit's gradients of tied tensors are summed with those of the unit that holds them: a unit is reduced when all that
contribute to it are. An error that one rank alone makes is told to the others, who raise it at their next collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from zerort import trace
from zerort.buffer import GradientBucket, unit_title
from zerort.engine.context import Context
from zerort.engine.model.gradients.reduced import reduced_gradients
from zerort.engine.model.section import Section
from zerort.engine.model.tensors import check_gradient
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.rows.bucket import RowBucket
from zerort.engine.rows.checks import check_gradient_rows
from zerort.engine.rows.section import RowSection
from zerort.errors import CallError, UnitStateError
from zerort.typing import Array

__all__ = ["UnitGradients"]


class UnitGradients:
    """The gradients of parameters that are reduced together; `Unit` gathers and releases the parameters.

    Args:
        context: What the runtime's parts share.
        name: Of the unit.
        sections: Its tensors, by dtype and trainability.
        places: Where each of its names lies: (unit that holds it, full name); None: in this one.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        *,
        sections: tuple[Section, ...],
        places: Mapping[str, tuple[UnitGradients | None, str]],
    ) -> None:
        self._context = context
        self.name = name
        self.sections = sections
        self._section_of = {extent.name: section for section in sections for extent in section.layout.extents}
        self._places: Mapping[str, tuple[UnitGradients, str]] = {
            local: (home or self, full) for local, (home, full) in places.items()
        }
        self.tied_owners: tuple[UnitGradients, ...] = tuple(
            {id(unit): unit for unit, _ in self._places.values() if unit is not self}.values()
        )
        """Units that hold parameters of this one: gathered and released with it."""
        self.tied_tensors = {
            full: home
            for home, full in self._places.values()
            if home is not self and home._section_of[full].bucket is not None
        }
        """Trainable tensors that others hold: their full names, and those units."""
        self._reduced_with = (self, *dict.fromkeys(self.tied_tensors.values()))
        self._contributors = [self]  # units whose gradients end up here: itself, and those that are tied to it
        self._tied_buckets: dict[str, GradientBucket] = {}  # by full name, for gradients that are reduced elsewhere
        self._tables = {
            local: section
            for local, (home, full) in self._places.items()
            if home is self and isinstance(section := self._section_of[full], RowSection)
        }
        self._reduce_calls = 0  # calls of reduce since the last step
        self._contributed: set[str] = set()  # in this micro-step, one by one
        self._has_views = False  # of this micro-step's gradients

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of its parameters that take gradients, tied ones included."""
        return tuple(name for name, (home, full) in self._places.items() if home._section_of[full].bucket is not None)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its parameters of which rows are gathered and reduced."""
        return tuple(self._tables)

    def gradients(self) -> dict[str, Array]:
        """Return writable arrays for this micro-step's gradients, where they are collected: nothing is copied later.

        Write all of them, then call `reduce` without arguments. Their values are undefined until written.
        """
        if self.tied_owners or len(self._contributors) > 1:
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
        self._has_views = True
        return {local: found[full] for local, (_, full) in self._places.items() if full in found}

    def contribute(self, name: str, gradient: Array) -> None:
        """Add one tensor's gradient to this micro-step; the unit is reduced when all of its tensors have theirs."""
        self.add(name, gradient)
        self._contributed.add(name)
        if self._contributed.issuperset(self.trainable):
            self.reduce()

    def reduce(
        self, gradients: Mapping[str, Array] | None = None, *, rows: Mapping[str, tuple[Any, Array]] | None = None
    ) -> None:
        """End this micro-step: sum the unit's gradients over the ranks, now or with the last (`accumulate`).

        Returns at once; the sum is made while the caller computes on. Tensors without a gradient count as zero, and if
        no rank has one, they and their state stay as they are.

        Args:
            gradients: By name; None or some of them if others came by `gradients` or `contribute`.
            rows: Of tables that were registered so, by name: ``(indices, values)``, a row of values for each index,
                indices on the host and values where the runtime computes. Of a row that is named twice, they are
                summed.
        """
        self._expect_room_for_gradients()
        if not isinstance(gradients, (Mapping, type(None))):
            self._fail(CallError(f"Expected gradients by name, as a mapping; got {type(gradients).__name__}."))
        if not isinstance(rows, (Mapping, type(None))):
            self._fail(CallError(f"Expected rows by name, as a mapping; got {type(rows).__name__}."))
        with trace.span(f"pack {self.name}"):
            for name, gradient in (gradients or {}).items():
                self.add(name, gradient)
            if rows:
                self.add_rows(rows)
        self._contributed.clear()
        self._reduce_calls += 1
        own = [section.bucket for section in self.sections if section.bucket is not None]
        if not self._context.keeps_whole_gradients:
            self._end_micro_step([*self._tied_buckets.values(), *own], fires=True)
        for unit in self._reduced_with:
            unit._count_reduce()

    def add_rows(self, rows: Mapping[str, tuple[Any, Array]], *, late: bool = False) -> None:
        """Add gradients of rows to this micro-step, which `reduce` ends; of rows that come twice, they are summed.

        Args:
            rows: As in `reduce`.
            late: As in `add`.
        """
        self._expect_room_for_gradients()
        try:
            for name in rows:
                if name not in self._tables:
                    known = ", ".join(map(repr, self._tables)) or "none"
                    raise CallError(
                        f"Expected rows of a table of {unit_title(self.name)} ({known}), got {name!r}. Declare tables "
                        "when they are registered: rt.register(…, rows=(name,))."
                    )
                section = self._tables[name]
                shape = section.layout.extents[0].shape
                indices, values = check_gradient_rows(
                    self.name,
                    name,
                    rows[name],
                    shape=shape,
                    dtypes=section.gradient_dtypes,
                    device=self._context.device,
                )
                if late or not self._context.run.join.drops():
                    section.add_rows(indices, values)
        except Exception as error:
            self._fail(error)

    def skip_micro_step(self) -> None:
        """End a micro-step in which no rank has a gradient of this unit: nothing moves. Every rank calls this.

        Of a unit with ties, and with ``virtual_shards``, zeros are reduced: other units' gradients are added to its
        own, and what is added to what must not depend on the ranks.
        """
        self._expect_room_for_gradients()
        if self._context.leaves is not None or len(self._contributors) > 1 or self.tied_tensors:
            self.reduce()
        else:
            self._reduce_calls += 1

    def add(self, name: str, gradient: Array, *, donate: bool = False, late: bool = False) -> None:
        """Add one tensor's gradient to this micro-step, which `reduce` ends; one that comes twice is summed.

        Args:
            name: Whose it is.
            gradient: The whole of it.
            donate: The array is the runtime's from now on, which may use it where it lies instead of copying it.
            late: It is of a batch of this rank's own, whatever batch is computed now; see `JoinState.drops`.
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
        self._expect_room_for_gradients()
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
            if late or not self._context.run.join.drops():
                with self._context.ledger.waiting():
                    bucket = section.bucket if home is self else self._tied_buckets.get(full, section.bucket)
                    bucket.add(full, gradient, donate=donate)
        except Exception as error:
            self._fail(error)

    def _expect_room_for_gradients(self) -> None:
        if self._reduce_calls >= self._context.micro_steps:
            self._fail(
                UnitStateError(
                    f"Expected at most {self._context.micro_steps} reduce() of {unit_title(self.name)} per step, got "
                    "one more. Call rt.step() first, or open the runtime with micro_steps=."
                )
            )

    def _end_micro_step(self, buckets: Sequence[GradientBucket | RowBucket], *, fires: bool) -> None:
        """Close this micro-step in some buckets, and start to reduce them."""
        drops = self._context.run.join.drops() and self._has_views
        self._has_views = False
        for bucket in buckets:
            if drops:
                bucket.drop_micro_step()
            bucket.end_micro_step()
            if fires:
                with trace.span(f"reduce {self.name}"), self._context.ledger.waiting():
                    bucket.fire()

    def _count_reduce(self) -> None:
        """Count a micro-step of this unit, or of one that is tied to it, and start what follows the last of all.

        Where gradients are whole, those of all of these units are summed in one bucket, which is closed and reduced
        when the last of them is there.
        """
        turns = sum(unit._reduce_calls for unit in self._contributors)
        buckets = [section.bucket for section in self.sections if section.bucket is not None]
        if self._context.keeps_whole_gradients and turns % len(self._contributors) == 0:
            self._end_micro_step(buckets, fires=self.reduced)
        if self.reduced:
            for bucket in buckets:
                with self._context.ledger.waiting():
                    bucket.end_step()
            self._context.update_stream.prefetch()

    def reduced_gradients(self) -> dict[str, Array]:
        """Return this step's gradients, summed over the ranks. Every rank calls this before the step.

        Divided by `Runtime.micro_batch_count`, which is ranks × micro-steps or ``virtual_shards`` (``reduction="sum"``:
        by nothing), and by the loss scale; before clipping. With ``weight=`` the step divides by the weight instead,
        which is not known yet; in a loop of `Runtime.join`, by the number of micro-batches that are not repeated.
        Whole, in new arrays of the host; zeros where no rank had a gradient.
        """
        found: dict[str, Array] = {}
        for unit in self._reduced_with:
            if not unit.reduced:
                self._fail(
                    UnitStateError(
                        f"Expected every reduce() of {unit_title(unit.name)} before reduced_gradients(), got "
                        f"{sum(one._reduce_calls for one in unit._contributors)} of "
                        f"{self._context.micro_steps * len(unit._contributors)}."
                    )
                )
            for section in unit.sections:
                if section.bucket is not None:
                    found |= reduced_gradients(self._context, section)
        return {local: found[full] for local, (_, full) in self._places.items() if full in found}

    def reserve_for_ties(self) -> None:
        """See to it that gradients of tied parameters find room where they are summed. Every rank calls this."""
        for full, home in self.tied_tensors.items():
            home._section_of[full].reserve_for_ties()

    def section_of(self, full: str) -> Section:
        """Return the section of a tensor that this unit holds, given its full name."""
        return self._section_of[full]

    def join_tied_owners(self, arrays: Mapping[str, Sequence[ChunkedArray]]) -> None:
        """Have this unit's gradients of tied parameters summed with those of the units that hold them. All ranks do.

        Args:
            arrays: What they are summed in, by full name, where that is not in memory.
        """
        for owner in self._reduced_with[1:]:
            owner._contributors.append(self)
        if not self._context.keeps_whole_gradients:
            for full, home in self.tied_tensors.items():
                self._tied_buckets[full] = home._section_of[full].add_tied_bucket(full, arrays.get(full, ()))

    # -- the step --------------------------------------------------------------------------------------------------

    @property
    def gradient_trouble(self) -> str:
        """What is missing of this step's gradients, as a sentence; empty if nothing is, or if there are none at all."""
        due = self._context.micro_steps
        lacking = [unit for unit in self._contributors if unit._reduce_calls < due]
        if self.reduced or not self.has_gradients:
            if not any(bucket.filling for section in self.sections for bucket in section.buckets):
                return ""
            return f"Expected reduce() of {unit_title(self.name)} after its gradients were handed in, got step()."
        title = unit_title(lacking[0].name) + f", which is tied to {unit_title(self.name)}," * (lacking[0] is not self)
        return (
            f"Expected {due} reduce() of {title} before step(), got {lacking[0]._reduce_calls}. "
            "Reduce every micro-step, and every unit that is tied to it, or drop what is there: rt.discard_gradients()."
        )

    @property
    def reduced(self) -> bool:
        """Whether this step's gradients are on their way."""
        return all(unit._reduce_calls == self._context.micro_steps for unit in self._contributors)

    @property
    def calls(self) -> tuple[int, int]:
        """How often this step's gradients have called the ranks of one copy of the model, and the copies, at most."""
        own = [one.bucket for one in self.sections if one.bucket is not None and one.bucket.fires]
        over = sum(bucket.fires_over_copies for bucket in own) * self.reduced
        if self._context.keeps_whole_gradients:
            return sum(bucket.calls for bucket in own) * self.reduced, over
        return (sum(bucket.calls for bucket in own) + len(self._tied_buckets)) * self._reduce_calls, over

    @property
    def lacks_micro_steps(self) -> bool:
        """Whether other ranks may wait for a micro-step that this one has not reduced."""
        return not self._context.keeps_whole_gradients and self.has_gradients and not self.reduced

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were handed in since the last step, of this unit or of one that is tied to it."""
        return any(unit._reduce_calls for unit in self._contributors)

    def forget_gradients(self) -> None:
        """Start anew after a step, done or not."""
        self._reduce_calls = 0
        self._contributed.clear()
        for section in self.sections:
            for bucket in section.buckets:
                bucket.reset()

    def _fail(self, error: Exception) -> NoReturn:
        """Raise here, and let the other ranks raise, too."""
        self._context.complain(error)
        raise error
