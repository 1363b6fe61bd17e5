"""`forecast`: how many bytes a rank will hold at rest under a plan, from shapes alone. No memory is touched.

The same layouts, partitions and divisions that a runtime is built from, so the numbers are exact, padding and uneven
weights included: `Runtime.memory` counts the arrays and finds the same. May import: config, layout, optim, engine.*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zerort.buffer import TreeSum
from zerort.config import Plan
from zerort.engine.registration import Division, divide
from zerort.engine.report import MemoryReport
from zerort.engine.section import BLOCK
from zerort.engine.tensors import Frozen, TensorSpec, full_name, is_frozen
from zerort.layout import FlatLayout, Partition, Placement, itemsize
from zerort.layout.flat import ALIGNMENT
from zerort.optim import Optimizer, ParameterGroup, resolve

__all__ = ["forecast"]


def forecast(
    units: Mapping[str, Mapping[str, TensorSpec]],
    *,
    plan: Plan,
    optimizer: Optimizer,
    size: int,
    rank: int = 0,
    groups: Sequence[ParameterGroup] = (),
    frozen: Frozen = False,
    weights: Sequence[float] | None = None,
    gradient_dtype: str | None = None,
    micro_steps: int = 1,
    virtual_shards: int | None = None,
    lenders: Collection[str] = (),
) -> MemoryReport:
    """Return the bytes that ``rank`` of ``size`` will hold at rest.

    Args:
        units: What will be registered: shapes and dtypes by name, by unit.
        plan: What lives where.
        optimizer: Whose state is kept.
        size: Ranks that share the model.
        rank: Whose bytes.
        groups: Other settings for some parameters.
        frozen: Which parameters take no gradient, in every unit.
        weights: How much of every shard each rank takes.
        gradient_dtype: What gradients are summed in; None: the parameter's dtype.
        micro_steps: Calls of reduce that are summed before anything is communicated.
        virtual_shards: Micro-batches of a step in deterministic mode.
        lenders: Units that others are tied to.
    """
    parameter = gradient = state = 0
    alignment, copies = ALIGNMENT, 1  # copies: whole gradients, where whole ones are kept
    if virtual_shards is not None:
        alignment, copies = BLOCK, 2 + TreeSum.depth(virtual_shards // size)
    for name, tensors in units.items():
        full = {full_name(name, local): spec for local, spec in tensors.items()}
        cold = {full_name(name, local) for local in tensors if is_frozen(frozen, local)}
        for part in divide(
            full, frozen=cold.__contains__, resolve=lambda one, shape: resolve(optimizer, groups, one, shape)
        ):
            layout = FlatLayout.build({one: spec.shape for one, spec in part.tensors.items()}, dtype=part.dtype)
            partition = Partition.build(layout.numel, size, weights=weights, alignment=alignment)
            mine = partition.counts[rank]
            parameter += itemsize(part.dtype) * (mine if _is_sharded(plan, "parameter") else layout.numel)
            if part.optimizers is None:
                continue
            whole = micro_steps > 1 or copies > 1 or name in lenders or not _is_sharded(plan, "gradient")
            gradient += itemsize(gradient_dtype or part.dtype) * (copies * layout.numel if whole else mine)
            state += _state_nbytes(part, layout, partition, rank=rank, whole=not _is_sharded(plan, "state"))
    return MemoryReport(parameter=parameter, gradient=gradient, state=state, buckets=0)


def _is_sharded(plan: Plan, part: str) -> bool:
    return getattr(plan, part).placement is Placement.SHARDED


def _state_nbytes(part: Division, layout: FlatLayout, partition: Partition, *, rank: int, whole: bool) -> int:
    assert part.optimizers is not None
    mine = partition.of(rank)
    owned = layout.numel if whole else mine.numel
    nbytes = 0 if part.dtype == "float32" else 4 * owned  # master weights
    having: dict[str, list[str]] = {}
    for extent in layout.extents:
        for spec in part.optimizers[extent.name].states(extent.shape):
            if spec.shape is not None:
                nbytes += itemsize(spec.dtype) * _numel(spec.shape)
            else:
                having.setdefault(f"{spec.name} {spec.dtype}", []).append(extent.name)
    for kind, names in having.items():
        size = itemsize(kind.split()[1])
        if len(names) == len(layout.extents):
            nbytes += size * owned
        else:  # kept without the others, and without padding
            first, last = (0, layout.numel) if whole else mine
            overlaps = layout.overlaps(first, last)
            nbytes += size * sum(o.in_extent.stop - o.in_extent.start for o in overlaps if o.extent.name in names)
    return nbytes


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for axis in shape:
        numel *= axis
    return numel
