"""`register_unit`: from arrays by name to a `Unit`, agreed on by all ranks.

declare     what each parameter is; one array under two names is one parameter
agree       the same names, shapes, dtypes and values on every rank, or all raise
divide      into sections by dtype and trainability, tensors with the same settings side by side
pack        each rank writes its own part
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from zerort.buffer import unit_title
from zerort.comm.agreed import agreed, expect_same, raise_together
from zerort.engine.context import Context
from zerort.engine.model.division import divide
from zerort.engine.model.section import Section
from zerort.engine.model.slot_set import bucket_slots, gather_slots, summed_slots
from zerort.engine.model.tensors import (
    Frozen,
    TensorSpec,
    aliases_in,
    declare,
    full_name,
    is_frozen,
    on_host,
)
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.model.values import agree_on_values
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.rows.checks import check_rows, check_tie, declared_rows
from zerort.engine.rows.section import RowSection
from zerort.errors import CallError, DeviceMemoryError, StorageError, UnitStateError, ZerortError
from zerort.layout.dtypes import TRAINABLE, gradient_dtype
from zerort.optim import resolve
from zerort.typing import Array

__all__ = ["register_unit"]

Ties = Mapping[str, tuple[Unit, str]]


def register_unit(
    context: Context,
    units: Units,
    name: str,
    params: Mapping[str, Array | TensorSpec],
    *,
    frozen: Frozen,
    ties: Ties,
    broadcast: bool,
    rows: Sequence[str] = (),
    lazy: bool = False,
) -> Unit:
    """Make a unit; see `Runtime.register`. Every rank calls this."""
    declared: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    cold: set[str] = set()
    with agreed(context.world, "register"):  # also of what a callable of the user's raises
        _check_name(units, name)
        params = on_host(params, device=context.device)
        declared = declare(name, params)
        cold = {local for local in declared if is_frozen(frozen, local)}
        aliases = aliases_in(params)
        _check_full_names(units, name, declared)
        _check_ties(units, name, declared, ties)
        _check_trainable(context, name, declared, cold, aliases)
        rows = declared_rows(name, rows, lazy=lazy)
        shared = {*aliases, *aliases.values()}
        check_rows(context.row_settings, name, rows, declared, frozen=cold, shared=shared, lazy=lazy)
    facts = {
        "unit": name,
        "tensors": {local: [list(spec.shape), spec.dtype] for local, spec in declared.items()},
        "frozen": sorted(cold),
        "rows": [sorted(rows), lazy],
        "tied": [sorted(aliases.items()), sorted((local, unit.name, other) for local, (unit, other) in ties.items())],
    }
    expect_same(context.world, facts, what=f"what is registered as {name!r}"[:60], error=CallError)

    values = {local: value for local, value in params.items() if isinstance(value, np.ndarray) and local not in aliases}
    values = agree_on_values(context, name, declared, values, broadcast=broadcast)

    if context.planner is None:
        return _make_unit(
            context, units, name, declared, values, cold=cold, aliases=aliases, ties=ties, rows=rows, lazy=lazy
        )
    apart = {local: spec for local, spec in declared.items() if local not in aliases}
    places = {local: unit.place_of(other) for local, (unit, other) in ties.items()}
    named = {local: (home.name, home.local_name(full)) for local, (home, full) in places.items()}
    with context.planner.transaction():
        context.planner.expect(
            {name: apart}, frozen=cold.__contains__, ties={name: named}, rows={name: rows}, lazy=lazy, more=True
        )
        return _make_unit(
            context, units, name, declared, values, cold=cold, aliases=aliases, ties=ties, rows=rows, lazy=lazy
        )


def _make_unit(
    context: Context,
    units: Units,
    name: str,
    declared: Mapping[str, TensorSpec],
    values: Mapping[str, Array],
    *,
    cold: Collection[str],
    aliases: Mapping[str, str],
    ties: Ties,
    rows: Sequence[str],
    lazy: bool,
) -> Unit:
    """Make a unit that all ranks have agreed on, on all of them or on none."""
    own = {full_name(name, local): spec for local, spec in declared.items() if local not in aliases}
    context.prefetcher.drop_unused()
    sections = tuple(
        (RowSection if part.table else Section)(part.section_name(name), part, context=context)
        for part in divide(
            own,
            frozen={full_name(name, local) for local in cold}.__contains__,
            resolve=lambda full, shape: resolve(context.optimizer, context.param_groups, full, shape),
            frozen_format=context.options.frozen_format,
            tables={full_name(name, local) for local in rows},
            lazy=lazy,
        )
    )
    places: dict[str, tuple[Unit | None, str]] = {}
    for local in declared:
        places[local] = (None, full_name(name, aliases.get(local, local)))
    owners = {local: unit.place_of(other) for local, (unit, other) in ties.items()}
    places.update(owners)
    tied = _tied_arrays(owners.values())
    columns = [column for section in sections for column in section.columns]
    columns += [array for arrays in tied.values() for array in arrays]
    if any(section.tiers.streams for section in sections) or any(one.is_stored for one in columns):
        _make_offloaded(context, units, name, sections, columns)
    error = _pack(sections, {full_name(name, local): value for local, value in values.items()})
    made = Unit(context, name, sections=sections, places=places)
    try:
        reserve_slots(context, made)
        raise_together(context.world, error, name="register")  # all have written their parts
    except ZerortError:
        made.withdraw()
        _delete(columns)
        raise
    made.join_tied_owners(tied)  # not before: they would wait for gradients of a unit that is not there
    return made


def _pack(sections: Sequence[Section], values: Mapping[str, Array]) -> Exception | None:
    """Write this rank's part of the initial values, and return what a disk had against it."""
    try:
        for section in sections:
            section.assign({full: value for full, value in values.items() if full in section.names})
    except (DeviceMemoryError, StorageError) as error:
        return error
    return None


