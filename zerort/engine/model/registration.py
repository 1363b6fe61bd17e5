"""`register_unit`: from arrays by name to a `Unit`, agreed on by all ranks.

declare     what each parameter is; one array under two names is one parameter
agree       the same names, shapes, dtypes and values on every rank, or all raise
divide      into sections by dtype and trainability, tensors with the same settings side by side
pack        each rank writes its own part
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from zerort.buffer import unit_title
from zerort.comm.agreed import agreed, expect_same, raise_together
from zerort.engine.context import Context
from zerort.engine.model.division import divide
from zerort.engine.model.section import Section
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
    facts = {
        "unit": name,
        "tensors": {local: [list(spec.shape), spec.dtype] for local, spec in declared.items()},
        "frozen": sorted(cold),
        "tied": [sorted(aliases.items()), sorted((local, unit.name, other) for local, (unit, other) in ties.items())],
    }
    expect_same(context.world, facts, what=f"what is registered as {name!r}"[:60], error=CallError)

    values = {local: value for local, value in params.items() if isinstance(value, np.ndarray) and local not in aliases}
    values = agree_on_values(context, name, declared, values, broadcast=broadcast)

    if context.planner is None:
        return _make_unit(context, units, name, declared, values, cold=cold, aliases=aliases, ties=ties)
    apart = {local: spec for local, spec in declared.items() if local not in aliases}
    tied_owners = {unit.name for unit, _ in ties.values()}
    with context.planner.transaction():
        context.planner.expect({name: apart}, frozen=cold.__contains__, tied_owners=tied_owners, more=True)
        return _make_unit(context, units, name, declared, values, cold=cold, aliases=aliases, ties=ties)


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
) -> Unit:
    """Make a unit that all ranks have agreed on, on all of them or on none."""
    own = {full_name(name, local): spec for local, spec in declared.items() if local not in aliases}
    context.prefetcher.drop()
    sections = tuple(
        Section(
            part.section_name(name),
            part.tensors,
            optimizers=part.optimizers,
            context=context,
        )
        for part in divide(
            own,
            frozen={full_name(name, local) for local in cold}.__contains__,
            resolve=lambda full, shape: resolve(context.optimizer, context.param_groups, full, shape),
        )
    )
    if any(section.tiers.streams for section in sections):
        _make_resting(context, units, name, sections)
    error = _pack(sections, {full_name(name, local): value for local, value in values.items()})
    places: dict[str, tuple[Unit | None, str]] = {}
    for local in declared:
        places[local] = (None, full_name(name, aliases.get(local, local)))
    for local, (unit, other) in ties.items():
        places[local] = unit.place_of(other)
    made = Unit(context, name, sections=sections, places=places)
    try:
        _reserve_slots(context, made)
        raise_together(context.world, error, name="register")  # all have written their parts
    except ZerortError:
        made.withdraw()
        raise
    made.join_tied_owners()  # not before: they would wait for gradients of a unit that is not there
    return made


def _pack(sections: Sequence[Section], values: Mapping[str, Array]) -> Exception | None:
    """Write this rank's part of the initial values, and return what a disk had against it."""
    try:
        for section in sections:
            section.assign({full: value for full, value in values.items() if full in section.names})
    except (DeviceMemoryError, StorageError) as error:
        return error
    return None


def _make_resting(context: Context, units: Units, name: str, sections: Sequence[Section]) -> None:
    """Make what of the unit rests on a disk, on all ranks or on none."""
    columns = [column for section in sections for column in section.columns]
    nbytes, what = sum(column.resting_nbytes for column in columns), unit_title(name)
    try:
        if context.options.last_step is None:
            context.tiers.prepare(nbytes, what=what)
        else:
            from zerort.engine.persist.last_step import room_beside  # here: checkpoints take their time to import

            what += ", and the last step beside the next"
            context.tiers.prepare(nbytes, what=what, beside=lambda: room_beside(context, units, sections))
        with agreed(context.world, "offload", catching=ZerortError):
            for column in columns:
                column.create()
    except ZerortError:
        for section in sections:
            section.withdraw()
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
        if unit.has_gradients:
            raise UnitStateError(f"Expected to tie to {unit_title(unit.name)} before its first gradient of a step.")


def _check_trainable(
    context: Context, name: str, declared: Mapping[str, TensorSpec], cold: set[str], aliases: Mapping[str, str]
) -> None:
    wanted = context.options.gradient_dtype
    for local, spec in declared.items():
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
        gradient_dtype(spec.dtype, wanted, what=f"{local!r} of {unit_title(name)}")


def _reserve_slots(context: Context, unit: Unit) -> None:
    """See to it that the unit finds room when it is gathered, when it is reduced, and when it is updated."""
    staged = max((section.staged_nbytes for section in unit.sections), default=0)
    if staged:
        context.stage.reserve(staged)
    streamed = max((section.streamed_nbytes for section in unit.sections), default=0)
    if streamed:
        context.tiers.reserve(streamed)
    if unit.form.slot_nbytes:
        context.slots.gathered.reserve(
            unit.form.slot_nbytes, count=context.options.prefetch + 1 + unit.tied_owner_count
        )
    buckets = [section.bucket for section in unit.sections if section.bucket is not None]
    needing = [bucket for bucket in buckets if bucket.needs_slots]
    if needing:
        in_flight = context.options.buckets if any(bucket.leaves_slots_busy for bucket in needing) else 1
        largest = max(bucket.layout.nbytes for bucket in needing)
        context.slots.buckets.reserve(max(largest, 1), count=in_flight + len(needing) - 1)
    rooms = [section.room_nbytes for section in unit.sections if section.room_nbytes is not None]
    if rooms:
        context.slots.summed.reserve(max(rooms), count=context.options.buckets)
