"""`SectionSize`: what a section takes on a rank, from shapes alone. No memory is touched.

    ModelSpec(units, plan=…, optimizer=…, size=8).sections(rank=0)   ->   one SectionSize for each section

The same layouts, partitions and divisions that a runtime is built from, so the numbers are exact, padding and uneven
weights included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zerort.buffer import TreeSum
from zerort.config import Plan, Tier
from zerort.engine.model.division import Division, cut_over, divide
from zerort.engine.model.tensors import Frozen, TensorSpec, frozen_in, full_name, is_frozen
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import cut_chunks
from zerort.layout import FlatLayout, Partition, Placement, itemsize
from zerort.layout.dtypes import TRAINABLE, gradient_dtype, master_dtype
from zerort.optim import ElementwiseOptimizer, Optimizer, ParameterGroup, StateSpec, resolve

__all__ = ["PARTS", "ModelSpec", "SectionSize"]

PARTS: Final = ("parameter", "gradient", "state")
"""What a section consists of, from hot to cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSize:
    """Bytes that one section takes on one rank."""

    unit: str
    """The unit it belongs to."""
    name: str = ""
    """Its own name."""
    parameter: int
    """Parameters at rest."""
    gradient: int = 0
    """Gradients at rest."""
    state: int = 0
    """Optimizer state at rest, master weights included."""
    whole: int = 0
    """Parameters of all ranks together: what its gathered form takes; 0 if every rank holds them all the time."""
    bucket: int = 0
    """Gradients of the whole section, while they are collected in a slot; 0 if they are collected where they rest."""
    is_held: bool = False
    """Whether its slot is still read after its reduction has begun."""
    numel: int = 0
    """Elements that the rank updates."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Bytes per element of each array that streams if a part does, by part."""
    has_master: bool = False
    """Whether its state has master weights."""
    fixed: int = 0
    """Of the state, what stays in memory whatever the tier: one small array per tensor."""
    movable: frozenset[str] = frozenset(PARTS)
    """The parts that can leave memory."""

    @property
    def is_trained(self) -> bool:
        """Whether its parameters are updated."""
        return "gradient" in self.columns

    def below(self, tiers: SectionResidence, *, chunk_numel: int) -> dict[str, int]:
        """Return how much of each part rests on a disk.

        Args:
            tiers: Where the parts rest.
            chunk_numel: Elements of a chunk, at most: what stays of state are whole chunks.
        """
        nbytes = {part: getattr(self, part) * (getattr(tiers, part) is Tier.NVME) for part in PARTS}
        if nbytes["state"]:
            each = sum(self.columns["state"])
            cuts = cut_chunks(self.numel, most=chunk_numel)
            resident = max(each * at for at in cuts if each * at <= tiers.state_resident_nbytes)
            nbytes["state"] -= self.fixed + resident
        return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that fixes how many bytes a model takes."""

    units: Mapping[str, Mapping[str, TensorSpec]]
    """What will be registered: shapes and dtypes by name, by unit."""
    plan: Plan
    """How parts lie over the ranks; tiers do not matter here."""
    optimizer: Optimizer
    """Whose state is kept."""
    size: int
    """Ranks that share the model."""
    param_groups: Sequence[ParameterGroup] = ()
    """Other settings for some parameters."""
    frozen: Frozen | Mapping[str, Frozen] = False
    """Which parameters take no gradient: in every unit, or by unit."""
    shard_weights: Sequence[float] | None = None
    """How much of every shard each rank takes."""
    equal_shards: bool = False
    """Whether shards are padded to one length, as NCCL wants them."""
    gradient_dtype: str | None = None
    """What gradients are summed in; None: as `gradient_dtype` says."""
    over_nccl: bool = False
    """Whether NCCL sums them."""
    micro_steps: int = 1
    """Calls of reduce that are summed before anything is communicated."""
    virtual_shards: int | None = None
    """Micro-batches of a step in deterministic mode."""
    tied_owners: Collection[str] = ()
    """Units that others are tied to."""
    replicated: bool = False
    """Whether there are several copies of the model."""

    def sections(self, *, rank: int | None = None) -> list[SectionSize]:
        """Return what each section takes on ``rank``; None: the most that it takes on any."""
        ranks = range(self.size) if rank is None else (rank,)
        return [self._size(unit, part, ranks) for unit in self.units for part in self._divisions(unit)]

    def _divisions(self, unit: str) -> Iterator[Division]:
        tensors = self.units[unit]
        cold = {full_name(unit, local) for local in tensors if is_frozen(frozen_in(unit, self.frozen), local)}
        yield from divide(
            {full_name(unit, local): spec for local, spec in tensors.items()},
            frozen=cold.__contains__,
            resolve=lambda name, shape: resolve(self.optimizer, self.param_groups, name, shape),
        )

    def _size(self, unit: str, part: Division, ranks: Sequence[int]) -> SectionSize:
        copies = 1  # whole gradients, where whole ones are kept
        if self.virtual_shards is not None:
            copies = 2 + TreeSum.depth(self.virtual_shards // self.size)
        cut = cut_over(
            self.size,
            weights=self.shard_weights,
            deterministic=self.virtual_shards is not None,
            equal=self.equal_shards,
        )
        layout, partition = cut.of({name: spec.shape for name, spec in part.tensors.items()}, dtype=part.dtype)
        mine = max(partition.counts[rank] for rank in ranks)
        resting = mine if self._is_sharded("parameter") else layout.numel
        gathered = layout.nbytes if self._is_sharded("parameter") else 0
        width = itemsize(part.dtype)
        if part.optimizers is None:
            return SectionSize(
                unit=unit,
                name=part.section_name(unit),
                parameter=width * resting,
                whole=gathered,
                numel=mine,
                columns={"parameter": (width,)},
                movable=frozenset(filter(self._is_sharded, PARTS)),
            )
        is_whole = self.micro_steps > 1 or copies > 1 or unit in self.tied_owners or not self._is_sharded("gradient")
        element = itemsize(gradient_dtype(part.dtype, self.gradient_dtype, over_nccl=self.over_nccl))
        in_slots = not is_whole or (self.micro_steps > 1 and copies == 1)
        return SectionSize(
            unit=unit,
            name=part.section_name(unit),
            parameter=width * resting,
            gradient=element * (copies * layout.numel if is_whole else mine),
            state=max(_state_nbytes(part, layout, self._owned(layout, partition, rank)) for rank in ranks),
            whole=gathered,
            bucket=element * layout.numel if in_slots else 0,
            is_held=not is_whole,
            numel=mine if self._is_sharded("state") else layout.numel,
            columns={"parameter": (width,), "gradient": (element,), "state": _state_columns(part)},
            has_master=master_dtype(part.dtype) is not None,
            fixed=_fixed_nbytes(part),
            movable=self._movable(part, is_whole=is_whole),
        )

    def _movable(self, part: Division, *, is_whole: bool) -> frozenset[str]:
        """Return the parts of a section that can leave memory."""
        assert part.optimizers is not None
        if not all(isinstance(one, ElementwiseOptimizer) for one in part.optimizers.values()):
            return frozenset()  # an optimizer looks at whole tensors
        stays = {"gradient"} if is_whole or self.replicated else set()  # gradients that are summed more than once
        return frozenset(filter(self._is_sharded, PARTS)) - stays

    def _owned(self, layout: FlatLayout, partition: Partition, rank: int) -> tuple[int, int]:
        """Return the range that ``rank`` updates."""
        return partition.of(rank) if self._is_sharded("state") else (0, layout.numel)

    def _is_sharded(self, part: str) -> bool:
        return getattr(self.plan, part).placement is Placement.SHARDED


def _state_columns(part: Division) -> tuple[int, ...]:
    """Return the bytes per element of master weights and of each kind of state that has one element per parameter's."""
    kinds = {spec.name: spec.dtype for name in part.tensors for spec in _states_of(part, name) if spec.shape is None}
    master = master_dtype(part.dtype)
    return tuple(map(itemsize, kinds.values() if master is None else (*kinds.values(), master)))


