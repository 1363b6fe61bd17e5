"""`assign_values`: new values for the parameters of a unit, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zerort.buffer import unit_title
from zerort.comm.agreed import agreed, expect_same
from zerort.engine.context import Context
from zerort.engine.model.gather import wait_for_gathers
from zerort.engine.model.section import Section
from zerort.engine.model.tensors import TensorSpec, on_host
from zerort.engine.model.values import agree_on_values
from zerort.errors import CallError, StorageError, UnitStateError, ZerortError
from zerort.typing import Array

__all__ = ["Place", "assign_values"]


class Place(NamedTuple):
    """Where a parameter of a unit is."""

    home: str
    """The unit that holds it: the unit itself, or one that it is tied to."""
    section: Section
    """The section of that."""
    full: str
    """Its full name there."""
    is_gathered: bool
    """Whether somebody uses the gathered form of that unit."""


def assign_values(
    context: Context, unit: str, places: Mapping[str, Place], values: Mapping[str, Array], *, broadcast: bool
) -> None:
    """Set parameters of a unit, master weights included; optimizer state stays. Every rank calls this, between steps.

    Args:
        context: What the runtime's parts share.
        unit: The name of the unit.
        places: Where its parameters are, by name; released.
        values: Whole tensors by name, the same on every rank; those that are not named stay as they are.
        broadcast: Take rank 0's values instead of checking that all ranks have the same.

    Raises:
        CallError: A name or a value cannot be used, or differs between ranks; on every rank.
    """
    with agreed(context.world, "assign", catching=ZerortError):
        values = on_host(values, device=context.device)
        declared = _declare(unit, places, values)
    expect_same(context.world, [unit, list(declared)], what="what is assigned", error=CallError)
    wanted = agree_on_values(context, unit, declared, dict(values), broadcast=broadcast)
    wait_for_gathers(context, (places[name].section for name in wanted))
    # not-gpu: ranks that share memory
    context.world.barrier(name="assign").wait()  # nobody reads what is about to change
    context.update_stream.cancel_prefetch()
    with (
        context.guard.changing("an assignment"),
        agreed(context.world, "assign", catching=StorageError),  # at its end, all have written their parts
    ):
        for name, value in wanted.items():
            places[name].section.assign({places[name].full: value})


def _declare(unit: str, places: Mapping[str, Place], values: Mapping[str, Array]) -> dict[str, TensorSpec]:
    declared = {}
    for name, value in values.items():
        if name not in places:
            raise CallError(f"Expected one of {', '.join(map(repr, places))} of {unit_title(unit)}; got {name!r}.")
        home, section, full, is_gathered = places[name]
        if is_gathered:
            raise UnitStateError(f"Expected {unit_title(home)} released before assign(), got it gathered.")
        shape, dtype = section.layout.of(full).shape, section.layout.dtype
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.name != dtype:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise CallError(f"Expected {name!r} of {unit_title(unit)} as {dtype}{list(shape)}, got {got}.")
        declared[name] = TensorSpec(shape, dtype)
    return declared
