"""`BudgetPlanner`: what a budget gives to each section of a runtime, decided for units that are announced together.

    expect(units)      decided at once, over all of them: the hottest of all units rests highest
    expect(one unit)   when it is registered and nobody has announced it: it gets of what is left, room for others kept

What was decided stays: a section that exists does not move. All ranks decide from the same integers (what each section
takes on the rank that takes most), so they decide alike without a word (decision 0035).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zerort.buffer import unit_title
from zerort.comm import Group
from zerort.comm.agreed import agreed, expect_same
from zerort.config import Budget, Tier
from zerort.engine.model.tensors import Frozen, TensorSpec, aliases_in, declare, frozen_in, is_frozen
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.rows.checks import RowSettings, check_rows
from zerort.engine.sizing.budget import Capacity, decide
from zerort.engine.sizing.requirements import Lazy, ModelSpec, Rows, Ties, checked_rows, lazy_in
from zerort.engine.sizing.working import WorkingMemory
from zerort.errors import CallError, PlanError
from zerort.typing import Array

__all__ = ["BudgetPlanner", "announce"]


class BudgetPlanner:
    """What a budget gives to each section.

    Args:
        budget: What there is on each rank.
        model_spec: How sections are sized; its units are ignored.
        working: What computing takes besides; its sizes are ignored.
    """

    def __init__(self, budget: Budget, *, model_spec: ModelSpec, working: WorkingMemory) -> None:
        self.budget = budget
        self._model_spec = replace(model_spec, units={}, frozen={}, ties={})
        self._cold: dict[str, frozenset[str]] = {}
        self._tables: dict[str, tuple[tuple[str, ...], bool]] = {}  # by unit: those by rows, and whether they are lazy
        self._working = working
        self._tiers: dict[str, SectionResidence] = {}

    def of(self, section: str) -> SectionResidence:
        """Return where the parts of a section rest, by its name."""
        return self._tiers[section]

    def expect(
        self,
        units: Mapping[str, Mapping[str, TensorSpec]],
        *,
        frozen: Frozen | Mapping[str, Frozen] = False,
        ties: Ties | None = None,
        rows: Rows | None = None,
        lazy: Lazy = False,
        more: bool = False,
    ) -> None:
        """Decide about units that are not known yet, with what the others leave.

        Args:
            units: What they consist of; those that are known have to be the same.
            frozen: Which of their parameters take no gradient: in all of them, or by unit.
            ties: Parameters that others hold, by unit.
            rows: Tables that are gathered and updated by rows, by unit.
            lazy: Whether their rows stay as they are without a gradient: in all of these units, or by unit.
            more: Whether others may follow that nobody has announced: keep room to work on them, if there is any.

        Raises:
            CallError: A unit was announced with other tensors.
            PlanError: They do not fit; nothing was decided.
        """
        known = self._model_spec
        cold = {
            unit: frozenset(name for name in tensors if is_frozen(frozen_in(unit, frozen), name))
            for unit, tensors in units.items()
        }
        tables = {
            unit: (tuple(sorted(names)), lazy_in(unit, lazy)) for unit in units if (names := (rows or {}).get(unit))
        }
        for unit, tensors in units.items():
            if unit not in known.units:
                continue
            if (dict(known.units[unit]), self._cold[unit]) != (dict(tensors), cold[unit]):
                raise CallError(
                    f"Expected {unit_title(unit)} as it was announced, got other tensors, or others that are frozen. "
                    "Announce what will be registered, in the same shapes and dtypes."
                )
            if self._tables.get(unit) != tables.get(unit):
                raise CallError(
                    f"Expected {unit_title(unit)} with the rows= and lazy= that it was announced with, got others. "
                    "Announce tables by rows, too: rt.expect(…, rows={'embed': ('table',)})."
                )
        cold, tables = {**self._cold, **cold}, {**self._tables, **tables}
        model_spec = replace(
            known,
            units={**known.units, **units},
            frozen={unit: names.__contains__ for unit, names in cold.items()},
            ties={**known.ties, **(ties or {})},
            rows={unit: names for unit, (names, _) in tables.items()},
            lazy={unit: one for unit, (_, one) in tables.items()},
        )
        if model_spec.units == known.units and model_spec.ties == known.ties:
            return
        working = replace(self._working, sizes=model_spec.sections(), ties=model_spec.tied_to())
        settled = {at: self._tiers[size.name] for at, size in enumerate(working.sizes) if size.name in self._tiers}
        capacity = Capacity.of(self.budget, has_gpu=Tier.HOST not in self._working.reach)
        try:
            tiers = decide(capacity, working=replace(working, open_ended=more), settled=settled)
        except PlanError:
            tiers = decide(capacity, working=working, settled=settled)
        self._model_spec, self._cold, self._tables = model_spec, cold, tables
        self._tiers = {size.name: one for size, one in zip(working.sizes, tiers, strict=True)}

    def recut(self, weights: Sequence[float] | None) -> None:
        """Go on with shards that are cut by other weights: sections stay in their tiers.

        Raises:
            PlanError: They do not fit; nothing was decided.
        """
        model_spec = replace(self._model_spec, shard_weights=weights)
        working = replace(self._working, sizes=model_spec.sections(), ties=model_spec.tied_to())
        settled = {at: self._tiers[size.name] for at, size in enumerate(working.sizes)}
        decide(Capacity.of(self.budget, has_gpu=Tier.HOST not in working.reach), working=working, settled=settled)
        self._model_spec = model_spec

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Take back what is decided inside if that raises: a unit that was not made takes nothing of the budget."""
        before = self._model_spec, self._cold, self._tables, self._tiers
        try:
            yield
        except Exception:
            self._model_spec, self._cold, self._tables, self._tiers = before
            raise


def announce(
    world: Group,
    planner: BudgetPlanner | None,
    units: Mapping[str, Mapping[str, Array | TensorSpec]],
    *,
    frozen: Frozen | Mapping[str, Frozen],
    settings: RowSettings,
    rows: Rows | None = None,
    lazy: Lazy = False,
) -> None:
    """Agree on units that will come, and decide about them; see `Runtime.expect`. Every rank calls this."""
    declared: dict[str, dict[str, TensorSpec]] = {}
    cold: dict[str, list[str]] = {}
    by_rows: dict[str, tuple[str, ...]] = {}
    with agreed(world, "expect"):  # also of what a callable of the user's raises
        if not isinstance(units, Mapping):
            raise CallError(f"Expected units as a mapping from names to their tensors, got {type(units).__name__}.")
        by_rows = checked_rows(rows, units, lazy=lazy)
        for unit, params in units.items():
            tensors, aliases = declare(unit, params), aliases_in(params)
            declared[unit] = {name: spec for name, spec in tensors.items() if name not in aliases}
            cold[unit] = [name for name in declared[unit] if is_frozen(frozen_in(unit, frozen), name)]
            shared = {*aliases, *aliases.values()}
            check_rows(
                settings,
                unit,
                by_rows.get(unit, ()),
                tensors,
                frozen=cold[unit],
                shared=shared,
                lazy=lazy_in(unit, lazy),
            )
    facts = {name: {key: [list(one.shape), one.dtype] for key, one in of.items()} for name, of in declared.items()}
    told = {unit: [sorted(names), lazy_in(unit, lazy)] for unit, names in by_rows.items()}
    expect_same(world, [facts, cold, told], what="what is announced", error=CallError)
    if planner is not None:
        planner.expect(
            declared, frozen={unit: names.__contains__ for unit, names in cold.items()}, rows=by_rows, lazy=lazy
        )
