"""`Allotment`: what a budget gives to each section of a runtime, decided for units that are announced together.

    expect(units)      decided at once, over all of them: the hottest of all units rests highest
    expect(one unit)   when it is registered and nobody has announced it: it gets of what is left, room for others kept

What was decided stays: a section that exists does not move. All ranks decide from the same integers (what each section
takes on the rank that takes most), so they decide alike without a word. May import: config, errors, optim, engine.*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zerort.config import Budget, Plan, Tier
from zerort.engine.budget import Capacity, decide
from zerort.engine.mesh import Mesh
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.options import RuntimeOptions
from zerort.engine.section_tiers import SectionTiers
from zerort.engine.sizing import Blueprint
from zerort.engine.tensors import Frozen, TensorSpec, is_frozen
from zerort.engine.working import WorkingMemory
from zerort.errors import CallError, PlanError
from zerort.optim import Optimizer, ParameterGroup

__all__ = ["Allotment"]


class Allotment:
    """What a budget gives to each section.

    Args:
        budget: What there is on each rank.
        blueprint: How sections are sized; its units are ignored.
        working: What computing takes besides; its sizes are ignored.
    """

    def __init__(self, budget: Budget, *, blueprint: Blueprint, working: WorkingMemory) -> None:
        self.budget = budget
        self._blueprint = replace(blueprint, units={}, frozen={}, lenders=frozenset())
        self._cold: dict[str, frozenset[str]] = {}
        self._working = working
        self._tiers: dict[str, SectionTiers] = {}
        self._units: dict[str, str] = {}

    @classmethod
    def build(
        cls,
        budget: Budget,
        mesh: Mesh,
        *,
        plan: Plan,
        optimizer: Optimizer,
        groups: Sequence[ParameterGroup],
        options: RuntimeOptions,
        offload: OffloadOptions,
    ) -> Allotment:
        """Return what decides for a runtime with these settings."""
        blueprint = Blueprint(
            units={},
            plan=plan,
            optimizer=optimizer,
            size=mesh.shard.size,
            groups=groups,
            weights=options.weights,
            gradient_dtype=options.gradient_dtype,
            micro_steps=options.micro_steps,
            virtual_shards=options.virtual_shards,
            replicated=mesh.replicate is not None,
        )
        working = WorkingMemory(
            sizes=(),
            prefetch=options.prefetch,
            buckets=options.buckets,
            one_memory=mesh.shard.one_memory,
            offload=offload,
        )
        return cls(budget, blueprint=blueprint, working=working)

    def of(self, section: str) -> SectionTiers:
        """Return where the parts of a section rest, by its name."""
        return self._tiers[section]

    def expect(
        self,
        units: Mapping[str, Mapping[str, TensorSpec]],
        *,
        frozen: Frozen = False,
        lenders: Collection[str] = (),
        more: bool = False,
    ) -> None:
        """Decide about units that are not known yet, with what the others leave.

        Args:
            units: What they consist of; those that are known have to be the same.
            frozen: Which of their parameters take no gradient.
            lenders: Units that others are tied to: whole gradients of theirs stay in memory.
            more: Whether others may follow that nobody has announced: keep room to work on them, if there is any.

        Raises:
            CallError: A unit was announced with other tensors.
            PlanError: They do not fit; nothing was decided.
        """
        known = self._blueprint
        cold = {unit: frozenset(name for name in tensors if is_frozen(frozen, name)) for unit, tensors in units.items()}
        for unit, tensors in units.items():
            if unit in known.units and (dict(known.units[unit]), self._cold[unit]) != (dict(tensors), cold[unit]):
                raise CallError(
                    f"Expected unit {unit!r} as it was announced, got other tensors, or others that are frozen. "
                    "Announce what will be registered, in the same shapes and dtypes."
                )
        for unit in {*lenders} - {*known.lenders}:
            if any(self._tiers[name].gradient is Tier.NVME for name in self._sections_of(unit)):
                raise PlanError(
                    f"Expected the gradients of unit {unit!r} in memory, because another unit is tied to it; got them "
                    f"on NVME. Announce it as one that others are tied to: rt.expect(units, lenders=[{unit!r}])."
                )
        cold = {**self._cold, **cold}
        blueprint = replace(
            known,
            units={**known.units, **units},
            frozen={unit: names.__contains__ for unit, names in cold.items()},
            lenders=frozenset({*known.lenders, *lenders}),
        )
        if blueprint.units == known.units and blueprint.lenders == known.lenders:
            return
        working = replace(self._working, sizes=blueprint.sections(), ties=len(blueprint.lenders))
        settled = {at: self._tiers[size.name] for at, size in enumerate(working.sizes) if size.name in self._tiers}
        capacity = Capacity.of(self.budget)
        try:
            tiers = decide(capacity, working=replace(working, open_ended=more), settled=settled)
        except PlanError:
            tiers = decide(capacity, working=working, settled=settled)
        self._blueprint, self._cold = blueprint, cold
        self._tiers = {size.name: one for size, one in zip(working.sizes, tiers, strict=True)}
        self._units = {size.name: size.unit for size in working.sizes}

    def _sections_of(self, unit: str) -> list[str]:
        """Return the names of a unit's sections, as far as they are known."""
        return [section for section, owner in self._units.items() if owner == unit]
