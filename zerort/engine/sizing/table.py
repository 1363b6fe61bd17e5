"""`SizeTable`: the sizes of an open runtime's sections, from which it reserves memory and decides within a budget.

requirements.py   what a section takes at rest          ┐
working.py        what computing and moving take        ┴──> forecast (before a run), `SizeTable` (in it)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zerort.config import Plan
from zerort.config.offload import OffloadOptions
from zerort.engine.mesh import Mesh
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.options import RuntimeOptions
from zerort.engine.residence.choose import SectionResidence, reach_of
from zerort.engine.sizing.requirements import ModelSpec
from zerort.engine.sizing.working import WorkingMemory
from zerort.engine.wire.coding import Coding
from zerort.optim import Optimizer, ParameterGroup

__all__ = ["SizeTable"]


@dataclass(frozen=True, slots=True)
class SizeTable:
    """How sections of a runtime are sized. The same on every rank."""

    model_spec: ModelSpec
    """What sections take at rest; without units."""
    working: WorkingMemory
    """What computing and moving take besides; without sizes."""

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        *,
        plan: Plan,
        optimizer: Optimizer,
        param_groups: Sequence[ParameterGroup],
        options: RuntimeOptions,
        offload: OffloadOptions,
        memory: int | None,
    ) -> SizeTable:
        """Return the table of a runtime with these settings.

        Args:
            mesh: The ranks.
            plan: How parts lie over the ranks.
            optimizer: Whose state is kept.
            param_groups: Other settings for some parameters.
            options: How the runtime trains.
            offload: How values stream.
            memory: Bytes that a budget has of memory, which may make chunks smaller; None: there is no budget.
        """
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
            one_host=mesh.shard.one_host,
            micro_steps=options.micro_steps,
            accumulate=options.accumulate,
            virtual_shards=options.virtual_shards,
            digest=options.digest,
            coding=Coding.of(
                options.wire,
                one_host=mesh.shard.one_host,
                virtual_shards=options.virtual_shards,
                may_skip=options.may_skip,
            ),
            hosts=mesh.shard.hosts,
            replicate=1 if mesh.replicate is None else mesh.replicate.size,
            frozen_format=options.frozen_format,
        )
        working = WorkingMemory(
            sizes=(),
            prefetch=options.prefetch,
            buckets=options.buckets,
            one_memory=mesh.shard.one_memory,
            reach=reach_of(mesh.shard.device),
            offload=offload,
            memory=memory,
        )
        return cls(model_spec, working)

    def with_weights(self, weights: Sequence[float] | None) -> SizeTable:
        """Return the table of shards that are cut by other weights."""
        return replace(self, model_spec=replace(self.model_spec, shard_weights=weights))

    def chunk_slots(
        self,
        unit: str,
        tensors: Mapping[str, TensorSpec],
        *,
        frozen: Collection[str],
        tiers: Mapping[str, SectionResidence],
    ) -> tuple[int, int]:
        """Return what a chunk of a unit takes on the rank that takes most: from a disk, and between GPU and host.

        Args:
            unit: Its name.
            tensors: Its own, by name.
            frozen: Which of them take no gradient.
            tiers: Where the parts of its sections rest, by the section's name.
        """
        spec = replace(self.model_spec, units={unit: tensors}, frozen={unit: frozen.__contains__})
        pairs = [(size, tiers[size.name]) for size in spec.sections()]
        streamed = max((self.working.streamed(size, one) for size, one in pairs), default=0)
        return streamed, max((self.working.staged(size, one) for size, one in pairs), default=0)
