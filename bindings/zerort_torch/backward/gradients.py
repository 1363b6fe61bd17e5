"""`Gradients`: the gradients of a runtime's torch models go into the sum over ranks as soon as autograd has them.

`zerort.engine.binding.GradientOrder` packs and reduces them, in one order on all ranks; what torch adds is here: a hook
on every live parameter, the number of a backward pass, and a warning for those who look for ``.grad``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch

from zerort import Runtime
from zerort.engine.binding import Attachment, Binding, attachment_of
from zerort.typing import Array
from zerort_torch.backward.passes import current_pass, expect_one_end
from zerort_torch.parameters.memory import as_array, on_torchs_stream
from zerort_torch.parameters.table import TableUnit
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["Gradients", "gradients_of"]


class Gradients(Attachment):
    """The gradients of all sharded models of one runtime.

    Args:
        rt: The runtime.
    """

    def __init__(self, rt: Runtime) -> None:
        device = rt.device
        self.binding = Binding(
            rt,
            to_array=functools.partial(as_array, device=device),
            stream=functools.partial(on_torchs_stream, device),
            call_at_end=self._call_at_end,
        )
        """What torch uses of the runtime."""
        self._order = self.binding.gradients
        self._warned = False
        self.is_cleared = False
        """Whether an optimizer's ``zero_grad`` was called since the last step, when this rank had nothing to drop."""

    def add_unit(self, unit: TorchUnit, *, spread: bool) -> None:
        """Take gradients of ``unit`` from now on; every rank adds the same ones, between steps."""
        self._order.add_unit(unit, spread=spread)
        for local, weight in unit.trained.items():
            weight.released.on_gradient = self._on_gradient
            take = self._hook(unit, local)
            weight.live.register_post_accumulate_grad_hook(take)
            if isinstance(unit, TableUnit):
                unit.take = take

    @property
    def units(self) -> Iterator[TorchUnit]:
        """The units whose gradients it takes, in the order in which they came."""
        return (unit for unit in self._order.units if isinstance(unit, TorchUnit))

    @property
    def pending(self) -> bool:
        """Whether this rank had a gradient since the last step."""
        return self._order.pending

    def begin_forward(self) -> None:
        """Close the micro-step before, if need be."""
        self._order.begin_forward()

    def _hook(self, unit: TorchUnit, local: str) -> Callable[..., None]:
        ready = self._order.ready

        def take(parameter: torch.Tensor, *, indices: Array | None = None) -> None:
            gradient, parameter.grad = parameter.grad, None
            unit.on_backward()
            ready(unit, local, unit.handed_in(gradient, indices), backward=current_pass())

        return take

    def _call_at_end(self, function: Callable[[], None]) -> None:
        """Have ``function`` called when the backward pass that is under way ends."""
        expect_one_end(self.binding, "accumulate='sharded'", cure="zr.open(accumulate='local')")
        torch.autograd.Variable._execution_engine.queue_callback(function)

    def _on_gradient(self) -> None:
        """Warn somebody who looks for a gradient that has gone into the sum."""
        if self._warned or not self.pending:
            return
        self._warned = True
        warnings.warn(
            "The gradients of a sharded model were looked at, or cleared, between backward() and rt.step(): .grad is "
            "None there, and the step will use them. To clip them: zr.open(clip_norm=…), not clip_grad_norm_; their "
            "norm: rt.step().grad_norm; their values: zt.gradients(model); to drop them: "
            "rt.discard_gradients(), not zero_grad().",
            RuntimeWarning,
            stacklevel=4,
        )

    def forget(self) -> None:
        """Start the next step; see `Attachment`."""
        self._warned = self.is_cleared = False


def gradients_of(rt: Runtime) -> Gradients:
    """Return what collects the gradients of ``rt``'s sharded models; made and attached at the first call."""
    return attachment_of(rt, Gradients, Gradients)
