"""What a checkpoint holds of a runtime: the values of every unit, and the numbers beside them.

    parameter          master weights where there are any, else the parameters themselves
    exp_avg, row …     every kind of optimizer state
    buffer …           what bindings add
    meta               updates, each tensor's own count, loss scale, optimizer and plan

Any plan and any number of ranks can read it: values are stored by tensor name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from zerort.checkpoint import Manifest, Value
from zerort.checkpoint.schema import COUNT, Each, Where, expect
from zerort.comm import Group
from zerort.comm.agreed import raise_together
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.errors import CheckpointError, StorageError, UnitStateError
from zerort.layout import Partition, Placement, Range
from zerort.typing import Array

__all__ = ["meta_of", "recreate", "restore_meta", "spread_loaded", "values_in", "values_of"]

_META: Final = {
    "updates": COUNT,
    "steps": Each(COUNT),
    "loss_scale": Where(lambda value: value is None or _is_loss_scale(value), "a loss scale"),
    "optimizer": {"kind": str},
}
"""What a load takes over beside the values."""


def _is_loss_scale(value: Any) -> bool:
    if type(value) is not dict or set(value) != {"scale", "good_updates"} or not COUNT.test(value["good_updates"]):
        return False
    return type(value["scale"]) in (int, float) and 0 < value["scale"] < math.inf


def values_of(context: Context, units: Units, *, optimizer: bool = True, loading: bool = False) -> Iterator[Value]:
    """Yield what a checkpoint stores, or what one is loaded into: this rank's part of each."""
    rank = context.mesh.shard.rank
    for unit in units.values():
        for section in unit.sections:
            yield from values_in(section, rank, optimizer=optimizer)
    for one in context.run.attachments:
        yield from one.values(loading=loading)


def values_in(section: Section, rank: int, *, optimizer: bool = True) -> Iterator[Value]:
    """Yield what a checkpoint stores of a section: the part of ``rank``, which is this one."""
    yield _parameters_of(section, rank)
    if optimizer and section.state is not None:
        for kind, kept in section.state.entries.items():
            mine = _range_of(kept.column, kept.partition.of(rank), first=kept.first_of(rank))
            yield Value(kind=kind, layout=kept.layout, partition=kept.partition, mine=mine)


def over_world(context: Context, value: Value) -> Value:
    """Return a value as all ranks save it together: the first copy of the model has all of it, the others nothing."""
    nothing = [0] * (context.world.size - context.mesh.shard.size)
    mine = value.mine if context.mesh.copy == 0 else np.empty(0, value.mine.dtype)
    return replace(value, partition=Partition.of_counts([*value.partition.counts, *nothing]), mine=mine)


def _parameters_of(section: Section, rank: int) -> Value:
    state = section.state
    own = section.partition.of(rank)
    if state is None or state.master is None:
        mine = _range_of(section.shard, own, first=own.first)
        is_frozen = state is None
        return Value(
            kind="parameter", layout=section.layout, partition=section.partition, mine=mine, is_frozen=is_frozen
        )
    layout = replace(section.layout, dtype=state.master.dtype.name)
    master = _range_of(state.master, own, first=state.owned.first)
    return Value(kind="parameter", layout=layout, partition=section.partition, mine=master)


def _range_of(column: ChunkedArray, own: Range, *, first: int) -> Array | ChunkedArray:
    """Return a rank's range of a column that begins at element ``first``: an array, or what rests elsewhere."""
    if column.streams:
        return column
    mine = column.part_of(own.first - first, own.last - first)
    return mine.memory if isinstance(mine.memory, np.ndarray) else mine


def meta_of(context: Context, units: Units) -> dict[str, Any]:
    """Return the numbers that are stored beside the values, the same on every rank."""
    return {
        "updates": context.run.updates,
        "steps": {name: count for state in units.states() for name, count in state.steps.items()},
        "loss_scale": context.scaler.state() if context.scaler is not None else None,
        "optimizer": context.optimizer.describe(),
        "plan": str(context.budget or context.plan),
    }


