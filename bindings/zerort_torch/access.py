"""Parameters outside of forward: `gathered` to read and write them, `full_state_dict` to take them all along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zerort_torch.sharding import sharding_of, units_within
from zerort_torch.state_dict import only_on
from zerort_torch.unit import TorchUnit
from zerort_torch.writes import Look

__all__ = ["full_state_dict", "gathered"]


@contextmanager
def gathered(module: torch.nn.Module, *, write: bool = False) -> Iterator[None]:
    """Have a module's parameters, and those of all in it, at hand for a ``with`` block. Every rank calls this.

    Args:
        module: A sharded model, or a part of one.
        write: Write rank 0's values back at the end of the block. It computes on copies of the rank's own meanwhile;
            what other ranks write is dropped. Without it, nothing may be written.
    """
    units = [unit for unit in units_within(module) if unit.unit is not None]
    with ExitStack() as stack:
        if not write:
            yield from _reading(units, stack)
            return
        live = {unit: stack.enter_context(unit.rewriting()) for unit in units}
        yield
        values = {unit: unit.rewrite_from(parameters) for unit, parameters in live.items()}
    for unit, new in values.items():
        unit.assign(new, broadcast=True)


def _reading(units: list[TorchUnit], stack: ExitStack) -> Iterator[None]:
    """Hold ``units`` for a block that must not write to them."""
    written: list[str] = []
    for unit in units:
        unit.hold()
        stack.callback(_release, unit, written)
    seen = [(unit, weight, Look.at(weight.live)) for unit in units for weight in unit.weights]
    yield
    for unit, weight, look in seen:
        weight.resting.mirror_requires_grad(requires_grad=weight.live.requires_grad)
        if not look.is_of(weight.live):
            written.append(weight.full)
            unit.point_home(weight)
    stack.close()
    if written:
        units[0].refuse_writes(list(dict.fromkeys(written)))


def _release(unit: TorchUnit, written: list[str]) -> None:
    written += unit.release()


def full_state_dict(model: torch.nn.Module, *, root: int | None = 0) -> dict[str, Any]:
    """Return the whole ``state_dict`` of a sharded model, one unit at a time. Every rank calls this.

    Args:
        model: The model, or a part of it.
        root: The rank that gets the parameters; None: all of them. The others get their buffers only.
    """
    sharding_of(model)
    with only_on(root):
        return dict(model.state_dict())
