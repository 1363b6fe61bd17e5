"""What a checkpoint holds of a runtime: the values of every unit, and the numbers beside them.

    parameter          master weights where there are any, else the parameters themselves
    parameter.int8 …   frozen parameters that rest as codes: these
    exp_avg, row …     every kind of optimizer state, in the form in which it is kept
    gathered           what ranks compute with, where that is made of differences
    residual 0 …       what coding has lost of each sender's gradients, if that is kept
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
from zerort.checkpoint.format.coded import coded_tensors, parameter_kind
from zerort.checkpoint.format.schema import COUNT, Each, Where, expect
from zerort.checkpoint.value import OffloadedArray
from zerort.comm import Group
from zerort.comm.agreed import raise_together
from zerort.data import Cursor
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.persist.gathered import GATHERED, gathered_values, spread_base, up_to_date_names
from zerort.engine.persist.recoded import recoded_parameters, recoded_values
from zerort.engine.persist.residuals import Divided
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.decoded_array import DecodedArray
from zerort.engine.residence.halves import JoinedHalves
from zerort.engine.step.facts.rates import check_rates, rates_by_name, restore_rates
from zerort.errors import CheckpointError, StorageError, UnitStateError
from zerort.layout import Partition, Placement, Range
from zerort.optim.forms.sparsity import MASK
from zerort.typing import Array

__all__ = [
    "bring_up_to_date",
    "meta_of",
    "published_values",
    "recreate",
    "restore_meta",
    "spread_loaded",
    "values_in",
    "values_of",
]

_META: Final = {
    "updates": COUNT,
    "senders": COUNT,
    "divisor": COUNT,
    "copies": Where(lambda value: COUNT.test(value) and value > 0, "a whole number above 0"),
    "steps": Each(COUNT),
    "pruned": Each(COUNT),
    "loss_scale": Where(lambda value: value is None or _is_loss_scale(value), "a loss scale"),
    "optimizer": {"kind": str},
    "orders": Each({"length": COUNT, "seed": COUNT, "taken": COUNT}),
    "other_optimizers": Each(str),
    "lr": Each(Where(lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a learning rate")),
}
"""What a load takes over beside the values."""

_DEFAULTS: Final[dict[str, Any]] = {
    "updates": 0,
    "senders": 0,
    "divisor": 0,
    "copies": 1,
    "other_optimizers": {},
    "lr": {},
    "orders": {},
    "pruned": {},
    GATHERED: [],
}
"""The same of a checkpoint that does not say."""


def _is_loss_scale(value: Any) -> bool:
    if type(value) is not dict or set(value) != {"scale", "good_updates"} or not COUNT.test(value["good_updates"]):
        return False
    return type(value["scale"]) in (int, float) and 0 < value["scale"] < math.inf


def bring_up_to_date(units: Units, *, restart: bool = False) -> None:
    """Make up for updates that rows of tables have missed, before they are saved or replaced. No communication.

    Args:
        units: All of them.
        restart: Whether the ranks then count updates from here on, whatever each has counted: after a failure they may
            differ.

    Raises:
        StorageError: The file system refused; on this rank alone.
    """
    for section in units.sections():
        if section.table is not None:
            section.table.catch_up()
            if restart:
                section.table.restart()


def values_of(
    context: Context, units: Units, *, optimizer: bool = True, loading: Manifest | None = None
) -> Iterator[Value]:
    """Yield this rank's part of what a checkpoint stores, or of what one is loaded into, but for residuals."""
    shard = context.mesh.shard
    for unit in units.values():
        for section in unit.sections:
            yield from values_in(section, shard.rank, optimizer=optimizer, loading=loading)
    for one in context.run.attachments:
        yield from one.values(loading=loading is not None)


