"""`forecast`: how many bytes a rank will hold in each memory, from shapes alone; `MemoryForecast`: what a step moves.

    forecast(units, plan=…, optimizer=…, size=8)   ->  MemoryReport: what `Runtime.memory` will find
    MemoryForecast.of(model_spec, plan)            ->  the same, section by section, and the disk's share of a step

No memory is touched. A plan says the tiers; for a budget they are decided here as a runtime decides them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from zerort.config import Budget, Plan, Tier, Wire
from zerort.config.offload import OffloadOptions
from zerort.engine.model.frozen import check_frozen_format
from zerort.engine.model.prefetch import count_gathers
from zerort.engine.model.tensors import Frozen, TensorSpec
from zerort.engine.options import Accumulate
from zerort.engine.report import MemoryReport
from zerort.engine.residence.choose import SectionResidence, reach
from zerort.engine.sizing.budget import Capacity, decide
from zerort.engine.sizing.requirements import ModelSpec, Rows, Ties, checked_rows
from zerort.engine.sizing.section_size import PARTS, SectionSize
from zerort.engine.sizing.working import WorkingMemory
from zerort.engine.wire.coding import Coding
from zerort.errors import CallError
from zerort.optim import LossScale, Optimizer, ParameterGroup

__all__ = ["MemoryForecast", "Traffic", "forecast"]


def forecast(
    units: Mapping[str, Mapping[str, TensorSpec]],
    *,
    plan: Plan | Budget,
    optimizer: Optimizer,
    size: int,
    rank: int = 0,
    param_groups: Sequence[ParameterGroup] = (),
    frozen: Frozen | Mapping[str, Frozen] = False,
    frozen_format: Literal["int8", "int4"] | None = None,
    shard_weights: Sequence[float] | None = None,
    gradient_dtype: str | None = None,
    micro_steps: int = 1,
    accumulate: Accumulate | None = None,
    virtual_shards: int | None = None,
    digest: bool | None = None,
    ties: Ties | None = None,
    rows: Rows | None = None,
    lazy: bool = False,
    wire: Wire | None = None,
    replicate: int = 1,
    prefetch: int = 1,
    buckets: int = 2,
    nonfinite: Literal["raise", "skip"] = "raise",
    loss_scale: LossScale | float | None = None,
    one_memory: bool = True,
    hosts: Sequence[int] | None = None,
    device: Literal["host", "cuda"] = "host",
    offload: OffloadOptions | None = None,
) -> MemoryReport:
    """Return the bytes that ``rank`` of ``size`` will hold.

    Args:
        units: What will be registered: shapes and dtypes by name, by unit.
        plan: What lives where, or how much there is of each memory.
        optimizer: Whose state is kept.
        size: Ranks that share the model.
        rank: Whose bytes.
        param_groups: Other settings for some parameters.
        frozen: Which parameters take no gradient: in every unit, or by unit.
        frozen_format: What those rest in; None: as they are.
        shard_weights: How much of every shard each rank takes.
        gradient_dtype: What gradients are summed in; None: the parameter's dtype.
        micro_steps: Calls of reduce per unit and step.
        accumulate: How their gradients are summed: "sharded" or "local", as in `zerort.open`.
        virtual_shards: Micro-batches of a step in deterministic mode.
        digest: Whether every step's report has a checksum of all parameters; None: with ``virtual_shards``. Rows then
            miss no update, and nothing is kept to make up for any.
        ties: Parameters that another unit holds, by unit: ``{"head": {"w": ("embed", "table")}}``.
        rows: Tables that are gathered and updated by rows, by unit: ``{"embed": ("table",)}``. What a batch's rows take
            is not counted, nor the whole table where it is gathered as one.
        lazy: Whether their rows stay as they are without a gradient, as in `Runtime.register`.
        wire: How values travel between ranks.
        replicate: Copies of the model, each of ``size`` ranks.
        prefetch: Units that are gathered ahead.
        buckets: Gradient buckets that may be in flight at once.
        nonfinite: What NaN or infinity in a gradient does: where steps are skipped, feedback takes twice the memory.
        loss_scale: What losses are multiplied by, which skips steps, too.
        one_memory: Whether all ranks are on one machine: then a gather of what rests in memory takes none. On GPUs it
            takes some, but parameters with a sparsity travel as they are; say False for GPUs of several hosts.
        hosts: For each rank, a number that tells its host: those of one sum gradients before they are coded. None: one
            for all with ``one_memory``, and one for each rank without. GPUs code theirs each for itself.
        device: Where ranks compute. On GPUs shards are padded to one length, and the host's memory is apart.
        offload: How values stream between memory and a disk; as the environment says if None.

    Raises:
        CallError: A table cannot have rows; as from `Runtime.register`.
        PlanError: The model does not fit into the budget, or the device, or tables by rows, cannot have the plan.
    """
    if device not in ("host", "cuda"):
        raise CallError(f"Expected device to be 'host' or 'cuda', got {device!r}.")
    on_gpus = device == "cuda"
    if isinstance(plan, Plan):
        plan.check_device(on_gpus=on_gpus)
    check_frozen_format(frozen_format)
    model_spec = ModelSpec(
        units=units,
        plan=plan if isinstance(plan, Plan) else Plan.zero(plan.stage),
        optimizer=optimizer,
        size=size,
        param_groups=param_groups,
        frozen=frozen,
        shard_weights=shard_weights,
        equal_shards=on_gpus,
        over_nccl=on_gpus,
        one_host=one_memory,
        gradient_dtype=gradient_dtype,
        micro_steps=micro_steps,
        accumulate=accumulate,
        virtual_shards=virtual_shards,
        digest=digest,
        ties=_checked(ties or {}),
        coding=Coding.of(
            wire,
            one_host=one_memory,
            virtual_shards=virtual_shards,
            may_skip=nonfinite == "skip" or loss_scale is not None,
        ),
        hosts=tuple(range(size)) if on_gpus else _checked_hosts(hosts, size=size, one_memory=one_memory),
        replicate=replicate,
        frozen_format=frozen_format,
        rows=checked_rows(rows, units, lazy=lazy),
        lazy=lazy,
    )
    settings = {
        "prefetch": prefetch,
        "buckets": buckets,
        "one_memory": one_memory and not on_gpus,
        "reach": reach(on_gpus=on_gpus),
    }
    return MemoryForecast.of(model_spec, plan, offload=offload, **settings).memory(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """What rests where, and what computing takes besides."""

    model_spec: ModelSpec
    working: WorkingMemory
    tiers: tuple[SectionResidence, ...]
    """Of each section, the same on every rank."""

    @classmethod
    def of(
        cls, model_spec: ModelSpec, plan: Plan | Budget, *, offload: OffloadOptions | None = None, **settings: Any
    ) -> MemoryForecast:
        """Say what becomes of a model under a plan or a budget.

        Args:
            model_spec: The model.
            plan: The tiers, or how much there is of each.
            offload: How values stream; as the environment says if None. A budget makes chunks smaller if need be.
            **settings: Other fields of `WorkingMemory`.

        Raises:
            CallError: A table cannot have rows.
            PlanError: The model does not fit into the budget, or its tables by rows cannot have the plan.
        """
        offload = OffloadOptions.from_environment() if offload is None else offload
        memory = plan.memory if isinstance(plan, Budget) else None
        working = WorkingMemory(sizes=(), offload=offload, memory=memory, **settings)
        on_gpus = Tier.HOST not in working.reach
        model_spec.check_rows(has_budget=isinstance(plan, Budget), on_gpus=on_gpus)
        working = replace(working, sizes=model_spec.sections(), ties=model_spec.tied_to())
        if isinstance(plan, Plan):
            tiers = tuple(_tiers_under(plan, size) for size in working.sizes)
        else:
            tiers = decide(Capacity.of(plan, has_gpu=on_gpus), working=working)
        return cls(model_spec=model_spec, working=working, tiers=tiers)

    def memory(self, rank: int) -> MemoryReport:
        """Return what ``rank`` will hold. Chunks on their way are counted at their most."""
        sizes = self.model_spec.sections(rank=rank)
        below = self.on_disk(rank)
        at_rest = {part: sum(getattr(size, part) for size in sizes) - below[part] for part in PARTS}
        besides, spec = replace(self.working, sizes=sizes), self.model_spec
        working = besides.of(self.tiers)
        may_differ = spec.size > 1 and spec.replicate == 1 and not any(spec.rows.values())
        return MemoryReport(
            **at_rest,
            buckets=working.buckets,
            gathered=working.gathered,
            gathered_apart=besides.apart(self.tiers) if may_differ else 0,
            host_copy=working.host_copy,
            streaming=working.streaming,
            nvme=sum(below.values()),
        )

    def on_disk(self, rank: int) -> dict[str, int]:
        """Return how much of each part of ``rank`` rests on a disk."""
        chunk = self.working.chunk_numel
        found = [
            size.on_disk(tiers, chunk_numel=chunk)
            for size, tiers in zip(self.model_spec.sections(rank=rank), self.tiers, strict=True)
        ]
        return {part: sum(one[part] for one in found) for part in PARTS}

    def traffic(self, rank: int, *, passes: int = 2) -> Traffic:
        """Return what ``rank`` moves between a disk and memory in a step; what rows of tables take depends on a batch.

        Args:
            rank: Whose.
            passes: How often every unit is used: once forward, once backward, in each micro-step. Where one pass turns
                into the next, some units stay. That units bring those that they are tied to is not counted.
        """
        names = list(self.model_spec.units)
        gathers = dict(zip(names, count_gathers(len(names), passes=passes, ahead=self.working.prefetch), strict=True))
        read = written = 0
        for size, tiers in zip(self.model_spec.sections(rank=rank), self.tiers, strict=True):
            if size.row_width:
                continue
            below = size.on_disk(tiers, chunk_numel=self.working.chunk_numel)
            gradient = below["gradient"] // size.shards
            again, put_away = size.gradient_moves  # read and added to; written
            tied = size.tied_sums // size.shards if gradient else 0  # read above, then added to the sum where it rests
            read += gathers[size.unit] * below["parameter"] + gradient + below["state"] + again * gradient + tied
            written += put_away * gradient + tied
            if size.is_trained:
                read += below["parameter"] * size.reads_parameter
                written += below["parameter"] + below["state"]
        return Traffic(read, written)


def _checked_hosts(hosts: Sequence[int] | None, *, size: int, one_memory: bool) -> tuple[int, ...]:
    """Return a number for each rank's host."""
    if hosts is None:
        return (0,) * size if one_memory else tuple(range(size))
    is_one = len(set(hosts)) == 1
    if len(hosts) != size or (size > 1 and one_memory != is_one):  # one rank on a GPU shares its memory with nobody
        raise CallError(
            f"Expected hosts to have a number for each of {size} ranks, one for all if one_memory=True; got {hosts!r} "
            f"and one_memory={one_memory}."
        )
    return tuple(hosts)


def _checked(ties: Any) -> Ties:
    """Return ties that lead from names to units and names, whether there are such or not."""
    for unit, names in ties.items() if isinstance(ties, Mapping) else [("", ties)]:
        places = names.values() if isinstance(names, Mapping) else [None]
        if not all(isinstance(place, tuple) and len(place) == 2 for place in places):
            raise CallError(
                f"Expected ties by unit and name, ties={{'head': {{'w': ('embed', 'table')}}}}; got {names!r} of "
                f"{unit!r}."
            )
    found: Ties = ties
    return found


def _tiers_under(plan: Plan, size: SectionSize) -> SectionResidence:
    """Return where a section's parts rest: as the plan says, but those that cannot leave memory stay."""
    asked = SectionResidence.of(plan)
    if size.stays:
        return replace(asked, parameter=Tier.DEVICE, gradient=Tier.DEVICE, state=Tier.DEVICE)
    stay = [part for part in PARTS if getattr(asked, part) is Tier.NVME and part not in size.movable]
    return replace(asked, **dict.fromkeys(stay, Tier.DEVICE))  # type: ignore[arg-type]


class Traffic(NamedTuple):
    """Bytes that one rank moves between a disk and memory in a step."""

    read: int
    written: int
