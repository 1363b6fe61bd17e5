"""Parameters of the meta device get memory and values, one unit at a time: no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerort.errors import CallError
from zerort_torch.model.finding import FoundUnit

__all__ = ["Init", "is_meta", "materialise", "materialise_buffers"]

Init = Callable[[Any], object]
"""Gives a module's own parameters their values, in place."""


def is_meta(found: FoundUnit) -> bool:
    """Say whether any parameter of the unit is on the meta device."""
    return any(parameter.value.is_meta for parameter in found.parameters)


def materialise(found: FoundUnit, init: Init | None, *, device: torch.device) -> None:
    """Give the unit's parameters memory and values.

    Args:
        found: The unit; its parameters on the meta device are replaced.
        init: Called with every module that owns such parameters; None: its own ``reset_parameters()``.
        device: Where the memory is.

    Raises:
        CallError: A module has no ``reset_parameters`` and there is no ``init``.
    """
    done: set[torch.nn.Module] = set()
    for parameter in found.parameters:
        module, attribute = parameter.places[0]
        if not parameter.value.is_meta:
            continue
        if module not in done:
            done.add(module)
            _fill(module, parameter.full, init, device)
        parameter.value = getattr(module, attribute)


def materialise_buffers(model: torch.nn.Module, init: Init | None, *, device: torch.device) -> None:
    """Give modules that own buffers on the meta device, and no parameters, memory and values."""
    for name, module in model.named_modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _fill(module, name, init, device)


def _fill(module: torch.nn.Module, name: str, init: Init | None, device: torch.device) -> None:
    if init is None:
        init = getattr(type(module), "reset_parameters", None)
    if init is None:
        raise CallError(
            f"Expected {type(module).__name__}, which owns {name!r} on the meta device, to have reset_parameters(), "
            "got none. Pass zt.shard(…, init=function_of_a_module)."
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        init(module)
