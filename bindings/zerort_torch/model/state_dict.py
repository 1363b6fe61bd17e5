"""`state_dict` and `load_state_dict` of sharded models: full weights under torch's own names, through public hooks.

    state_dict()        every module that owns parameters gathers its unit, hands out copies, and lets it go
    load_state_dict()   it writes to copies of the rank's own, which all ranks then compare and write back

Every rank calls them. `full_state_dict` keeps the copies on one rank only. For shards: ``rt.save`` and ``rt.load``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zerort import Runtime
from zerort.errors import CallError
from zerort_torch.parameters.unit import TorchUnit, Weight

__all__ = ["Owned", "hook_state_dict", "only_on"]

Owned = dict[str, tuple[TorchUnit, Weight]]
"""The sharded parameters that stand in one module, by attribute."""

_root: list[int | None] = [None]  # which rank keeps what state_dict() collects; None: all


@contextmanager
def only_on(root: int | None) -> Iterator[None]:
    """Have `state_dict` keep parameters on one rank only, for the length of a ``with`` block; None: on all."""
    before, _root[0] = _root[0], root
    try:
        yield
    finally:
        _root[0] = before


def hook_state_dict(rt: Runtime, units: Iterable[TorchUnit]) -> list[RemovableHandle]:
    """Hook into every module that owns parameters of ``units``; return the hooks' handles."""
    handles: list[RemovableHandle] = []
    owned: defaultdict[torch.nn.Module, Owned] = defaultdict(dict)
    for unit in units:
        for weight in unit.weights:
            for module, attribute in weight.places:
                owned[module][attribute] = unit, weight
    for module, mine in owned.items():
        handles += _hook_saving(rt, module, mine)
        handles += _hook_loading(module, mine)
    return handles


def _hook_saving(rt: Runtime, module: torch.nn.Module, owned: Owned) -> list[RemovableHandle]:
    units = list(dict.fromkeys(unit for unit, _ in owned.values()))

    def before(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch's signature)
        for unit in units:
            unit.acquire()

    def after(module: torch.nn.Module, found: Any, prefix: str, metadata: object) -> None:
        for attribute in owned:
            name = prefix + attribute
            if name not in found:
                continue  # somebody took it out of the module
            if _root[0] in (None, rt.rank):
                found[name] = found[name].detach().clone()
            else:
                del found[name]
        for unit in units:
            unit.release()

    return [module.register_state_dict_pre_hook(before), module.register_state_dict_post_hook(after)]


def _hook_loading(module: torch.nn.Module, owned: Owned) -> list[RemovableHandle]:
    by_unit: defaultdict[TorchUnit, list[Weight]] = defaultdict(list)
    for unit, weight in owned.values():
        by_unit[unit].append(weight)
    under_way: list[tuple[ExitStack, dict[TorchUnit, dict[str, Any]]]] = []

    def before(
        module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *rest: object
    ) -> None:
        if metadata.pop("assign_to_params_buffers", False):  # or torch would find it there the next time, too
            raise CallError(
                "Expected load_state_dict(…, assign=False) of a sharded model, got assign=True: its parameters lie in "
                "the runtime's memory. Leave assign out, so that values are copied; or load before zt.shard(model, rt)."
            )
        stack = ExitStack()
        under_way.append((stack, {unit: stack.enter_context(unit.rewriting()) for unit in by_unit}))

    def after(module: torch.nn.Module, incompatible: object) -> None:
        stack, live = under_way.pop()
        values = {
            unit: unit.rewrite_from({weight.local: live[unit][weight.local] for weight in weights})
            for unit, weights in by_unit.items()
        }
        stack.close()
        for unit, new in values.items():
            unit.assign(new, broadcast=False)

    return [module.register_load_state_dict_pre_hook(before), module.register_load_state_dict_post_hook(after)]