def values_in(
    section: Section, rank: int, *, optimizer: bool = True, loading: Manifest | None = None
) -> Iterator[Value]:
    """Yield what a checkpoint stores of a section: the part of ``rank``, which is this one.

    Args:
        section: Whose values.
        rank: This one.
        optimizer: Whether state is among them.
        loading: The checkpoint that they are loaded from: state that it holds in another form is converted.
    """
    value = _parameters_of(section, rank)
    yield from [value] if loading is None else recoded_parameters(section, value, rank, loading)
    yield from gathered_values(section, rank, loading)
    if optimizer and section.state is not None:
        for kind, kept in section.state.entries.items():
            others = [] if loading is None else list(recoded_values(section, kept, rank, loading))
            yield from others
            converted = {extent.name for value in others for extent in value.layout.extents}
            if kind == MASK and loading is not None:  # a dense run had none: nothing is pruned
                converted |= section.names - loading.tensors.get(MASK, {}).keys()
            extents = tuple(extent for extent in kept.layout.extents if extent.name not in converted)
            if extents or not converted:
                mine = _range_of(kept.column, kept.partition.of(rank), first=kept.first_of(rank))
                layout = replace(kept.layout, extents=extents)
                sparse = _sparse_in(section) if kind != MASK else frozenset()
                yield Value(kind=kind, layout=layout, partition=kept.partition, mine=mine, sparse=sparse)


def published_values(context: Context, units: Units) -> Iterator[Value]:
    """Yield what is published: parameters as they are gathered, not their master weights, and bindings' buffers."""
    rank = context.mesh.shard.rank
    for unit in units.values():
        for section in unit.sections:
            own = section.partition.of(rank)
            mine = _range_of(section.parameters.elements, own, first=own.first)
            layout, sparse = section.layout, _sparse_in(section)
            yield Value(kind="parameter", layout=layout, partition=section.partition, mine=mine, sparse=sparse)
    for one in context.run.attachments:
        yield from (value for value in one.values(loading=False) if value.kind == "buffer")


def over_world(context: Context, value: Value) -> Value:
    """Return a value as all ranks save it together: the first copy of the model has all of it, the others nothing."""
    nothing = [0] * (context.world.size - context.mesh.shard.size)
    mine = value.mine if context.mesh.copy == 0 else np.empty(0, value.mine.dtype)
    return replace(value, partition=Partition.of_counts([*value.partition.counts, *nothing]), mine=mine)


def _parameters_of(section: Section, rank: int) -> Value:
    state = section.state
    own = section.partition.of(rank)
    if state is None or state.master is None:
        stored = section.parameters
        there = stored.stored_partition.of(rank)
        return Value(
            kind=parameter_kind(stored.rows),
            layout=stored.stored_layout,
            partition=stored.stored_partition,
            mine=_range_of(section.shard, there, first=there.first),
            sparse=_sparse_in(section),
            is_frozen=state is None,
        )
    layout = replace(section.layout, dtype="float32")
    master: Array | OffloadedArray
    if state.reads_parameters:
        first = own.first - state.owned.first
        master = JoinedHalves(section.owned, state.master, first=first, size=own.numel)
    else:
        master = _range_of(state.master, own, first=state.owned.first)
    sparse = _sparse_in(section)
    return Value(kind="parameter", layout=layout, partition=section.partition, mine=master, sparse=sparse)


def _sparse_in(section: Section) -> frozenset[str]:
    """Return the tensors of which so much is pruned that a bitmap takes less; the same on every rank."""
    pruned = {} if section.state is None else section.state.pruned
    return frozenset(name for name, count in pruned.items() if 8 * count > section.layout.of(name).numel)


def _range_of(column: ChunkedArray | DecodedArray, own: Range, *, first: int) -> Array | OffloadedArray:
    """Return a rank's range of a column that begins at element ``first``: an array, or what rests elsewhere."""
    if isinstance(column, DecodedArray) or column.has_offloaded:
        return column
    mine = column.resident_range(own.first - first, own.stop - first)
    return mine.memory if isinstance(mine.memory, np.ndarray) else mine


