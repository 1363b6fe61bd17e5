"""Which modules are units: by type, by a callable, or found by repetition; and which parameter belongs to which.

Find the units         blocks that repeat; leaves as large as a block; what is left goes with what encloses it
Walk the modules       each parameter goes to the nearest unit around it; one object in two places is one parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from zerort.errors import CallError
from zerort_torch.model.compiled import named_originals, original
from zerort_torch.model.tables import find_tables

__all__ = ["FoundParameter", "FoundUnit", "Units", "find_units"]

Units = type | tuple[type, ...] | Callable[[str, Any], bool] | None
"""How units are chosen: None finds them; module types; or a callable of a module's name and the module."""

_SMALL = 32  # a block that holds less than this part of the largest goes with what encloses it
_LARGE_LEAF = 2**20  # elements: a leaf of a model without blocks that is a unit of its own
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


@dataclass(slots=True)
class FoundParameter:
    """One parameter, and everywhere it stands."""

    local: str
    """Its name within its unit."""
    full: str
    """Its name in the model; the first, if it has several."""
    value: torch.nn.Parameter
    places: list[tuple[torch.nn.Module, str]]


@dataclass(slots=True)
class FoundUnit:
    """Parameters that will be gathered together."""

    name: str
    """The module's name in the model; empty for the model itself."""
    held_by: list[torch.nn.Module]
    """Modules during whose forward it is gathered."""
    parameters: list[FoundParameter] = field(default_factory=list)
    borrows: set[str] = field(default_factory=set)
    """Names of units that hold parameters which also stand in this one's modules (tied)."""
    is_table: bool = False
    """Whether it is the table of one embedding, of which rows are gathered."""


def find_units(model: torch.nn.Module, units: Units) -> list[FoundUnit]:
    """Return the model's units in the order of its modules, each with its parameters; empty ones are left out.

    Raises:
        CallError: ``units`` cannot be used, or means no module; or a table cannot be gathered by rows.
    """
    modules = dict(named_originals(model))
    tables = find_tables(model)
    if units is None:
        chosen, leaves = _automatic(model)
    else:
        chosen, leaves = _chosen(modules, units), set()
    names = sorted(chosen | leaves | tables | {""}, key=list(modules).index)
    found = {name: FoundUnit(name, [modules[name]], is_table=name in tables) for name in names}
    for name in leaves - tables:  # a parent may use its leaf's weight without calling it: x @ self.embedding.weight.T
        found[name].held_by.append(modules[name.rpartition(".")[0]])
    known: dict[int, tuple[FoundUnit, FoundParameter]] = {}
    for path, module in modules.items():
        unit = found[_nearest(path, found)]
        for attribute, value in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{attribute}" if path else attribute
            if id(value) in known:
                home, parameter = known[id(value)]
                parameter.places.append((module, attribute))
                if home is not unit:
                    unit.borrows.add(home.name)
                continue
            parameter = FoundParameter(
                full[len(unit.name) + 1 :] if unit.name else full, full, value, [(module, attribute)]
            )
            known[id(value)] = unit, parameter
            unit.parameters.append(parameter)
            if unit.name == "" and path:
                unit.held_by.append(module)  # parts of a model are called on their own, too
    return [unit for unit in found.values() if unit.parameters or unit.borrows]


def _nearest(path: str, found: dict[str, FoundUnit]) -> str:
    while path not in found:
        path = path.rpartition(".")[0]
    return path


def _chosen(modules: dict[str, torch.nn.Module], units: Units) -> set[str]:
    if isinstance(units, (type, tuple)):
        kinds = units if isinstance(units, tuple) else (units,)
        if not kinds or not all(isinstance(kind, type) for kind in kinds):
            raise CallError(f"Expected units as module types, a callable or None, got {units!r}.")
        chosen = {name for name, module in modules.items() if isinstance(module, kinds)}
    elif callable(units):
        chosen = {name for name, module in modules.items() if units(name, module)}
    else:
        raise CallError(f"Expected units as module types, a callable or None, got {units!r}.")
    if not chosen:
        raise CallError(
            f"Expected units={units!r} to mean some module of the model, got none. Modules are like "
            f"{', '.join(repr(name) for name in list(modules)[1:4])}."
        )
    return chosen


def _automatic(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of blocks, and of leaves that are as large."""
    blocks = dict(_repeated(model, ""))
    own = {name: _numel(module) for name, module in blocks.items()}
    for name in blocks:
        around = name.rpartition(".")[0]
        while around and around not in blocks:
            around = around.rpartition(".")[0]
        if around:
            own[around] -= _numel(blocks[name])
    largest = max(own.values(), default=0)
    chosen = {name for name, numel in own.items() if numel * _SMALL >= largest}
    enough = largest / 2 if largest else _LARGE_LEAF
    leaves = set()
    for name, module in named_originals(model):
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if name and not inside and not any(True for _ in module.children()) and _numel(module) >= enough:
            leaves.add(name)
    return chosen, leaves


def _repeated(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield modules that have siblings of their type, and parts; those within them, too."""
    inside = original(module).named_children()
    children = [(f"{path}.{name}" if path else name, original(child)) for name, child in inside]
    kinds = Counter(type(child) for _, child in children)
    for name, child in children:
        has_parts = any(True for _ in child.children())
        if kinds[type(child)] > 1 and has_parts and not isinstance(child, _CONTAINERS) and _numel(child):
            yield name, child
        yield from _repeated(child, name)


def _numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