def updates_of(manifest: Manifest) -> int:
    """Return how many updates were done when the checkpoint was written."""
    return int(manifest.meta.get("updates", 0))


def check_loadable(context: Context, units: Units, manifest: Manifest, *, optimizer: bool) -> None:
    """Refuse to load over units in use, the state of another optimizer, or parameters alone beside partial state."""
    held = [unit.name for unit in units.values() if unit.is_gathered]
    if held:
        raise UnitStateError(f"Expected all units released before load(), got {', '.join(held)} gathered.")
    if not optimizer and context.tiers.is_partially_updated:
        raise StorageError(
            "Expected whole optimizer state to keep beside loaded parameters, got that of an update or a load "
            f"that was not done as a whole (rank {context.rank}). Load it, too: rt.load(path); or open the runtime "
            "anew."
        )
    _expect_meta(manifest, {"updates": COUNT})
    described = manifest.meta.get("optimizer")
    found = described.get("kind") if isinstance(described, dict) else None
    if optimizer and found != context.optimizer.kind:
        raise CheckpointError(
            f"Expected a checkpoint with the state of {context.optimizer.kind}, got one of {found}. Open the runtime "
            "with that optimizer, or take the parameters alone: rt.load(path, optimizer=False)."
        )
    if optimizer:
        _expect_meta(manifest, _META)


def _expect_meta(manifest: Manifest, schema: Mapping[str, Any]) -> None:
    """Raise unless the numbers that will be taken over are there, before anything is changed."""
    try:
        expect({"updates": 0, **manifest.meta}, schema, at="meta")
    except ValueError as error:
        raise CheckpointError(
            f"Expected the checkpoint of a runtime, got one whose numbers are not: {error}. Nothing was changed. Name "
            "one that rt.save has written."
        ) from None


def restore_meta(context: Context, units: Units, manifest: Manifest) -> None:
    """Take the numbers over."""
    meta = manifest.meta
    context.run.updates = context.world.standing.updates = updates_of(manifest)
    for state in units.states():
        for name in state.steps:
            state.steps[name] = int(meta["steps"].get(name, 0))
    if context.scaler is not None and meta.get("loss_scale") is not None:
        context.scaler.restore(meta["loss_scale"])


def recreate(units: Units) -> None:
    """Make everything that rests on a disk anew, as zeros: a failure may have left files that cannot be read."""
    for unit in units.values():
        for section in unit.sections:
            for column in section.columns:
                column.delete()
                column.create()


def spread_loaded(context: Context, units: Units, *, optimizer: bool) -> None:
    """Make every copy agree with what was loaded: each rank has read its own ranges only."""
    shard = context.mesh.shard
    error: Exception | None = None
    for unit in units.values():
        for section in unit.sections:
            state = section.state
            if state is not None and optimizer:
                for kept in state.entries.values():
                    if kept.whole:
                        _spread(shard, kept.column.memory, kept.partition)
            if state is not None and state.master is not None:
                if context.plan.state.placement is Placement.REPLICATED:
                    _spread(shard, state.master.memory, section.partition)
                try:
                    state.round_master_into(section.owned)
                except StorageError as caught:  # on this rank alone: it meets the others all the same
                    error = caught
            section.parameters.changed()
            if not section.parameters.needs_room:
                # not-gpu: for its error; whoever looks at them waits for the same Ticket
                section.parameters.restore().wait()
    raise_together(context.world, error, name="load")


def _spread(shard: Group, whole: Array, partition: Partition) -> None:
    """Give every rank the ranges that the others have read."""
    if shard.size > 1:
        mine = whole[partition.of(shard.rank).slice]
        # gpu-wait: a_checkpoint_is_of_what_was_written
        shard.all_gather(mine, out=whole, counts=partition.counts, name="load").wait()