def _states_of(part: Division, name: str) -> tuple[StateSpec, ...]:
    assert part.optimizers is not None
    return part.optimizers[name].states_in(TRAINABLE[part.dtype].updated_in, part.tensors[name].shape)


def _fixed_nbytes(part: Division) -> int:
    """Return the bytes of state that has a shape of its own."""
    return sum(
        itemsize(spec.dtype) * math.prod(spec.shape)
        for name in part.tensors
        for spec in _states_of(part, name)
        if spec.shape is not None
    )


def _state_nbytes(part: Division, layout: FlatLayout, owned: tuple[int, int]) -> int:
    first, last = owned
    master = master_dtype(part.dtype)
    nbytes = _fixed_nbytes(part) + (0 if master is None else itemsize(master) * (last - first))
    having: dict[tuple[str, str], list[str]] = {}
    for extent in layout.extents:
        for spec in _states_of(part, extent.name):
            if spec.shape is None:
                having.setdefault((spec.name, spec.dtype), []).append(extent.name)
    for (_, dtype), names in having.items():
        if len(names) == len(layout.extents):
            nbytes += itemsize(dtype) * (last - first)
        else:  # kept without the others, and without padding
            overlaps = layout.overlaps(first, last)
            numel = sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names)
            nbytes += itemsize(dtype) * numel
    return nbytes