def _tied_arrays(owners: Iterable[tuple[Unit, str]]) -> dict[str, list[ChunkedArray]]:
    """Return what gradients of tied tensors are summed in, by full name, where that is not in memory: not made yet."""
    found: dict[str, list[ChunkedArray]] = {}
    before: Counter[int] = Counter()
    for home, full in dict.fromkeys(owners):
        section = home.section_of(full)
        found[full] = section.tied_arrays(full, number=len(section.tied_buckets) + before[id(section)])
        before[id(section)] += section.bucket is not None
    return found


def _delete(columns: Iterable[ChunkedArray]) -> None:
    for column in columns:
        with contextlib.suppress(ZerortError):
            column.delete()


def _make_offloaded(
    context: Context, units: Units, name: str, sections: Sequence[Section], columns: Sequence[ChunkedArray]
) -> None:
    """Make what of the unit rests on a disk, and what its gradients of others' tensors do, on all ranks or on none."""
    nbytes, what = sum(column.offloaded_nbytes for column in columns), unit_title(name)
    try:
        if context.options.last_step is None:
            context.storage.prepare(nbytes, what=what)
        else:
            from zerort.engine.persist.last_step import room_beside  # here: checkpoints take their time to import

            what += ", and the last step beside the next"
            context.storage.prepare(
                nbytes, what=what, beside=lambda: room_beside(context, units, sections, offloaded=nbytes)
            )
        with agreed(context.world, "offload", catching=ZerortError):
            for column in columns:
                column.create()
    except ZerortError:
        for section in sections:
            section.withdraw()
        _delete(columns)
        raise


def _check_name(units: Units, name: object) -> None:
    if not isinstance(name, str):
        raise CallError(f"Expected a unit's name to be a text, got {name!r}.")
    if name in units:
        raise CallError(f"Expected a new name for a unit, got {name!r}, which is registered. Choose another.")


def _check_full_names(units: Units, name: str, declared: Mapping[str, TensorSpec]) -> None:
    taken = {full: unit.name for unit in units.values() for section in unit.sections for full in section.names}
    for local in declared:
        full = full_name(name, local)
        other = taken.get(full)
        if other is not None:
            raise CallError(
                f"Expected full names of their own for all parameters, got {full!r} of {unit_title(name)} "
                f"and {unit_title(other)}. Rename one of them."
            )


