"""`consolidate`: from a sharded model back to a plain one, once it is trained."""

from __future__ import annotations

from typing import TypeVar

import torch

from zerort.errors import CallError
from zerort_torch.backward.hooks import carry_over
from zerort_torch.parameters.memory import as_tensor
from zerort_torch.parameters.unit import TorchUnit
from zerort_torch.sharding import sharding_of, unhook, units_within

__all__ = ["consolidate"]

Model = TypeVar("Model", bound="torch.nn.Module")


def consolidate(model: Model) -> Model:
    """Give a sharded model its whole parameters back, on every rank. Every rank calls this, between steps.

    It is a plain model from then on, without our hooks: it needs no runtime, which may be closed, and can be saved,
    copied, converted, compiled and trained by torch's optimizers. Its runtime no longer trains it.

    Args:
        model: The model, changed in place: what `zerort_torch.shard` was given.

    Returns:
        The model.

    Raises:
        CallError: It is a part of a model, in use, or has gradients that no step has used; on every rank.
    """
    sharding = sharding_of(model)
    with sharding.binding.agreed("consolidate"):
        if len(list(units_within(model))) != len(sharding.units):
            raise CallError(
                f"Expected the whole model that was sharded, got a part of it, {type(model).__name__}. Its values "
                "alone: zt.full_state_dict(part), or `with zt.gathered(part):`."
            )
        if any(unit.is_held for unit in sharding.units):
            raise CallError("Expected zt.consolidate(model) after forward and outside of zt.gathered(), got it in use.")
        if sharding.binding.gradients.pending:
            raise CallError(
                "Expected zt.consolidate(model) between steps, got gradients that no step has used. Call rt.step(), or "
                "rt.discard_gradients(), first."
            )
    unhook(model, sharding)
    for unit in sharding.units:
        if unit.weights:
            _give_back(unit)
    return model


def _give_back(unit: TorchUnit) -> None:
    """Put whole parameters of their own into a unit's modules. Every rank calls this."""
    parts = unit.copy_parts(lambda part: as_tensor(part).clone())
    for weight in unit.weights:
        shape = weight.released.shape
        value = parts[weight.part][weight.first : weight.first + shape.numel()].view(shape)
        plain = torch.nn.Parameter(value.clone(), requires_grad=weight.live.requires_grad)
        carry_over(weight.live._backward_hooks, to=plain)
        weight.put(plain)
