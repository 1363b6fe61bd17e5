"""`Strays`: trainable parameters that a sharded model computes with and its runtime does not update; refused by name.

came later      a module or a parameter that was put into the model after `shard`
stayed behind   an object that the model came with, or never registered, and that forward still uses: from a list, say

Nothing is looked for in a step unless torch has told of a change: a module got a parameter or a module, or an object
that nobody updates got a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zerort.engine.binding import Attachment, Binding, Record, Verb
from zerort.errors import CallError
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["Strays", "kept_in_containers"]

_watched: WeakKeyDictionary[Any, Strays] = WeakKeyDictionary()  # by module, of every module of a sharded model
_watching: list[Any] = []


class Strays(Attachment):
    """Watches one sharded model for parameters that its runtime does not know.

    Args:
        binding: What torch uses of the runtime.
        model: The model, as it was sharded.
        units: Its units.
    """

    def __init__(self, binding: Binding, model: torch.nn.Module, units: Iterable[TorchUnit]) -> None:
        self._binding = binding
        self._model = ref(model)
        self._known = {id(one) for unit in units for weight in unit.weights for one in (weight.live, weight.released)}
        self._changed = False
        self._behind: dict[str, str] = {}  # objects that got a gradient in this step: what to say of them, by name
        for module in model.modules():
            _watched[module] = self
        if not _watching:
            _watching.append(register_module_parameter_registration_hook(_notice))
            _watching.append(register_module_module_registration_hook(_notice))

    def notice(self, value: object) -> None:
        """Remember that a module of the model was given ``value``."""
        if value is not None and id(value) not in self._known:
            self._changed = True

    def watch_object(self, parameter: torch.nn.Parameter, name: str, what: str) -> None:
        """Refuse a step in which ``parameter``, which nobody updates, got a gradient.

        Args:
            parameter: The object.
            name: What it is to be called.
            what: What it is of that name: ends "the object that 'name' …".
        """
        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_post_accumulate_grad_hook(_note(ref(self), name, what))

    def announce(self, verb: Verb, record: Record) -> None:
        """Refuse a step that would leave out what is trained; see `Attachment`."""
        if verb != "step" or not (self._changed or self._behind):
            return
        error = self._error()
        if error is not None:
            self._binding.complain(error)
            raise error

    def forget(self) -> None:
        """Start the next step; see `Attachment`."""
        self._behind.clear()

    def _error(self) -> CallError | None:
        if self._behind:
            name, what = next(iter(self._behind.items()))
            return CallError(
                f"Expected gradients of parameters that stand in modules, got one for the object that {name!r} {what}: "
                "nobody updates it. In forward, use the module's attribute; keep several of them in an "
                "nn.ParameterList, before zt.shard(model, rt)."
            )
        model = self._model()
        named = () if model is None else model.named_parameters()
        later = [name for name, one in named if one.requires_grad and id(one) not in self._known]
        if not later:
            return None
        shown = ", ".join(map(repr, later[:3])) + (f" and {len(later) - 3} more" if len(later) > 3 else "")
        return CallError(
            f"Expected all trainable parameters of the model to be handed over by zt.shard(model, rt), got {shown}, "
            "which came later: nobody updates them. Build the model before it is sharded; to write new values, use "
            "`with zt.gathered(module, write=True):`; what is not to be trained: requires_grad_(False)."
        )


def kept_in_containers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters that stand in plain lists, tuples and dicts of modules only, with the attribute's full name."""
    registered = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, (list, tuple, dict)) and not attribute.startswith("_"):
                for one in value.values() if isinstance(value, dict) else value:
                    if isinstance(one, torch.nn.Parameter) and id(one) not in registered:
                        yield f"{path}.{attribute}" if path else attribute, one


def _note(strays: ref[Strays], name: str, what: str) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        found = strays()
        if found is not None:
            found._behind[name] = what
            parameter.grad = None

    return note


def _notice(module: torch.nn.Module, name: str, value: object) -> None:
    strays = _watched.get(module)
    if strays is not None:
        strays.notice(value)