def _check_ties(units: Units, name: str, declared: Mapping[str, TensorSpec], ties: Ties) -> None:
    for local, (unit, other) in ties.items():
        if local in declared:
            raise CallError(f"Expected {local!r} of {unit_title(name)} either in params or in ties, got both.")
        if units.get(unit.name) is not unit or other not in unit.names:
            raise CallError(f"Expected to tie {local!r} to a parameter of a unit of this runtime, got {other!r}.")
        home, full = unit.place_of(other)
        tables = [section for section in home.sections if section.table is not None]
        check_tie(name, local, full, by_rows=any(full in section.names for section in tables))
        if unit.has_gradients:
            raise UnitStateError(f"Expected to tie to {unit_title(unit.name)} before its first gradient of a step.")


def _check_trainable(
    context: Context, name: str, declared: Mapping[str, TensorSpec], cold: set[str], aliases: Mapping[str, str]
) -> None:
    wanted = context.options.gradient_dtype
    for local, spec in declared.items():
        if context.coding is not None:
            context.coding.check_gathered(spec.dtype, what=f"{local!r} of {unit_title(name)}")
        if local in aliases and (local in cold) != (aliases[local] in cold):
            raise CallError(
                f"Expected {local!r} and {aliases[local]!r} of {unit_title(name)}, which are one array, both frozen or "
                "both trainable. Name both in frozen=."
            )
        if local in cold:
            continue
        if spec.dtype not in TRAINABLE:
            raise CallError(
                f"Expected {local!r} of {unit_title(name)} in one of {', '.join(TRAINABLE)}, got {spec.dtype}. Convert "
                f"it: array.astype('float32'); or register it as frozen=[{local!r}]."
            )
        summed_in = gradient_dtype(spec.dtype, wanted, what=f"{local!r} of {unit_title(name)}")
        if context.coding is not None:
            context.coding.check_reduced(summed_in, what=f"{local!r} of {unit_title(name)}")
            optimizer = resolve(context.optimizer, context.param_groups, full_name(name, local), spec.shape)
            context.coding.check_pruned(spec.dtype, optimizer.sparsity, what=f"{local!r} of {unit_title(name)}")


def reserve_slots(context: Context, unit: Unit) -> None:
    """See to it that the unit finds room when it is gathered, when it is reduced, and when it is updated."""
    if not context.device.in_host_memory and any(section.is_offloaded for section in unit.sections):
        tiers = {section.name: section.tiers for section in unit.sections}
        streamed, staged = context.run.sizes.chunk_slots(
            unit.name,
            unit.tensors,
            frozen=[local for local in unit.tensors if local not in unit.trainable],
            tiers=tiers,
        )
        if staged:
            context.staging.reserve(staged)
        if streamed:
            context.update_stream.reserve(streamed)
    gathered = [one.form.slot_nbytes for one in (unit, *unit.tied_owners) if one.form.slot_nbytes]
    if gathered:
        context.slots.gathered.reserve(
            max(gathered), count=gather_slots(len(gathered), prefetch=context.options.prefetch)
        )
    codes = [size for one in (unit, *unit.tied_owners) if (size := one.codes_nbytes)]
    if codes:
        context.slots.codes.reserve(max(codes), count=gather_slots(len(codes), prefetch=context.options.prefetch))
    sent = max((section.sent_nbytes for section in unit.sections), default=0)
    if sent:
        context.slots.sent.reserve(sent, count=context.options.buckets)
    own = [section.bucket for section in unit.sections if section.bucket is not None and section.bucket.needs_slots]
    tied = [] if context.keeps_whole_gradients else list(unit.tied_tensors)
    if own or tied:
        in_flight = context.options.buckets if not context.keeps_whole_gradients else 1
        largest = max((bucket.layout.nbytes for bucket in own), default=0)
        context.slots.buckets.reserve(max(largest, 1), count=bucket_slots(len(own), len(tied), in_flight=in_flight))
    rooms = [section.room_nbytes for section in unit.sections if section.room_nbytes is not None]
    if rooms:
        count = summed_slots(buckets=context.options.buckets, is_tied=False)
        context.slots.summed.reserve(max(rooms), count=count)
    if tied:
        unit.reserve_for_ties()