def meta_of(context: Context, units: Units) -> dict[str, Any]:
    """Return the numbers that are stored beside the values, the same on every rank."""
    is_kept = context.senders is not None and any(one.residual is not None for one in units.sections())
    senders = context.senders.count if is_kept and context.senders is not None else 0
    return {
        "updates": context.run.updates,
        "steps": {name: count for state in units.states() for name, count in state.steps.items()},
        "loss_scale": context.scaler.state() if context.scaler is not None else None,
        "optimizer": context.optimizer.describe(),
        "other_optimizers": _other_optimizers(context, units),
        "lr": rates_by_name(context, units),
        **_coded(units),
        **_pruned(units),
        **up_to_date_names(units, context.mesh.replicate),
        "plan": str(context.budget or context.plan),
        "senders": senders,
        **(Divided.by_steps_of(context).describe() if senders else {}),
        "orders": {name: cursor.describe() for name, cursor in context.run.cursors.items()},
    }


def _coded(units: Units) -> dict[str, Any]:
    """Return what frozen parameters are that are saved as codes, if there are any: their format, dtype and shape."""
    found = {
        extent.name: [section.parameters.rows.name, section.layout.dtype, list(extent.shape)]
        for section in units.sections()
        if section.parameters.rows is not None
        for extent in section.layout.extents
    }
    return {"coded": found} if found else {}


def _pruned(units: Units) -> dict[str, Any]:
    """Return how many elements of each tensor are pruned, if there are such tensors."""
    found = {name: count for state in units.states() for name, count in state.pruned.items()}
    return {"pruned": found} if found else {}


def _other_optimizers(context: Context, units: Units) -> dict[str, str]:
    """Return the kind of each tensor's optimizer, where it is not that of the runtime."""
    kinds = {name: state.optimizer_of(name).kind for state in units.states() for name in state.steps}
    return {name: kind for name, kind in kinds.items() if kind != context.optimizer.kind}


def updates_of(manifest: Manifest) -> int:
    """Return how many updates were done when the checkpoint was written."""
    return int(manifest.meta.get("updates", 0))


def check_loadable(context: Context, units: Units, manifest: Manifest, *, optimizer: bool) -> None:
    """Refuse to load over units in use, the state of another optimizer, or parameters alone beside partial state."""
    held = [unit.name for unit in units.values() if unit.is_gathered]
    if held:
        raise UnitStateError(f"Expected all units released before load(), got {', '.join(held)} gathered.")
    if not optimizer and context.is_partially_updated:
        raise StorageError(
            "Expected whole optimizer state to keep beside loaded parameters, got that of an update or a load "
            f"that was not done as a whole (rank {context.rank}). Load it, too: rt.load(path); or open the runtime "
            "anew."
        )
    _expect_meta(manifest, {"updates": COUNT, GATHERED: [str]})
    _check_coded(units, manifest)
    if optimizer:
        _check_optimizers(context, units, manifest)
        _expect_meta(manifest, _META)
        _expect_orders(context, manifest)
        check_rates(units, manifest.meta.get("lr", {}))


def _check_coded(units: Units, manifest: Manifest) -> None:
    """Raise if codes are those of tensors of another shape: of themselves they tell their number alone."""
    saved = coded_tensors(manifest)
    for section in units.sections():
        for extent in section.layout.extents:
            if extent.name in saved and saved[extent.name].shape != extent.shape:
                raise CheckpointError(
                    f"Expected a checkpoint with {extent.name!r} of shape {extent.shape}, got its codes of shape "
                    f"{saved[extent.name].shape}. Nothing was changed. Build the model that was saved."
                )


def _check_optimizers(context: Context, units: Units, manifest: Manifest) -> None:
    """Raise if the state of some tensor is another optimizer's."""
    described, others = manifest.meta.get("optimizer"), manifest.meta.get("other_optimizers", {})
    found = described.get("kind") if isinstance(described, dict) else None
    kinds = {name: state.optimizer_of(name).kind for state in units.states() for name in state.steps}
    for name, kind in {"": context.optimizer.kind, **kinds}.items():
        saved = others.get(name, found) if isinstance(others, dict) else found
        if saved != kind:
            raise CheckpointError(
                f"Expected a checkpoint with the state of {kind}{f' for {name!r}' * bool(name)}, got one of {saved}. "
                "Open the runtime with that optimizer, or take the parameters alone: rt.load(path, optimizer=False)."
            )


