"""`TableUnit`: the table of an embedding with ``sparse=True``: forward gathers the rows of its batch, and no others.

    before forward    indices ── unique ──> rows, up to date, as a small parameter; indices into it instead
    backward          its sparse gradient, not coalesced, is this rank's gradient of these rows of the table
    elsewhere         zt.gathered, state_dict, consolidate: the whole table, as any other unit's

Every forward is a collective, also where ranks share memory: a rank whose batch is empty takes part, and one that does
not call the module at all needs ``zt.shard(…, branches=True)``. Inside of ``zt.gathered`` nothing is gathered
(decision 0171).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from zerort.engine.binding import RowGradients, unique_rows
from zerort.typing import Array
from zerort_torch.parameters.hidden import hidden
from zerort_torch.parameters.memory import as_array, as_tensor, outside_transforms
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["TableUnit"]


class TableUnit(TorchUnit):
    """The table of one module. The arguments are those of `TorchUnit`."""

    gathers_in_backward = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self._weight,) = self.weights
        ((self._module, self._attribute),) = self._weight.places
        self._padding = self._module.padding_idx
        self.on_turn: Callable[[TorchUnit], None] = lambda unit: None
        """Called before rows are gathered in forward; see `Turns`."""
        self.take: Callable[..., None] = lambda rows, *, indices: None
        """Called with a small parameter that has its gradient, and the rows of the table that it holds."""

    @property
    def takes_turns(self) -> bool:
        """Whether ranks meet when it is gathered: always."""
        return True

    def hook(self) -> list[Any]:
        """Have its module gather rows before forward; return the hooks' handles."""
        return [
            self._module.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._module.register_forward_hook(self._leave, always_call=True),
        ]

    @hidden
    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the rows that a forward asks for, and have it look them up where they are."""
        if self.is_held:
            return None
        self._check_requires_grad()
        given = args[0] if args else kwargs.get("input")
        unique, places = np.zeros((1, 1)), given  # what is no tensor is refused where all ranks meet
        if isinstance(given, torch.Tensor):
            unique, at = unique_rows(
                given.detach().numpy().reshape(-1).copy()
            )  # also for backward: whoever writes there
            places = torch.arange(unique.size) if at is None else torch.from_numpy(at)
            places = places.view(given.shape).to(given.dtype)
        self.on_turn(self)
        module._parameters[self._attribute] = self._gather(unique)
        padding = np.flatnonzero(unique == self._padding)
        module.padding_idx = int(padding[0]) if padding.size else None
        if args:
            return (places, *args[1:]), kwargs
        return args, {**kwargs, "input": places}

    @hidden
    def _leave(self, module: Any, *rest: object) -> None:
        """Put the stand-in back."""
        if not self.is_held:
            module._parameters[self._attribute] = self._weight.released
            module.padding_idx = self._padding

    def _gather(self, indices: Array) -> torch.nn.Parameter:
        """Return some rows as a parameter whose gradient goes to theirs. Every rank calls this."""
        live = self._weight.live
        with outside_transforms(), self._naming_cures():
            values = as_tensor(self.gather_rows({self._weight.local: indices})[self._weight.local])
            rows = torch.nn.Parameter(values, requires_grad=live.requires_grad)
        if rows.requires_grad:
            rows.register_post_accumulate_grad_hook(partial(self.take, indices=indices))
        return rows

    def join_gather(self) -> None:
        """Take part in gathering rows for other ranks. Every rank calls this, or runs the module's forward."""
        with self._naming_cures():
            self.gather_rows({self._weight.local: np.zeros(0, np.int64)})

    def handed_in(self, gradient: torch.Tensor, indices: Array | None = None) -> Any:
        """Return the gradient of some rows, or of the whole table, as `RowGradients`."""
        device = self._binding.rt.device
        if gradient.layout is torch.strided:
            rows = np.arange(len(gradient)) if indices is None else indices
            return RowGradients(rows, as_array(gradient, device))
        rows = gradient._indices()[0].numpy()
        return RowGradients(rows if indices is None else indices[rows], as_array(gradient._values(), device))
