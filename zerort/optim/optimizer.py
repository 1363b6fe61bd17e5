"""What an optimizer is: numbers that a user chose, the state it keeps, and an update in place.

    Optimizer                  lr_at · states · describe
    ├── ElementwiseOptimizer   update_: each element on its own, so any cut of a tensor gives the same bits
    └── TensorOptimizer        update_parts_: needs sums over whole tensors, which it asks the ranks for

An optimizer holds no arrays: parameters, gradients and states are the caller's, 1-D, of the rank's own shard. So one
optimizer serves every tensor, rank and plan. Concrete ones are frozen, slotted, keyword-only dataclasses that prove
their fields.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zerort.errors import CallError
from zerort.optim.checks import check_number
from zerort.typing import Array

__all__ = [
    "JSON",
    "ElementwiseOptimizer",
    "Optimizer",
    "Schedule",
    "StateSpec",
    "TensorOptimizer",
    "TensorPart",
    "qualified_name",
]

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
"""What a JSON file can hold."""

Schedule: TypeAlias = Callable[[int], float]
"""From the number of the update, counted from 1, to its learning rate. Any callable will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One kind of optimizer state. It starts as zeros."""

    name: str
    """Such as ``"exp_avg"``; unique within an optimizer."""

    dtype: str = "parameter"
    """Name of the element type; ``"parameter"``: what the parameter is updated in, float64 or float32."""

    shape: tuple[int, ...] | None = None
    """None: one element per parameter element, sharded with the parameter. Else one array of this shape per tensor, the
    same on every rank."""


class Optimizer(abc.ABC):
    """The part that all optimizers share."""

    __slots__ = ("__weakref__",)  # groups know the optimizers they made, as long as anybody uses them

    lr: float | Schedule
    """Learning rate: a number, or a schedule of it."""

    @property
    def kind(self) -> str:
        """The name of the class, as checkpoints know it."""
        return type(self).__name__

    def lr_at(self, update: int) -> float:
        """Return the learning rate of an update.

        Args:
            update: Number of the update, from 1.

        Raises:
            CallError: If the schedule gives anything but a finite number of at least 0.
        """
        if not callable(self.lr):
            return float(self.lr)
        rate = self.lr(update)
        check_number(f"the learning rate that {qualified_name(self.lr)} gives for update {update}", rate)
        return float(rate)

    @abc.abstractmethod
    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return what must be kept for a tensor of this shape."""

    def states_in(self, dtype: str, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return the `states` of a tensor that is updated in ``dtype``, with the names of their own dtypes."""
        return tuple(
            dataclasses.replace(spec, dtype=dtype) if spec.dtype == "parameter" else spec for spec in self.states(shape)
        )

    def describe(self) -> dict[str, JSON]:
        """Return the class and its fields in a form for JSON; a schedule by its qualified name.

        >>> from zerort.optim import SGD
        >>> SGD(lr=0.1, momentum=0.9).describe()["momentum"]
        0.9
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{name: _as_json(value) for name, value in values.items()}}


class ElementwiseOptimizer(Optimizer):
    """An optimizer that updates each element from that element's own gradient and state."""

    __slots__ = ()

    @abc.abstractmethod
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
        """Update in place. All arrays are 1-D, contiguous, of one length, perhaps empty.

        Args:
            param: Parameters, float32 or float64, updated.
            grad: Gradient, float32, bfloat16 or float16, with float64 parameters float64; only read.
            state: Arrays by the names of `states`, updated.
            lr: Learning rate of this update.
            step: How many updates this tensor has had, this one included.
            grad_scale: The gradient is multiplied by it first.
            copy_out: Where a bfloat16 or float16 copy of the new parameters goes, or None.
        """


@dataclass(slots=True, kw_only=True)
class TensorPart:
    """What a rank holds of one tensor for one update, possibly nothing of it."""

    name: str
    """Full name of the tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    first: int
    """Flat index of the first element held."""

    param: Array
    """1-D, float32 or float64, updated."""

    grad: Array
    """1-D, float32, bfloat16 or float16, with float64 parameters float64; only read."""

    state: Mapping[str, Array]
    """Arrays by the names of `Optimizer.states`, updated; those with a shape have it, and are whole on every rank."""

    lr: float
    """Learning rate of this update."""

    step: int
    """How many updates this tensor has had, this one included."""

    grad_scale: float
    """The gradient is multiplied by it first."""

    copy_out: Array | None
    """1-D: where a bfloat16 or float16 copy of the new parameters goes, or None."""


class TensorOptimizer(Optimizer):
    """An optimizer that needs sums over whole tensors, of which each rank holds a part."""

    __slots__ = ()

    @abc.abstractmethod
    def update_parts_(self, parts: Sequence[TensorPart]) -> Generator[Array, Array, None]:
        """Update in place, asking for sums on the way.

        Args:
            parts: The same tensors in the same order on every rank.

        Yields:
            1-D float64 arrays, not empty, as many and as long on every rank. Each is answered (`send`) by its sum over
            all ranks, the same bits on all of them.
        """


def qualified_name(value: Callable[..., Any]) -> str:
    """Return module and name of a callable; of what it wraps, if it is partial, or of its class, if it is an object."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _as_json(value: Any) -> JSON:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_as_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return repr(value)  # a schedule of ours: with its numbers
    if callable(value):
        return qualified_name(value)
    raise CallError(
        f"Expected the fields of an optimizer to be numbers, strings, tuples of them or callables, got {value!r}. "
        "Override describe() to say it in JSON."
    )
