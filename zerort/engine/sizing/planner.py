"""`BudgetPlanner`: what a budget gives to each section of a runtime, decided for units that are announced together.

    expect(units)      decided at once, over all of them: the hottest of all units rests highest
    expect(one unit)   when it is registered and nobody has announced it: it gets of what is left, room for others kept

What was decided stays: a section that exists does not move. All ranks decide from the same integers (what each section
takes on the rank that takes most), so they decide alike without a word (decision 0035).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from zerort.buffer import unit_title
from zerort.comm import Group
from zerort.comm.agreed import agreed, expect_same
from zerort.config import Budget, Plan, Tier
from zerort.engine.mesh import Mesh
from zerort.engine.model.tensors import Frozen, TensorSpec, aliases_in, declare, frozen_in, is_frozen
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.options import RuntimeOptions
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.sizing.budget import Capacity, decide
from zerort.engine.sizing.requirements import ModelSpec
from zerort.engine.sizing.working import WorkingMemory
from zerort.errors import CallError, PlanError
from zerort.optim import Optimizer, ParameterGroup
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
        self._model_spec = replace(model_spec, units={}, frozen={}, tied_owners=frozenset())
        self._cold: dict[str, frozenset[str]] = {}
        self._working = working
        self._tiers: dict[str, SectionResidence] = {}
        self._units: dict[str, str] = {}

    @classmethod
    def build(
        cls,
        budget: Budget,
        mesh: Mesh,
        *,
        plan: Plan,
        optimizer: Optimizer,
        param_groups: Sequence[ParameterGroup],
        options: RuntimeOptions,
        offload: OffloadOptions,
    ) -> BudgetPlanner:
        """Return what decides for a runtime with these settings."""
        model_spec = ModelSpec(
            units={},
            plan=plan,
            optimizer=optimizer,
            size=mesh.shard.size,
            param_groups=param_groups,
            shard_weights=options.shard_weights,
            equal_shards=mesh.shard.prefers_equal_counts,
            gradient_dtype=options.gradient_dtype,
            over_nccl=mesh.shard.kind == "nccl",
            micro_steps=options.micro_steps,
            virtual_shards=options.virtual_shards,
            replicated=mesh.replicate is not None,
        )
        working = WorkingMemory(
            sizes=(),
            prefetch=options.prefetch,
            buckets=options.buckets,
            one_memory=mesh.shard.one_memory,
            reach=frozenset({Tier.DEVICE, Tier.HOST} if mesh.shard.device.in_host_memory else {Tier.DEVICE}),
            offload=offload,
            memory=budget.memory,
        )
        return cls(budget, model_spec=model_spec, working=working)

    def of(self, section: str) -> SectionResidence:
        """Return where the parts of a section rest, by its name."""
        return self._tiers[section]

    def expect(
        self,
        units: Mapping[str, Mapping[str, TensorSpec]],
        *,
        frozen: Frozen | Mapping[str, Frozen] = False,
        tied_owners: Collection[str] = (),
        more: bool = False,
    ) -> None:
        """Decide about units that are not known yet, with what the others leave.

        Args:
            units: What they consist of; those that are known have to be the same.
            frozen: Which of their parameters take no gradient: in all of them, or by unit.
            tied_owners: Units that others are tied to: whole gradients of theirs stay in memory.
            more: Whether others may follow that nobody has announced: keep room to work on them, if there is any.

        Raises:
            CallError: A unit was announced with other tensors, or a tied owner was not announced.
            PlanError: They do not fit; nothing was decided.
        """
        known = self._model_spec
        cold = {
            unit: frozenset(name for name in tensors if is_frozen(frozen_in(unit, frozen), name))
            for unit, tensors in units.items()
        }
        for unit, tensors in units.items():
            if unit in known.units and (dict(known.units[unit]), self._cold[unit]) != (dict(tensors), cold[unit]):
                raise CallError(
                    f"Expected {unit_title(unit)} as it was announced, got other tensors, or others that are frozen. "
                    "Announce what will be registered, in the same shapes and dtypes."
                )
        strangers = sorted({*tied_owners} - {*known.units, *units})
        if strangers:
            raise CallError(
                f"Expected tied_owners out of the units that are announced or registered, got {strangers[0]!r}. "
                "Announce it with the others."
            )
        for unit in {*tied_owners} - {*known.tied_owners}:
            if any(self._tiers[name].gradient is Tier.NVME for name in self._sections_of(unit)):
                raise PlanError(
                    f"Expected the gradients of {unit_title(unit)} in memory, because another unit is tied to it; got "
                    "them on NVME. Announce it as one that others are tied to: "
                    f"rt.expect(units, tied_owners=[{unit!r}])."
                )
        cold = {**self._cold, **cold}
        model_spec = replace(
            known,
            units={**known.units, **units},
            frozen={unit: names.__contains__ for unit, names in cold.items()},
            tied_owners=frozenset({*known.tied_owners, *tied_owners}),
        )
        if model_spec.units == known.units and model_spec.tied_owners == known.tied_owners:
            return
        working = replace(self._working, sizes=model_spec.sections(), ties=len(model_spec.tied_owners))
        settled = {at: self._tiers[size.name] for at, size in enumerate(working.sizes) if size.name in self._tiers}
        capacity = Capacity.of(self.budget, has_gpu=Tier.HOST not in self._working.reach)
        try:
            tiers = decide(capacity, working=replace(working, open_ended=more), settled=settled)
        except PlanError:
            tiers = decide(capacity, working=working, settled=settled)
        self._model_spec, self._cold = model_spec, cold
        self._tiers = {size.name: one for size, one in zip(working.sizes, tiers, strict=True)}
        self._units = {size.name: size.unit for size in working.sizes}

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Take back what is decided inside if that raises: a unit that was not made takes nothing of the budget."""
        before = self._model_spec, self._cold, self._tiers, self._units
        try:
            yield
        except Exception:
            self._model_spec, self._cold, self._tiers, self._units = before
            raise

    def _sections_of(self, unit: str) -> list[str]:
        """Return the names of a unit's sections, as far as they are known."""
        return [section for section, owner in self._units.items() if owner == unit]


def announce(
    world: Group,
    planner: BudgetPlanner | None,
    units: Mapping[str, Mapping[str, Array | TensorSpec]],
    *,
    frozen: Frozen | Mapping[str, Frozen],
    tied_owners: Collection[str],
) -> None:
    """Agree on units that will come, and decide about them; see `Runtime.expect`. Every rank calls this."""
    declared: dict[str, dict[str, TensorSpec]] = {}
    cold: dict[str, list[str]] = {}
    named: list[str] = []
    with agreed(world, "expect"):  # also of what a callable of the user's raises
        if not isinstance(units, Mapping):
            raise CallError(f"Expected units as a mapping from names to their tensors, got {type(units).__name__}.")
        for unit, params in units.items():
            tensors, aliases = declare(unit, params), aliases_in(params)
            declared[unit] = {name: spec for name, spec in tensors.items() if name not in aliases}
            cold[unit] = [name for name in declared[unit] if is_frozen(frozen_in(unit, frozen), name)]
        named = sorted(tied_owners)
    facts = {name: {key: [list(one.shape), one.dtype] for key, one in of.items()} for name, of in declared.items()}
    expect_same(world, [facts, cold, named], what="what is announced", error=CallError)
    if planner is not None:
        planner.expect(declared, frozen={unit: names.__contains__ for unit, names in cold.items()}, tied_owners=named)
