"""`Unit`: parameters that are gathered and released together, and whose gradients are reduced together.

    RELEASED ── gather ──> GATHERED ── release ──> RELEASED            parameters, here
    EMPTY ── contribute … reduce ──> REDUCED ── step ──> EMPTY       gradients, in `UnitGradients`

A verb in the wrong state raises `UnitStateError` with the verb that comes first. An error that one rank alone makes is
told to the others, who raise it at their next collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from zerort import trace
from zerort.buffer import Views, gathering, unit_title
from zerort.device import Ticket, joined
from zerort.engine.context import Context
from zerort.engine.model.assignment import Place, assign_values
from zerort.engine.model.gather import GatheredForm
from zerort.engine.model.gradients.unit import UnitGradients
from zerort.engine.model.section import Section
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.rows.checks import check_indices, check_tables
from zerort.errors import UnitStateError
from zerort.typing import Array

__all__ = ["Unit"]

RELEASED, GATHERED = "RELEASED", "GATHERED"

# What a verb needs, where it leads, and what to do if the unit is elsewhere.
_MOVES: Final = {
    "gather": (RELEASED, GATHERED, "Release it first: leave its `with unit.gathered():` block."),
    "release": (GATHERED, RELEASED, "Gather it first: `with unit.gathered():`."),
}


class Unit(UnitGradients):
    """Parameters that are gathered and released together. Made by `Runtime.register`.

    Args:
        context: What the runtime's parts share.
        name: Unique in the runtime.
        sections: Its tensors, by dtype and trainability.
        places: Where each of its names lies: (unit that holds it, full name).
    """

    _places: dict[str, tuple[Unit, str]]
    tied_owners: tuple[Unit, ...]

    def __init__(
        self, context: Context, name: str, *, sections: tuple[Section, ...], places: dict[str, tuple[Unit | None, str]]
    ) -> None:
        super().__init__(context, name, sections=sections, places=places)
        self._state = RELEASED
        self.form = GatheredForm(context, name, tuple(one for one in sections if one.table is None))
        """Its gathered form, without tables of which rows are gathered."""
        self._views: Views | None = None

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, tied ones included."""
        return tuple(self._places)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of the parameters that it holds, by name; each once."""
        found = {full: local for local, (home, full) in reversed(self._places.items()) if home is self}
        layouts = {extent.name: (extent, one.layout) for one in self.sections for extent in one.layout.extents}
        return {found[full]: TensorSpec(extent.shape, one.dtype) for full, (extent, one) in layouts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its gathered form."""
        return sum(section.layout.nbytes for section in self.sections)

    @property
    def codes_nbytes(self) -> int:
        """Bytes of the codes of its largest section, while it is gathered; 0: it travels as it is."""
        return max((section.codes_nbytes for section in self.sections), default=0)

    def place_of(self, name: str) -> tuple[Unit, str]:
        """Return the unit that holds a parameter of this one, and its full name."""
        return self._places[name]

    def local_name(self, full: str) -> str:
        """Return what a tensor that this unit holds is called in it, given its full name."""
        return next(local for local, place in self._places.items() if place == (self, full))

    # -- gathering -------------------------------------------------------------------------------------------------

    def gather(self, rows: Mapping[str, Any] | None = None) -> Ticket[Views]:
        """Start to bring the unit here and return the Ticket of its tensors. Every rank calls this.

        Args:
            rows: Indices of the rows to bring, of each of its tables that were registered so; None: all rows. A table
                is then ``(len(indices), width)``, in the order given. Ranks name rows of their own, by arrays or lists
                of the host.
        """
        self._move("gather")
        prefetcher, differences = self._context.prefetcher, self._context.mesh.shard.differences
        prefetcher.note(self.name)
        with contextlib.ExitStack() as undo, differences.with_suffix(prefetcher.detour):
            undo.callback(setattr, self, "_state", RELEASED)
            indices, error = (None, None) if rows is None else self._checked_indices(rows)
            for unit in (*self.tied_owners, self):
                with self._context.ledger.waiting():
                    unit.form.acquire()
                undo.callback(unit.form.release)
            for table in self._tables.values():
                undo.callback(table.release)  # those before one that cannot be gathered
            with self._context.ledger.stall("gather") if self._tables else contextlib.nullcontext():
                tables = {
                    local: table.gather_whole() if indices is None else table.gather_rows(indices[local], error=error)
                    for local, table in self._tables.items()
                }
            undo.pop_all()
        views = Views(
            self.name,
            {
                local: tables[local] if local in tables else home._section_of[full].parameters.view(full)
                for local, (home, full) in self._places.items()
            },
        )
        self._views = views
        arrivals = [unit.form.fetched for unit in (*self.tied_owners, self) if unit.form.fetched is not None]
        with differences.with_suffix(prefetcher.detour):
            prefetcher.fetch()
        return joined(arrivals, result=views)

    def release(self) -> None:
        """Let the gathered form go. Views of it raise `StaleViewError` from now on."""
        self._release(is_whole=False)

    def _release(self, *, is_whole: bool) -> None:
        """End a gather; one that was waited for may stay: it has not failed, on no rank."""
        self._move("release")
        if self._views is not None:
            self._views.expire()
            self._views = None
        expects = self._context.prefetcher.expects
        for unit in (self, *self.tied_owners):
            unit.form.release(stays=is_whole and (expects(self.name) or expects(unit.name)))
        for table in self._tables.values():
            table.release()

    def _checked_indices(self, rows: Mapping[str, Any]) -> tuple[dict[str, Array], Exception | None]:
        """Return the rows to bring of each table, and what is wrong with them: all raise that where they meet."""
        try:
            check_tables(self.name, rows, self._tables)
            found = {
                local: check_indices(self.name, local, rows[local], rows=table.table.rows)
                for local, table in self._tables.items()
            }
        except Exception as error:  # whatever was given as indices: the others must hear of it
            if not self._tables:
                self._fail(error)
            return dict.fromkeys(self._tables, np.zeros(0, np.int64)), error
        return found, None

    @gathering
    def gathered(self, rows: Mapping[str, Any] | None = None) -> Iterator[Views]:
        """Gather the unit for the length of a ``with`` block, which gets its tensors by name: read-only, not copied.

        Args:
            rows: As in `gather`: indices of the rows to bring, by table; None: all.
        """
        ticket = self.gather(rows)
        is_whole = False
        try:
            with self._context.ledger.stall("gather"):
                views = self._context.device.order_after(ticket)  # gpu-wait: no_order_of_streams_changes_a_walk
            is_whole = True
            with trace.span(f"compute {self.name}"):
                yield views
        finally:
            self._release(is_whole=is_whole)

    def assign(self, values: Mapping[str, Array], *, broadcast: bool = False) -> None:
        """Set parameters by name, master weights included. Every rank calls this between steps; see `assign_values`."""
        places = {
            local: Place(home.name, home._section_of[full], full, is_gathered=home.is_gathered)
            for local, (home, full) in self._places.items()
        }
        assign_values(self._context, self.name, places, values, broadcast=broadcast)

    @property
    def is_gathered(self) -> bool:
        """Whether somebody is inside its `gathered`."""
        return self._state == GATHERED

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
            self._context.guard.check_whole(verb)
        needs, leads, cure = _MOVES[verb]
        if self._state != needs:
            title = unit_title(self.name)
            self._fail(UnitStateError(f"{title[0].upper()}{title[1:]} cannot {verb}: it is {self._state}. {cure}"))
        self._state = leads

    def __repr__(self) -> str:
        numel = sum(int(np.prod(e.shape)) for section in self.sections for e in section.layout.extents)
        return f"Unit({self.name!r}, {self._state}, {numel:,} parameters)"
