"""`optimizer`: any elementwise torch optimizer as an optimizer of the runtime, on this rank's shards.

It is tried once, on a few elements: state must come one element per parameter element, or as one number that all
elements share (a count, say), and a vector cut in two must be updated as the whole is. What does not pass is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zerort.engine.binding import ElementwiseOptimizer, StateSpec, check_lr, kernels_for
from zerort.errors import CallError
from zerort.typing import Array
from zerort_torch.parameters.memory import as_tensor, on_stream_of

__all__ = ["TorchOptimizer", "optimizer"]


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> TorchOptimizer:
    """Return a torch optimizer for `zerort.open`: ``zt.optimizer(torch.optim.RAdam, lr=1e-3)``.

    Args:
        kind: The optimizer's class. It must treat each element on its own: no sums over tensors, no closures.
        **settings: Its own; ``lr`` may be a schedule. Parameter groups may override any of them.

    Raises:
        CallError: It is not elementwise, or does not take these settings.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise CallError(f"Expected a class such as torch.optim.RAdam, got {kind!r}.")
    made = _dataclass_of(kind)  # type: ignore[arg-type]
    try:
        result: TorchOptimizer = made(**settings)
    except TypeError as error:
        raise CallError(f"Expected settings of {kind.__name__}, got others: {error}.") from None
    _try(result)
    return result


class TorchOptimizer(ElementwiseOptimizer):
    """A torch optimizer with its settings as fields. Made by `optimizer`, a class of its own for each of torch's."""

    __slots__ = ()

    torch_kind: type[torch.optim.Optimizer]

    @property
    def kind(self) -> str:
        """What checkpoints know it as."""
        return f"torch.{self.torch_kind.__name__}"

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return the names that torch gives the state; a number that all elements share is kept for each of them."""
        return tuple(StateSpec(name=name) for name in _state_names(self))

    def update_(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        lr: float,
        step: int,
        grad_scale: float,
        copy_out: Array | None,
    ) -> None:
        """Update in place; see `ElementwiseOptimizer.update_`."""
        if param.size == 0:
            return
        with on_stream_of(param):
            self._update(param, grad, state, lr=lr, step=step, grad_scale=grad_scale)
        if copy_out is not None:
            kernels_for(param).round_master(copy_out, param)

    def _update(
        self, param: Array, grad: Array, state: Mapping[str, Array], *, lr: float, step: int, grad_scale: float
    ) -> None:
        target = torch.nn.Parameter(as_tensor(param))
        target.grad = _tensor(grad).to(target.dtype) * grad_scale
        one = _make(self, target, lr=lr)
        kept = {name: as_tensor(state[name]) for name in _state_names(self)}
        if step > 1:
            there = any(getattr(self, setting, None) for setting in ("capturable", "fused"))  # kernels read it then
            where = target.device if there else "cpu"
            one.state[target] = {"step": torch.tensor(float(step - 1), device=where)}
            for name, (shared, whole, dtype) in _kinds(self).items():
                if whole:
                    one.state[target][name] = kept[name]
                elif name != "step":
                    value = kept[name][0].to(dtype=dtype, copy=True)  # torch's numbers are float32 beside float64, too
                    one.state[target][name] = value if shared is torch.Tensor else shared(value.item())
        one.step()
        for name, tensor in kept.items():
            found = one.state[target].get(name)
            if isinstance(found, torch.Tensor) and found.dim():
                if found.data_ptr() != tensor.data_ptr():
                    tensor.copy_(found)
            elif found is not None:
                tensor.fill_(float(found))


def _tensor(array: Array) -> torch.Tensor:
    """Return a gradient as a tensor, which torch wants to be writable: those of NumPy may not be."""
    read_only = isinstance(array, np.ndarray) and not array.flags.writeable
    return as_tensor(array.copy() if read_only else array)


@functools.cache
def _dataclass_of(kind: Any) -> type[TorchOptimizer]:
    fields: list[Any] = []
    for parameter in list(inspect.signature(kind).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty:
            fields.append((parameter.name, Any))
        else:
            fields.append((parameter.name, Any, dataclasses.field(default=parameter.default)))
    made: type[TorchOptimizer] = dataclasses.make_dataclass(
        f"Torch{kind.__name__}",
        fields,
        bases=(TorchOptimizer,),
        namespace={"torch_kind": kind},
        frozen=True,
        kw_only=True,
    )
    return made


def _make(settings: TorchOptimizer, target: torch.nn.Parameter, *, lr: float) -> torch.optim.Optimizer:
    values = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}  # type: ignore[arg-type]
    return settings.torch_kind([target], **(values | {"lr": lr}))


def _key(settings: TorchOptimizer) -> tuple[Any, ...]:
    values = [(one.name, getattr(settings, one.name)) for one in dataclasses.fields(settings)]  # type: ignore[arg-type]
    return settings.torch_kind, *(pair for pair in values if pair[0] != "lr")


_found: dict[str, dict[str, tuple[type, bool, Any]]] = {}


def _kinds(settings: TorchOptimizer) -> dict[str, tuple[type, bool, Any]]:
    """Return the state that torch keeps: by name its type, whether it has one value per element, and its dtype."""
    key = repr(_key(settings))
    if key not in _found:
        target = torch.nn.Parameter(torch.ones(3))
        target.grad = torch.ones(3)
        one = _make(settings, target, lr=1e-3)
        one.step()
        _found[key] = {
            name: (type(value), isinstance(value, torch.Tensor) and value.dim() > 0, getattr(value, "dtype", None))
            for name, value in one.state[target].items()
            if value is not None
        }
        for name, value in one.state[target].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != target.shape:
                _refuse(settings, f"state {name!r} of shape {list(value.shape)} for 3 elements")
            if value is not None and not isinstance(value, (torch.Tensor, int, float)):
                _refuse(settings, f"state {name!r}, which is a {type(value).__name__}")
    return _found[key]


def _state_names(settings: TorchOptimizer) -> list[str]:
    return [name for name in _kinds(settings) if name != "step"]


def _try(settings: TorchOptimizer) -> None:
    """Refuse an optimizer whose update of an element depends on others."""
    check_lr(settings.lr)
    lr = settings.lr_at(1) or 1e-3

    def run(values: torch.Tensor) -> torch.Tensor:
        target = torch.nn.Parameter(values.clone())
        one = _make(settings, target, lr=lr)
        for factor in (1.0, 0.3, -2.0):
            target.grad = values * factor
            one.step()
        return target.detach()

    values = torch.tensor([0.5, -2.0, 3.0, 0.25])
    try:
        _kinds(settings)
        whole, halves = run(values), torch.cat([run(values[:2]), run(values[2:])])
    except CallError:
        raise
    except Exception as error:
        _refuse(settings, f"{type(error).__name__}: {error}")
    if not torch.allclose(whole, halves, rtol=1e-6, atol=1e-7):
        _refuse(settings, "a vector that is updated otherwise when it is cut in two")


def _refuse(settings: TorchOptimizer, what: str) -> None:
    raise CallError(
        f"Expected an optimizer that updates each element on its own, got torch.optim.{settings.torch_kind.__name__}: "
        f"{what}. Use one such as torch.optim.AdamW, or zerort's own."
    )
