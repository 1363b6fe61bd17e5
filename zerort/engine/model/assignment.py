"""`assign_values`: new values for the parameters of a unit, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from zerort.buffer import unit_title
from zerort.comm.agreement import expect_same, raise_together
from zerort.engine.model.tensors import TensorSpec, on_host
from zerort.engine.model.values import agree_on_values
from zerort.errors import CallError, StorageError, UnitStateError, ZerortError
from zerort.typing import Array

if TYPE_CHECKING:
    from zerort.engine.model.unit import Unit
    from zerort.engine.runtime import Runtime

__all__ = ["assign_values"]


def assign_values(rt: Runtime, unit: Unit, values: Mapping[str, Array], *, broadcast: bool) -> None:
    """Set parameters of a unit, master weights included; optimizer state stays. Every rank calls this, between steps.

    Args:
        rt: The owner.
        unit: The unit; released.
        values: Whole tensors by name, the same on every rank; those that are not named stay as they are.
        broadcast: Take rank 0's values instead of checking that all ranks have the same.

    Raises:
        CallError: A name or a value cannot be used, or differs between ranks; on every rank.
    """
    error: ZerortError | None = None
    declared: dict[str, TensorSpec] = {}
    try:
        values = on_host(values, device=rt.device)
        declared = _declare(unit, values)
    except ZerortError as caught:
        error = caught
    raise_together(rt.world, error, name="assign")
    expect_same(rt.world, [unit.name, list(declared)], what="what is assigned", error=CallError)
    agreed = agree_on_values(rt, unit.name, declared, dict(values), broadcast=broadcast)
    rt.wait_for_gathers()
    # not-gpu: ranks that share memory
    rt.world.barrier(name="assign").wait()  # nobody reads what is about to change
    rt.tiers.unforesee()
    with rt.tiers.tearing("an assignment"):
        try:
            for name, value in agreed.items():
                home, full = unit.place_of(name)
                for section in home.sections:
                    if full in section.names:
                        section.assign({full: value})
        except StorageError as caught:
            error = caught
        raise_together(rt.world, error, name="assign")  # all have written their parts


def _declare(unit: Unit, values: Mapping[str, Array]) -> dict[str, TensorSpec]:
    declared = {}
    for name, value in values.items():
        if name not in unit.names:
            raise CallError(
                f"Expected one of {', '.join(map(repr, unit.names))} of {unit_title(unit.name)}; got {name!r}."
            )
        home, full = unit.place_of(name)
        if home.is_gathered:
            raise UnitStateError(f"Expected {unit_title(home.name)} released before assign(), got it gathered.")
        section = next(section for section in home.sections if full in section.names)
        shape, dtype = section.layout.of(full).shape, section.layout.dtype
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.name != dtype:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise CallError(f"Expected {name!r} of {unit_title(unit.name)} as {dtype}{list(shape)}, got {got}.")
        declared[name] = TensorSpec(shape, dtype)
    return declared