def _expect_meta(manifest: Manifest, schema: Mapping[str, Any]) -> None:
    """Raise unless the numbers that will be taken over are there, before anything is changed."""
    try:
        expect({**_DEFAULTS, **manifest.meta}, schema, at="meta")
    except ValueError as error:
        raise CheckpointError(
            f"Expected the checkpoint of a runtime, got one whose numbers are not: {error}. Nothing was changed. Name "
            "one that rt.save has written."
        ) from None


def _expect_orders(context: Context, manifest: Manifest) -> None:
    """Raise if an order that is being taken was one over another dataset when the checkpoint was written."""
    for name, saved in manifest.meta.get("orders", {}).items():
        now = context.run.cursors.get(name)
        if now is not None and (now.length, now.seed) != (saved["length"], saved["seed"]):
            raise CheckpointError(
                f"Expected a checkpoint in which the order {name!r} has length={now.length} and seed={now.seed}, got "
                f"one with length={saved['length']} and seed={saved['seed']}. Nothing was changed. Take an order over "
                "the same dataset."
            )


def restore_meta(context: Context, units: Units, manifest: Manifest) -> None:
    """Take the numbers over."""
    meta = manifest.meta
    context.run.updates = context.world.standing.updates = updates_of(manifest)
    for state in units.states():
        for name in state.steps:
            state.steps[name] = int(meta["steps"].get(name, 0))
        state.forget_masks(state.pruned.keys() - manifest.tensors.get(MASK, {}).keys())
        for name in state.pruned:
            state.pruned[name] = int(meta.get("pruned", {}).get(name, 0))
    restore_rates(context, units, meta.get("lr", {}))
    if meta.get("senders"):
        context.run.is_weighted = Divided.of_meta(meta).divisor == 0
    if context.scaler is not None and meta.get("loss_scale") is not None:
        context.scaler.restore(meta["loss_scale"])
    _restore_orders(context, meta.get("orders", {}))


def _restore_orders(context: Context, saved: Mapping[str, Any]) -> None:
    """Go to the samples that come next; an order that the checkpoint does not know begins anew."""
    cursors = context.run.cursors
    for name, cursor in cursors.items():
        cursor.restore(saved[name]["taken"] if name in saved else 0)
    cursors.update({name: Cursor(**one) for name, one in saved.items() if name not in cursors})


def recreate(units: Units) -> None:
    """Make everything that rests on a disk anew, as zeros: a failure may have left files that cannot be read."""
    for unit in units.values():
        for section in unit.sections:
            for column in section.columns:
                column.delete()
                column.create()


def spread_loaded(context: Context, units: Units, manifest: Manifest, *, optimizer: bool) -> None:
    """Make every copy agree with what was loaded: each rank has read its own ranges only."""
    shard = context.mesh.shard
    error: Exception | None = None
    for unit in units.values():
        for section in unit.sections:
            state = section.state
            if state is not None and not optimizer:
                state.forget_masks(state.pruned.keys())
            if state is not None and optimizer:
                for kept in state.entries.values():
                    if kept.whole:
                        _spread(shard, kept.column.memory, kept.partition)
            if state is not None and state.master is not None:
                if context.plan.state.placement is Placement.REPLICATED:
                    _spread(shard, state.master.memory, section.partition)
                    if state.reads_parameters:
                        _spread(shard, section.owned.memory, section.partition)
                try:
                    state.round_master_into(section.owned)
                except StorageError as caught:  # on this rank alone: it meets the others all the same
                    error = caught
            section.parameters.changed()
            spread_base(section, shard, manifest)
            # not-gpu: for its error; whoever looks at them waits for the same Ticket
            section.parameters.refresh().wait()
    raise_together(context.world, error, name="load")


def _spread(shard: Group, whole: Array, partition: Partition) -> None:
    """Give every rank the ranges that the others have read."""
    if shard.size > 1:
        mine = whole[partition.of(shard.rank).slice]
        # gpu-wait: a_checkpoint_is_of_what_was_written
        shard.all_gather(mine, out=whole, counts=partition.counts, name="load").wait()
