"""The ZeRO walk over a `ByteModel`, and the same training in one process without zerort.

    Walk(rt, model, text)    register, then ``train(steps)``: gather, compute, reduce, step
    Reference(model, text)   the same micro-batches, plain arrays, an AdamW written as in a textbook

What the tests at all numbers of ranks compare, and what ``zerort bench step`` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zerort.engine import Runtime, StepReport, Unit
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText

__all__ = ["Reference", "Walk"]


class Walk:
    """One rank's side of training a byte model under any plan.

    Args:
        rt: The runtime; the units are registered here.
        model: What to train.
        text: Its batches; a step's rows are shared out over all micro-batches of all ranks.
        dtype: Of the parameters.
    """

    def __init__(self, rt: Runtime, model: ByteModel, text: ByteText, *, dtype: str = "float32") -> None:
        self.rt, self.model, self.text = rt, model, text
        kind = numpy_dtype(dtype)
        self.units: dict[str, Unit] = {
            name: rt.register(name, {local: value.astype(kind) for local, value in model.init(name).items()})
            for name in model.units
        }
        self.position = 0
        """The next batch: all there is to know about where in the data this is."""
        self.reports: list[StepReport] = []

    def train(self, steps: int) -> list[float]:
        """Train and return every step's loss over all ranks."""
        losses = []
        for _ in range(steps):
            mine = [self._micro_step(shard) for shard in self.rt.micro_batches]
            self.reports.append(self.rt.step())
            self.position += 1
            losses.append(self.rt.mean(mine))
        return losses

    def _micro_step(self, shard: int) -> float:
        of = self.rt.micro_batch_count
        x, y = self.text.batch(self.position, shard, of=of)
        weight = of * len(x) / self.text.rows
        saved = {}
        for name, unit in self.units.items():
            with unit.gathered() as p:
                x, saved[name] = self.model.forward(name, p, x)
        loss, slope = self.model.loss(x, y, weight=weight)
        if self.rt.loss_scale != 1.0:
            slope *= slope.dtype.type(self.rt.loss_scale)
        for name, unit in reversed(self.units.items()):
            with unit.gathered() as p:
                slope, gradients = self.model.backward(name, p, saved[name], slope)
            unit.reduce({local: _like(gradient, _dtype_of(unit)) for local, gradient in gradients.items()})
        return loss

    def parameters(self) -> dict[str, Array]:
        """Return a copy of all parameters, by unit and name, on every rank, as NumPy arrays."""
        found = {}
        for name, unit in self.units.items():
            with unit.gathered() as p:
                found.update({f"{name}.{local}": np.array(self.rt.device.fetch(p[local])) for local in p})
        return found


def _dtype_of(unit: Unit) -> np.dtype[Any]:
    """Return the dtype of a unit's parameters."""
    return unit.sections[0].parameters.dtype


def _like(gradient: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # what does not fit becomes infinite: loss scaling looks for that
        return gradient if gradient.dtype == dtype else gradient.astype(dtype)


class Reference:
    """The same training in one process, without zerort.

    Args:
        model: What to train.
        text: Its batches.
        lr: From the number of the update, counted from 1, to the learning rate.
        weight_decay: Of those that decay.
        decays: Which do, by full name.
        clip_norm: Largest norm of all gradients together.
        shards: Micro-batches that a step's rows are cut into; what sums them up is float64.
        dtype: Of the parameters: float32 or float64.
    """

    def __init__(
        self,
        model: ByteModel,
        text: ByteText,
        *,
        lr: Callable[[int], float],
        weight_decay: float = 0.0,
        decays: Callable[[str], bool] = lambda name: True,
        clip_norm: float | None = None,
        shards: int = 1,
        dtype: str = "float32",
    ) -> None:
        self.model, self.text, self.lr, self.shards = model, text, lr, shards
        self.weight_decay, self.decays, self.clip_norm = weight_decay, decays, clip_norm
        self.units = {
            name: {local: value.astype(dtype) for local, value in model.init(name).items()} for name in model.units
        }
        self.moments: dict[str, tuple[Array, Array]] = {}
        self.updates = 0
        self.norms: list[float] = []

    def train(self, steps: int, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> list[float]:
        """Train with AdamW and return every step's loss."""
        losses = []
        for _ in range(steps):
            loss, gradients = 0.0, {name: np.zeros(value.shape) for name, value in self.parameters().items()}
            for shard in range(self.shards):
                loss += self._add_gradients(shard, gradients)
            losses.append(loss / self.shards)
            self.updates += 1
            norm = float(np.sqrt(sum(float((g * g).sum()) for g in gradients.values()))) / self.shards
            self.norms.append(norm)
            clip = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
            for name, gradient in gradients.items():
                self._update(name, gradient * (clip / self.shards), betas, eps)
        return losses

    def _add_gradients(self, shard: int, into: dict[str, Array]) -> float:
        x, y = self.text.batch(self.updates, shard, of=self.shards)
        saved = {}
        for name in self.model.units:
            x, saved[name] = self.model.forward(name, self.units[name], x)
        loss, slope = self.model.loss(x, y, weight=self.shards * len(y) / self.text.rows)
        for name in reversed(self.model.units):
            slope, gradients = self.model.backward(name, self.units[name], saved[name], slope)
            for local, gradient in gradients.items():
                into[f"{name}.{local}"] += gradient
        return loss

    def _update(self, name: str, gradient: Array, betas: tuple[float, float], eps: float) -> None:
        unit, local = name.split(".", 1)
        kept = self.units[unit][local]
        param = kept.astype(np.float64)
        first, second = self.moments.setdefault(name, (np.zeros(param.shape), np.zeros(param.shape)))
        first += (1 - betas[0]) * (gradient - first)
        second += (1 - betas[1]) * (gradient * gradient - second)
        lr = self.lr(self.updates)
        param *= 1 - lr * (self.weight_decay if self.decays(name) else 0.0)
        root = np.sqrt(second / (1 - betas[1] ** self.updates)) + eps
        param -= lr * first / (1 - betas[0] ** self.updates) / root
        self.units[unit][local] = param.astype(kept.dtype)

    def parameters(self) -> dict[str, Array]:
        """Return all parameters, by unit and name."""
        return {f"{name}.{local}": value for name, unit in self.units.items() for local, value in unit.items()}
