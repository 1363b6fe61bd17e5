"""`BoundUnit`: a unit as a framework uses it: acquired by as many holders as there are, with the units tied to it.

    RELEASED ── acquire: bring() ──> GATHERED ── acquire … release ──> GATHERED ── release: drop() ──> RELEASED

The first `acquire` brings the parameters, the last `release` drops them; between them holders are only counted, here
and nowhere else. A framework's class overrides `bring` and `drop` to put its own tensors over the arrays of `parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from zerort.engine.model.apart import ApartGathers
from zerort.engine.model.unit import Unit
from zerort.optim import Optimizer
from zerort.typing import Array

__all__ = ["BoundUnit", "RowGradients", "TensorPlace"]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor of a unit lies."""

    full: str
    """Its full name in the runtime."""
    part: int
    """Which of the unit's parts it lies in."""
    first: int
    """Where it begins there, in elements."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowGradients:
    """The gradient of some rows of a table that was registered with ``rows=``."""

    indices: Array
    """Which, counted in the whole table; of one that comes twice, gradients are summed."""
    values: Array
    """A row for each."""


class BoundUnit:
    """A unit in the hands of a framework binding. Made by `zerort.engine.binding.Binding.register`.

    Args:
        unit: The runtime's own; None for modules all of whose parameters are tied to other units.
        name: What it is called.
        around: Returns what the runtime is entered within: the framework's stream.
    """

    def __init__(self, unit: Unit | None, *, name: str, around: Callable[[], AbstractContextManager[object]]) -> None:
        self.name = name
        self.tied_owners: tuple[BoundUnit, ...] = ()
        """Units that hold parameters which this one's modules use, too: acquired and released with it."""
        self._unit = unit
        self._around = around
        self._holders = 0
        self._gathered = ExitStack()
        self.apart: ApartGathers | None = None
        """How it is copied where ranks may use different units; None: all of them copy it at once."""
        sections = () if unit is None else unit.sections
        self.is_resident = all(section.parameters.is_resident for section in sections)
        """Whether the whole unit always lies where this rank can read it, at one address."""
        self.places: Mapping[str, TensorPlace] = {} if unit is None else _places_of(unit)
        """Where its own tensors lie, by local name."""

    # -- gathering -------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Have the unit gathered until as many `release`. Collective where ranks share no memory."""
        with self._around():
            for unit in (*self.tied_owners, self):
                unit.acquire_alone()

    def release(self) -> None:
        """End one `acquire`."""
        with self._around():
            for unit in (self, *self.tied_owners):
                unit.release_alone()

    def acquire_alone(self) -> None:
        """Acquire this unit without its tied owners, on the framework's stream already."""
        if self._holders == 0 and self._unit is not None:
            self.bring()
        self._holders += 1

    def release_alone(self) -> None:
        """End one `acquire_alone`; one that failed has nothing to end."""
        if self._holders == 0:
            return
        self._holders -= 1
        if self._holders == 0 and self._unit is not None:
            self.drop()

    @property
    def is_held(self) -> bool:
        """Whether somebody has acquired it."""
        return self._holders > 0

    def bring(self) -> None:
        """Gather the parameters: called by the first `acquire`. Override to put tensors over `parts`."""
        assert self._unit is not None
        self._gathered.enter_context(self._unit.gathered())

    def drop(self) -> None:
        """Let the gathered parameters go: called by the last `release`. Override to take tensors away."""
        self._gathered.close()

    def parts(self) -> list[Array]:
        """Return the unit as 1-D arrays, one for each dtype: not copied, and valid while gathered, or resident."""
        return [] if self._unit is None else [section.parameters.whole for section in self._unit.sections]

    def copy_parts(self, copy: Callable[[Array], Copied], *, in_backward: bool = False) -> list[Copied]:
        """Gather the unit only to copy it: return ``copy`` of each part.

        Every rank calls this, or takes part where it comes to another call (`ApartGathers`).

        Args:
            copy: Makes memory of the framework's own that holds the same values.
            in_backward: Units are needed from the last to the first: which of several ranks' goes first.
        """
        assert self._unit is not None
        with self._around():
            if self.apart is not None:
                return self.apart.copy(self._unit, copy, in_backward=in_backward)
            with self._unit.gathered():
                return [copy(part) for part in self.parts()]

    def gather_rows(self, indices: Mapping[str, Array]) -> dict[str, Array]:
        """Return rows of its tables, up to date, in new memory and in the order given. Every rank calls this.

        Args:
            indices: Of each of its tables, by local name: this rank's own, or none of them.
        """
        assert self._unit is not None
        with self._around(), self._unit.gathered(rows=indices) as found:
            rows = {local: found[local] for local in indices}
        for values in rows.values():
            if isinstance(values, np.ndarray):
                values.flags.writeable = True  # nobody else has them: rows are gathered into new memory
        return rows

    # -- values ----------------------------------------------------------------------------------------------------

    def assign(self, values: Mapping[str, Array], *, broadcast: bool = False) -> None:
        """Write whole tensors by local name; see `Unit.assign`. Every rank calls this between steps."""
        if self._unit is not None:
            with self._around():
                self._unit.assign(values, broadcast=broadcast)

    def optimizer_of(self, local: str) -> Optimizer:
        """Return the optimizer with the settings of a trainable tensor."""
        assert self._unit is not None
        place = self.places[local]
        state = self._unit.sections[place.part].state
        assert state is not None
        return state.optimizer_of(place.full)

    # -- gradients: for `GradientOrder` ------------------------------------------------------------------------------

    @property
    def trainable(self) -> tuple[str, ...]:
        """The local names of its tensors that take gradients."""
        return () if self._unit is None else self._unit.trainable

    @property
    def is_reduced(self) -> bool:
        """Whether this step's gradients are on their way."""
        return self._unit is not None and self._unit.reduced

    @property
    def slots_in_flight(self) -> int:
        """How many bucket slots stay busy after its reduction has begun."""
        sections = () if self._unit is None else self._unit.sections
        return sum(one.bucket is not None and one.bucket.leaves_slots_busy for one in sections)

    def is_of(self, unit: Unit) -> bool:
        """Say whether it stands for a unit of the runtime."""
        return self._unit is unit

    @property
    def has_tables(self) -> bool:
        """Whether it has tables of which rows are gathered: their gradients may come several times in a pass."""
        return self._unit is not None and bool(self._unit.tables)

    def add_gradient(self, local: str, gradient: Array | RowGradients) -> None:
        """Hand in a gradient, whose memory is the runtime's from now on; `reduce` ends the micro-step."""
        assert self._unit is not None
        if isinstance(gradient, RowGradients):
            self._unit.add_rows({local: (gradient.indices, gradient.values)}, late=True)
        else:
            self._unit.add(local, gradient, donate=True, late=True)

    def reduce(self) -> None:
        """End a micro-step: see `Unit.reduce`."""
        assert self._unit is not None
        self._unit.reduce()

    def reduced_gradients(self) -> dict[str, Array]:
        """Return this step's gradients of its own tensors, once they are reduced; see `Unit.reduced_gradients`."""
        if self._unit is None or not self._unit.reduced:
            return {}
        with self._around():
            return self._unit.reduced_gradients()

    def skip_micro_step(self) -> None:
        """End a micro-step in which no rank has a gradient of it; see `Unit.skip_micro_step`."""
        assert self._unit is not None
        self._unit.skip_micro_step()

    def on_gradients_complete(self) -> None:
        """Called when all gradients of a micro-step are there. Override to let go of what backward needed."""

    def on_step(self) -> None:
        """Called when a step is over, done or not: parameters may have changed."""

    def __repr__(self) -> str:
        state = "GATHERED" if self._holders else "RELEASED"
        return f"{type(self).__name__}({self.name!r}, {state}, {len(self.places)} parameters)"


Copied = TypeVar("Copied")


def _places_of(unit: Unit) -> dict[str, TensorPlace]:
    found = {}
    for local in unit.names:
        home, full = unit.place_of(local)
        if home is not unit:
            continue  # tied: it lies in that one
        part = next(index for index, section in enumerate(unit.sections) if full in section.names)
        extent = unit.sections[part].layout.of(full)
        found[local] = TensorPlace(full, part, extent.offset, extent.shape)
    return found
