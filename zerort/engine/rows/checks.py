"""What can be declared, gathered and reduced as rows, and what cannot: each error names the tensor and the cure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort.buffer import unit_title
from zerort.config import Plan
from zerort.engine.model.tensors import TensorSpec, full_name
from zerort.engine.residence.choose import reach
from zerort.errors import CallError, PlanError
from zerort.layout import Placement
from zerort.optim import ElementwiseOptimizer, Optimizer, ParameterGroup, resolve
from zerort.optim.late import late_updates
from zerort.typing import Array, Device, loaded_class, type_name

__all__ = [
    "RowSettings",
    "check_gradient_rows",
    "check_indices",
    "check_rows",
    "check_tables",
    "check_tie",
    "declared_rows",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What tables are trained with, as far as some of it cannot have rows: of an open runtime, or of a forecast."""

    plan: Plan
    """What lives where; with a budget, only how it lies over the ranks."""
    has_budget: bool
    """Whether a budget says the tiers."""
    optimizer: Optimizer
    """How parameters are updated."""
    param_groups: Sequence[ParameterGroup]
    """Other settings for some of them."""
    on_gpus: bool
    """Whether ranks compute on GPUs."""
    has_copies: bool
    """Whether there are several copies of the model."""


def declared_rows(unit: str, rows: Any, *, lazy: Any) -> tuple[str, ...]:
    """Return the names that ``register(rows=)`` was given.

    Raises:
        CallError: They are no names, or there are none to be lazy about.
    """
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not all(isinstance(name, str) for name in rows):
        raise CallError(f'Expected rows of {unit_title(unit)} as names, such as rows=("table",); got {rows!r}.')
    if not isinstance(lazy, bool) or (lazy and not rows):
        raise CallError(
            f"Expected lazy=True or False beside rows= of {unit_title(unit)}, got lazy={lazy!r} and rows={rows!r}."
        )
    return tuple(dict.fromkeys(rows))


def check_rows(
    settings: RowSettings,
    unit: str,
    rows: Sequence[str],
    declared: Mapping[str, TensorSpec],
    *,
    frozen: Collection[str],
    shared: Collection[str],
    lazy: bool,
) -> None:
    """Refuse tables that a runtime cannot keep as rows, before anything is made, announced or forecast.

    Args:
        settings: What they are trained with.
        unit: Whose tables.
        rows: Their names in it.
        declared: All of its parameters.
        frozen: Those that take no gradient.
        shared: Those that have a second name.
        lazy: Whether missed updates are not made up for.

    Raises:
        CallError: A tensor, or its optimizer, cannot have rows.
        PlanError: The plan, or an option of the runtime, cannot.
    """
    for name in rows:
        what = f"rows of {name!r} ({unit_title(unit)})"
        spec = declared.get(name)
        if spec is None:
            known = ", ".join(map(repr, declared))
            raise CallError(f"Expected {what} to be those of one of its parameters, {known}; got no such name.")
        if len(spec.shape) != 2 or spec.shape[1] < 1:
            raise CallError(f"Expected {what} to be those of a table, rows x width; got shape {list(spec.shape)}.")
        if name in frozen:
            raise CallError(f"Expected {what} to be trained, got a frozen table. Leave it out of rows=, or of frozen=.")
        if name in shared:
            raise CallError(f"Expected {what} under one name, got an array with two. Leave it out of rows=.")
        optimizer = resolve(settings.optimizer, settings.param_groups, full_name(unit, name), spec.shape)
        if not isinstance(optimizer, ElementwiseOptimizer):
            raise CallError(
                f"Expected AdamW, SGD or Lion for {what}, got {optimizer.kind}, which looks at whole tensors. Give the "
                f"table settings of its own: zr.ParameterGroup({full_name(unit, name)!r}, …)."
            )
        if optimizer.master_name != "float32" or any(one.format is not None for one in optimizer.states(spec.shape)):
            raise CallError(
                f"Expected {what} with state of full width, got {optimizer}. Keep it whole: "
                f"zr.ParameterGroup({full_name(unit, name)!r}, master='float32', moments='float32')."
            )
        if optimizer.sparsity is not None:
            raise CallError(f"Expected {what} without a Sparsity, got {optimizer.sparsity}. Leave one of them out.")
        if not lazy:
            late_updates(optimizer, "float32")
        _check_settings(settings, what)


