"""What ``zerort plan --history`` adds: the memory of whole steps, activations included, from a run's own peaks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zerort.cli.arguments import UsageError
from zerort.cli.plan.models import Model
from zerort.cli.screen import Screen, new_table
from zerort.config import format_bytes
from zerort.engine.sizing.history import MemoryHistory, model_key
from zerort.engine.sizing.predicting import batch_of, prediction
from zerort.errors import CallError

__all__ = ["show_predictions"]


def show_predictions(
    screen: Screen, options: argparse.Namespace, model: Model, layouts: Mapping[str, int]
) -> dict[str, Any]:
    """Show what a step takes under each plan, given the bytes of its layout, and return it for JSON.

    Raises:
        UsageError: The file is no history, or knows nothing of the model.
    """
    memory = "gpu" if options.on_gpus else "host"
    try:
        peaks = MemoryHistory(options.history).of(model_key(model), memory=memory)
    except CallError as error:
        raise UsageError(str(error)) from error
    if not peaks:
        raise UsageError(
            f"Expected steps of this model in {options.history}, got none of these shapes and dtypes on a {memory}. "
            "Train with zr.open(history=…), and plan for the same model: --dtype says what it is trained in."
        )
    try:
        batch = batch_of(peaks, options.batch, where=options.history)
    except CallError as error:
        raise UsageError(str(error)) from error
    if not layouts:
        screen.print("no step is predicted: what does not fit the budget has no layout to add to")
        return {"predicted": {}}
    table = new_table(f"a step with {batch:g} samples at once, on the rank that takes most")
    for name in ("plan", "laid out", "at least", "likely", "at most"):
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    found = {}
    for name, layout in layouts.items():
        one = prediction(peaks, batch=batch, plan=name, layout=layout)
        table.add_row(name, *map(format_bytes, (layout, one.low, one.likely, one.high)))
        found[name] = asdict(one)
    sizes = ", ".join(f"{size:g}" for size in sorted({one.batch for one in peaks if one.batch})) or "unknown"
    screen.print("")
    screen.print(table)
    screen.print(f"from steps of {sizes} samples in {options.history}: the program and activations included")
    return {"predicted": found}
