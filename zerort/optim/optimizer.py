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
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, TypeAlias

from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.optim.checks import check_number
from zerort.optim.forms.sparsity import MASK, Sparsity
from zerort.optim.kernels import row_kernels_for
from zerort.typing import Array

__all__ = [
    "JSON",
    "ElementwiseOptimizer",
    "Optimizer",
    "Schedule",
    "StateFormat",
    "StateSpec",
    "TensorOptimizer",
    "TensorPart",
    "qualified_name",
    "row_blocks",
]

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
"""What a JSON file can hold."""

Schedule: TypeAlias = Callable[[int], float]
"""From the number of the update, counted from 1, to its learning rate. Any callable will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """State of one kind in blocks of bytes. Tensors and shards begin with a block, so none is cut."""

    name: str
    numel: int
    """Elements of a block."""
    nbytes: int
    """Bytes of a block."""

    @property
    def width(self) -> Fraction:
        """Bytes per element."""
        return Fraction(self.nbytes, self.numel)

    def nbytes_of(self, numel: int) -> int:
        """Return the bytes of some elements, in whole blocks.

        >>> StateFormat(name="int8", numel=256, nbytes=260).nbytes_of(257)
        520
        """
        return -(-numel // self.numel) * self.nbytes

    def bytes_of(self, elements: slice) -> slice:
        """Return where the blocks of elements lie that begin with a block."""
        return slice(elements.start // self.numel * self.nbytes, self.nbytes_of(elements.stop))


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

    format: StateFormat | None = None
    """None: elements of `dtype`. Else blocks of bytes: `dtype` is uint8, and updates get them as `moments.Blocks`."""

    @property
    def width(self) -> Fraction:
        """Bytes per element of the parameter."""
        return Fraction(itemsize(self.dtype)) if self.format is None else self.format.width


_MASK_SPEC: Final = StateSpec(name=MASK, dtype="uint8", format=StateFormat(name="bits", numel=64, nbytes=8))


class Optimizer(abc.ABC):
    """The part that all optimizers share."""

    __slots__ = ("__weakref__",)  # groups know the optimizers they made, as long as anybody uses them

    lr: float | Schedule
    """Learning rate: a number, or a schedule of it."""

    sparsity: Sparsity | None = None
    """How many elements are pruned, and when; None: none, or the optimizer does not know of it."""

    @property
    def kind(self) -> str:
        """The name of the class, as checkpoints know it."""
        return type(self).__name__

    @property
    def master_name(self) -> str:
        """The form that master weights are kept in: a name of `masters.MASTERS`."""
        return "float32"

    def check_parameter(self, name: str, dtype: str) -> None:  # noqa: B027 (most can)
        """Raise CallError if the optimizer cannot keep its state for parameters of this dtype."""

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
        """Return the `states` of a tensor that is updated in ``dtype``, with their own dtypes; and its mask."""
        masks = () if self.sparsity is None else (_MASK_SPEC,)
        return tuple(
            dataclasses.replace(spec, dtype=dtype) if spec.dtype == "parameter" else spec
            for spec in (*self.states(shape), *masks)
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
            param: Parameters, float32 or float64, updated; uint16 if they are kept as remainders (`master_name`).
            grad: Gradient, float32, bfloat16 or float16, with float64 parameters float64; only read.
            state: Arrays by the names of `states`, updated.
            lr: Learning rate of this update.
            step: How many updates this tensor has had, this one included.
            grad_scale: The gradient is multiplied by it first.
            copy_out: Where a bfloat16 or float16 copy of the new parameters goes (`native.round_master`), or None. With
                remainders it holds the upper half of the parameters.
        """

    def update_rows_(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        rows: Array,
        *,
        width: int,
        lr: float,
        step: int,
        grad_scale: float,
    ) -> None:
        """Update some rows of a table in place, as `update_` would; the others stay as they are.

        Args:
            param: All rows, one after the other: float32 or float64.
            grad: A row for each of ``rows``, in the dtype of ``param``.
            state: Arrays by the names of `states`, as long as ``param``.
            rows: Numbers of rows, int64, each once.
            width: Elements of a row.
            lr: Learning rate of this update.
            step: How many updates this tensor has had, this one included.
            grad_scale: The gradient is multiplied by it first.
        """
        for here, (some, *kept) in row_blocks([param, *state.values()], rows, width=width):
            self.update_(
                some,
                grad[here.start * width : here.stop * width],
                dict(zip(state, kept, strict=True)),
                lr=lr,
                step=step,
                grad_scale=grad_scale,
                copy_out=None,
            )


def row_blocks(
    columns: Sequence[Array], rows: Array, *, width: int, write: bool = True
) -> Iterator[tuple[slice, list[Array]]]:
    """Yield a few rows of some arrays at a time, to be changed: which of ``rows``, and copies of them.

    They are copied back when the next ones are asked for; until then they stay in a core's cache.

    Args:
        columns: Arrays of the host or of a GPU, of one length: rows one after the other.
        rows: Numbers of rows, int64, each once.
        width: Elements of a row.
        write: Whether they are copied back.
    """
    kernels = row_kernels_for(columns[0])
    most = max(min(kernels.ROW_BLOCK // width, rows.size), 1)
    room = [kernels.empty(most * width, column.dtype) for column in columns]
    for first in range(0, rows.size, most):
        here = slice(first, min(first + most, rows.size))
        which = rows[here]
        found = [one[: which.size * width] for one in room]
        for values, column in zip(found, columns, strict=True):
            kernels.take_rows(values, column, which, width)
        yield here, found
        for values, column in zip(found, columns, strict=True) if write else ():
            kernels.put_rows(column, values, which, width)


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

    exact: bool = False
    """Whether no bit may depend on how tensors are cut over the ranks."""


class TensorOptimizer(Optimizer):
    """An optimizer that needs sums over whole tensors, of which each rank holds a part."""

    sums_exactly: ClassVar[bool] = False
    """Whether it heeds `TensorPart.exact`: without that it is refused where bits must not depend on the ranks."""

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
    module = inspect.getmodule(named)
    return f"{module.__name__}.{named.__qualname__}" if module else named.__qualname__


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
