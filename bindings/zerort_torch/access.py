"""Outside of forward: `gathered` parameters to read and write, `full_state_dict`, `gradients` before the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zerort_torch.model.compiled import plain_name
from zerort_torch.model.state_dict import only_on
from zerort_torch.parameters.memory import as_tensor
from zerort_torch.parameters.unit import TorchUnit
from zerort_torch.parameters.writes import Look
from zerort_torch.sharding import sharding_of, units_within

__all__ = ["full_state_dict", "gathered", "gradients"]


@contextmanager
def gathered(module: torch.nn.Module, *, write: bool = False) -> Iterator[None]:
    """Have a module's parameters, and those of all in it, at hand for a ``with`` block. Every rank calls this.

    Args:
        module: A sharded model, or a part of one.
        write: Write rank 0's values back at the end of the block. It computes on copies of the rank's own meanwhile;
            what other ranks write is dropped. Without it, nothing may be written.
    """
    units = [unit for unit in units_within(module) if unit.places]
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
        unit.acquire()
        stack.callback(_release, unit, written)
    seen = [(unit, weight, Look.at(weight.live)) for unit in units for weight in unit.weights]
    yield
    for unit, weight, look in seen:
        weight.released.mirror_requires_grad(requires_grad=weight.live.requires_grad)
        if not look.is_of(weight.live):
            written.append(weight.full)
            unit.point_home(weight)
    stack.close()
    if written:
        units[0].refuse_writes(list(dict.fromkeys(written)))


def _release(unit: TorchUnit, written: list[str]) -> None:
    written += unit.release_noting_writes()


def full_state_dict(model: torch.nn.Module, *, root: int | None = 0) -> dict[str, Any]:
    """Return the whole ``state_dict`` of a sharded model, one unit at a time. Every rank calls this.

    Args:
        model: The model, or a part of it.
        root: The rank that gets the parameters; None: all of them. The others get their buffers only.
    """
    sharding_of(model)
    with only_on(root):
        return dict(model.state_dict())


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of this step, summed over the ranks, by name. Every rank calls this after its last backward.

    Divided by ``rt.micro_batch_count``, which is ranks × micro-steps or ``virtual_shards`` (``reduction="sum"``: by
    nothing), and by the loss scale; before clipping. With ``weight=`` the step divides by the weight instead, which is
    not known yet; in a loop of ``rt.join``, by the number of micro-batches that are not repeated. Whole, in copies on
    the host. What no rank had a gradient of is left out, if its unit had none at all, or else zeros. After it comes the
    step, or ``rt.discard_gradients()``: another ``backward()`` is refused.

    Args:
        module: A sharded model, or a part of one: memory is needed for that part's gradients alone.
    """
    sharding_of(module).binding.complete_gradients()
    names = {one: plain_name(name) for name, one in module.named_modules()}
    found = {}
    for unit in units_within(module):
        reduced = unit.reduced_gradients()
        for weight in unit.trained.values():
            place = next(((inside, attribute) for inside, attribute in weight.places if inside in names), None)
            if place is not None and weight.local in reduced:
                path = names[place[0]]
                found[f"{path}.{place[1]}" if path else place[1]] = as_tensor(reduced[weight.local])
    return found
