"""What a user of ``zerort plan`` says of tensors by their names: which are tied, not trained, or updated by rows.

--tie UNIT=NAME    a unit that uses another one's tensor      full names: embed.table
--rows NAME        a table of which batches touch few rows    full names
--frozen G         tensors that are not trained               patterns of local names
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable

from zerort.cli.arguments import UsageError
from zerort.cli.plan.models import Model
from zerort.engine.model.tensors import full_name
from zerort.layout.dtypes import TRAINABLE

__all__ = ["frozen_in", "rows_in", "ties_of"]


def _places(model: Model) -> dict[str, tuple[str, str]]:
    """Return the unit and the name there of every tensor, by its full name."""
    return {full_name(unit, name): (unit, name) for unit, tensors in model.items() for name in tensors}


def ties_of(options: argparse.Namespace, model: Model) -> dict[str, dict[str, tuple[str, str]]]:
    """Return which units use tensors that others hold.

    Raises:
        UsageError: A tie is none.
    """
    places = _places(model)
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for text in options.tie:
        unit, sign, full = text.partition("=")
        if not sign or full not in places:
            raise UsageError(
                f"Expected --tie UNIT=NAME with a tensor's full name, such as {next(iter(places))!r}; got {text!r}."
            )
        found.setdefault(unit, {})[full] = places[full]
    return found


def frozen_in(options: argparse.Namespace, model: Model) -> Callable[[str], bool]:
    """Return which names are not trained: as the user says, and what no optimizer can train."""
    untrainable = {name for tensors in model.values() for name, spec in tensors.items() if spec.dtype not in TRAINABLE}
    return lambda name: name in untrainable or any(fnmatch.fnmatchcase(name, glob) for glob in options.frozen)


def rows_in(options: argparse.Namespace, model: Model) -> dict[str, list[str]]:
    """Return which tables are gathered and updated by rows, by unit; whether they can be, a forecast says.

    Raises:
        UsageError: One is no tensor, or GPUs compute with them.
    """
    places = _places(model)
    found: dict[str, list[str]] = {}
    for full in dict.fromkeys(options.rows):
        if full not in places:
            tables = (one for one, (unit, name) in places.items() if len(model[unit][name].shape) == 2)
            raise UsageError(
                f"Expected --rows with the full name of a table, such as {next(tables, 'embed.table')!r}; got {full!r}."
            )
        unit, name = places[full]
        found.setdefault(unit, []).append(name)
    if found and options.on_gpus:
        raise UsageError(
            "Expected --rows without --device cuda, which this command has no tables of; got both. "
            "zr.forecast(…, rows=, device='cuda') says what they take on GPUs."
        )
    return found