def _check_settings(settings: RowSettings, what: str) -> None:
    """Refuse a plan, tiers and copies of the model that rows cannot have."""
    plan, on_gpus = settings.plan, settings.on_gpus
    refused = {
        "with parameters and state in the memory of the GPU, got a plan with other tiers. Use zr.Plan.zero(3), or open "
        "it with device='host'": (
            on_gpus and (settings.has_budget or not {plan.parameter.tier, plan.state.tier} <= reach(on_gpus=True))
        ),
        f"with sharded state, got {plan}. Use zr.Plan.zero(1), 2 or 3": (plan.state.placement is not Placement.SHARDED),
        "in one copy of the model on GPUs, got a mesh with several. Leave replicate= out": (
            settings.has_copies and on_gpus
        ),
        "without secondary=, got a plan that keeps a second copy. Use zr.Plan.zero(3): only rows are gathered": (
            plan.secondary is not None
        ),
    }
    for text, is_so in refused.items():
        if is_so:
            raise PlanError(f"Expected {what} {text}.")


def check_tie(unit: str, name: str, full: str, *, by_rows: bool) -> None:
    """Refuse a tie to a table of which rows are gathered: the unit that is tied to it would need all of it.

    Args:
        unit: The unit that is tied.
        name: What it calls the parameter.
        full: The parameter's full name.
        by_rows: Whether rows of it are gathered.

    Raises:
        CallError: They are.
    """
    if by_rows:
        raise CallError(
            f"Expected to tie {name!r} of {unit_title(unit)} to a parameter that is gathered whole, got {full!r}, "
            "of which rows are. Register it without rows=."
        )


def check_tables(unit: str, named: Any, tables: Collection[str]) -> None:
    """Refuse rows of anything but a unit's tables, or of some of them only: the others would have to come whole.

    Raises:
        CallError: There are such.
    """
    if not isinstance(named, (Mapping, list)) or set(named) != set(tables):
        given = ", ".join(map(repr, named)) if isinstance(named, (Mapping, list)) else type(named).__name__
        raise CallError(
            f"Expected rows of {', '.join(map(repr, tables)) or 'no table'} of {unit_title(unit)}, by name; got "
            f"{given or 'none'}. Declare tables when they are registered: rt.register(…, rows=(name,)); of one that a "
            "batch does not use, name no rows: []."
        )


def check_indices(unit: str, name: str, indices: Any, *, rows: int) -> Array:
    """Return indices of rows as an array, or say which is none.

    Raises:
        CallError: They are no whole numbers in one dimension, or one is out of range.
    """
    what = f"indices of rows of {name!r} ({unit_title(unit)})"
    if isinstance(indices, loaded_class("cupy", "ndarray")):
        raise CallError(f"Expected {what} on the host, got {type_name(indices)}. Copy them: indices.get().")
    try:
        found = np.asarray(indices)
    except ValueError as error:  # lists of different lengths
        raise CallError(f"Expected {what} as whole numbers in one dimension, got {error}.") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise CallError(
            f"Expected {what} as whole numbers in one dimension, got {found.dtype} of shape {list(found.shape)}. "
            "Flatten them: indices.reshape(-1)."
        )
    least, most = (int(found.min()), int(found.max())) if found.size else (0, -1)
    if least < 0 or most >= rows:
        odd = least if least < 0 else most
        raise CallError(f"Expected {what} from 0 to {rows - 1}, got {odd}. Negative ones do not count from the end.")
    return found.astype(np.int64, copy=False)


def check_gradient_rows(
    unit: str, name: str, given: Any, *, shape: tuple[int, ...], dtypes: Sequence[np.dtype[Any]], device: Device
) -> tuple[Array, Array]:
    """Return indices and gradients of rows, or say why they are none.

    Raises:
        CallError: They do not fit each other, or the table.
    """
    what = f"the gradient of {name!r} ({unit_title(unit)})"
    if not isinstance(given, tuple) or len(given) != 2:
        raise CallError(f"Expected {what} as (indices, values), got {type(given).__name__}.")
    indices, values = check_indices(unit, name, given[0], rows=shape[0]), given[1]
    if not device.owns(values):
        raise CallError(f"Expected the values of {what} as {device.arrays}, got {type_name(values)}.")
    if values.shape != (indices.size, shape[1]):
        raise CallError(
            f"Expected the values of {what} in the shape {[indices.size, shape[1]]}, a row for each index; got "
            f"{list(values.shape)}."
        )
    if values.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise CallError(
            f"Expected the values of {what} in {names}, got {values.dtype}. Convert them: "
            f"values.astype({dtypes[0].name!r})."
        )
    return indices, values
