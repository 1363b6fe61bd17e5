"""What autograd keeps of gathered parameters where they lie in memory that comes and goes: a name instead of bytes.

A graph keeps tensors for backward, weights among them. While a sharded model computes, `SavedWeights` has torch keep
(unit, part, place) for anything that lies in a gathered unit, and gathers the unit again when backward asks. Inside
a checkpointed segment torch's own hooks stand before these: there the segment's weights live as long as it does
(decision 0082).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zerort import Runtime
from zerort.engine.binding import Attachment, unit_title
from zerort.errors import StaleViewError
from zerort_torch.parameters.hidden import hidden
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["SavedWeights"]

_KEPT = 2  # units whose gathered form stays while backward is among them


@dataclass(frozen=True, slots=True)
class _Handle:
    """Where a tensor lies in a unit."""

    unit: TorchUnit
    part: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    update: int
    """Updates that had been done when it was saved."""


class SavedWeights(Attachment):
    """Packs what is saved for backward, and unpacks it. `enter` and `leave` go round a forward.

    Args:
        rt: The runtime.
        units: The units whose gathered form comes and goes.
    """

    def __init__(self, rt: Runtime, units: Iterable[TorchUnit]) -> None:
        self._rt = rt
        self._units = [unit for unit in units if not unit.is_resident]
        for unit in self._units:
            unit.stays = self.must_stay
        self._recent: OrderedDict[TorchUnit, list[torch.Tensor]] = OrderedDict()
        self._open: list[torch.autograd.graph.saved_tensors_hooks | None] = []

    def enter(self) -> None:
        """Have torch ask from now on; inside of a transform of `torch.func`, which cannot, units stay as they are."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._open.append(None)
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def leave(self) -> None:
        """End one `enter`."""
        hooks = self._open.pop() if self._open else None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def forget(self) -> None:
        """Let go of what backward gathered: a step changes it."""
        self._recent.clear()
        for unit in self._units:
            unit.end_stay()

    def nonfinite_hint(self) -> str:
        """Name a cause of NaN that only weights which come and go have; see `Attachment`."""
        return (
            "Or an autograd.Function keeps a weight as an attribute, ctx.w = w: it is NaN once its unit is released. "
            "Keep it by ctx.save_for_backward(w)."
        )

    def must_stay(self) -> bool:
        """Say whether a graph is made that does not ask: of a segment that is computed again, or of a part alone."""
        asks = bool(self._open) and self._open[-1] is not None
        return bool(torch.is_grad_enabled()) and not asks

    @hidden
    def _pack(self, tensor: torch.Tensor) -> Any:
        pointer = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for unit in self._units:
            for index, flat in enumerate(unit.flats):
                if flat.data_ptr() == pointer and flat.dtype is tensor.dtype:
                    unit.on_saved(unit)
                    return _Handle(
                        unit, index, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), self._rt.updates
                    )
        return tensor.detach()  # not itself: a node that keeps its own output would keep itself alive

    @hidden
    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Handle):
            return packed
        if packed.update != self._rt.updates:
            raise StaleViewError(
                f"Expected backward() before the step that follows its forward, got it after update "
                f"{self._rt.updates}: the weights of {unit_title(packed.unit.name)} have changed. Run forward again."
            )
        flats = packed.unit.flats or self._recent.get(packed.unit)
        if flats is None:
            while len(self._recent) >= _KEPT:
                self._recent.popitem(last=False)
            flats = self._recent[packed.unit] = packed.unit.take_turn(packed.unit)
        elif packed.unit in self._recent:
            self._recent.move_to_end(packed.unit)
        return flats[packed.part].as_strided(packed.size, packed.stride, packed.offset)
