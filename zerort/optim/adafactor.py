"""Adafactor: second moments kept as one number per row and one per column, computed over shards.

A tensor is seen as a matrix (`pieces.folded`), a rank holds a flat range of it, and three things are known only to all
ranks together. They are asked for in two rounds of sums, for all tensors at once (decision 0023):

    round 1   squares of the gradient by row and by column; squares of the parameter
    round 2   squares of the update, which is clipped by its root mean square

Sums are float64, so how a tensor is cut moves the result by rounding only; with `TensorPart.exact` not at all: then
numbers are summed digit by digit, and the largest square is asked for before (`exact.py`). Updates are computed twice,
once for their squares and once for good: keeping them would take as much memory as the gradient.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerort import native
from zerort.errors import CallError
from zerort.optim.checks import check_bool, check_count, check_lr, check_number, check_pair
from zerort.optim.exact import PLAIN, Digits, Summation, largest_square, mark_of, sums_of
from zerort.optim.optimizer import Schedule, StateSpec, TensorOptimizer, TensorPart
from zerort.optim.pieces import PIECE_NUMEL, Piece, folded, pieces
from zerort.typing import Array

__all__ = ["Adafactor"]

_NARROW = 16  # columns; NumPy takes a row at a time, and rows this short (kernels of convolutions) cost it dearly


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(TensorOptimizer):
    """Adafactor (Shazeer and Stern 2018), without momentum and with a learning rate of the user's own.

    Tensors of two or more dimensions are folded to (all but the last, the last) and keep a row and a column; vectors
    and scalars keep one element per element.

    >>> [(state.name, state.shape) for state in Adafactor(lr=0.01).states((4, 3, 5))]
    [('row', (12,)), ('col', (5,))]
    """

    sums_exactly: ClassVar[bool] = True

    lr: float | Schedule
    """Learning rate, or a schedule of it; relative to the parameter's root mean square if `scale_parameter`."""

    decay: float = 0.8
    """At update t, the second moments decay by ``1 - t ** -decay``."""

    eps: tuple[float, float] = (1e-30, 1e-3)
    """Added to the squared gradient; and the least that a parameter's root mean square counts for."""

    clip_threshold: float = 1.0
    """The largest root mean square of an update, before the learning rate."""

    scale_parameter: bool = True
    """Whether the learning rate is multiplied by the root mean square of the parameter."""

    weight_decay: float = 0.0
    """Parameters shrink by ``weight_decay`` times the learning rate in force."""

    def __post_init__(self) -> None:
        check_lr(self.lr)
        check_number("decay", self.decay, above=0.0)
        object.__setattr__(self, "eps", check_pair("eps", self.eps))
        check_number("eps[0]", self.eps[0], minimum=1e-37)  # float32 ends there, and a zero would be divided by
        check_number("clip_threshold", self.clip_threshold, above=0.0)
        check_bool("scale_parameter", self.scale_parameter)
        check_number("weight_decay", self.weight_decay)

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return a row and a column for a matrix, one running square per element for a vector."""
        if len(shape) < 2:
            return (StateSpec(name="exp_avg_sq"),)
        rows, cols = folded(shape)
        return StateSpec(name="row", shape=(rows,)), StateSpec(name="col", shape=(cols,))

    def update_parts_(self, parts: Sequence[TensorPart]) -> Generator[Array, Array, None]:
        """Update in place, asking for sums on the way; see `TensorOptimizer.update_parts_`."""
        tensors = [(_Matrix if len(part.shape) >= 2 else _Vector)(part, eps=self.eps[0]) for part in parts]

        ways = yield from _ways(tensors, _Tensor.largest_moment, _Tensor.largest_param)
        ours = [
            [tensor.square_sums(of_gradient), tensor.param_square_sums(of_param) * self.scale_parameter]
            for tensor, (of_gradient, of_param) in zip(tensors, ways, strict=True)
        ]
        of_all = yield from _summed(ours)
        params = []
        for tensor, way, (sums, of_param) in zip(tensors, ways, of_all, strict=True):
            tensor.absorb(way[0].join(sums), beta=1.0 - tensor.part.step**-self.decay)
            params.append(float(way[1].join(of_param)))

        ways = yield from _ways(tensors, _Tensor.largest_update)
        of_updates = yield from _summed(
            [[tensor.update_square_sums(of_update)] for tensor, (of_update,) in zip(tensors, ways, strict=True)]
        )
        for tensor, param, (of_update,), (sums,) in zip(tensors, params, ways, of_updates, strict=True):
            rate = tensor.part.lr
            if self.scale_parameter:
                rate *= max(self.eps[1], tensor.rms(param))
            clip = max(1.0, tensor.rms(float(of_update.join(sums))) / self.clip_threshold)
            tensor.apply(step_size=rate / clip, keep=1.0 - rate * self.weight_decay)


def _summed(arrays: Sequence[Sequence[Array]]) -> Generator[Array, Array, list[list[Array]]]:
    """Ask for the sums of all tensors' arrays (float64) at once, and return them in the same shapes."""
    if not arrays:
        return []
    total = yield np.concatenate([array.reshape(-1) for of_tensor in arrays for array in of_tensor])
    found, at = [], 0
    for of_tensor in arrays:
        sums = []
        for array in of_tensor:
            sums.append(total[at : at + array.size].reshape(array.shape))
            at += array.size
        found.append(sums)
    return found


def _ways(
    tensors: Sequence[_Tensor], *largest_of: Callable[[_Tensor], float]
) -> Generator[Array, Array, list[list[Summation]]]:
    """Return how each tensor's numbers are summed, asking for the largest squares where sums are to be exact."""
    if not any(tensor.part.exact for tensor in tensors):
        return [[PLAIN for _ in largest_of] for _ in tensors]
    told = yield from _summed([[mark_of(largest(tensor)) for largest in largest_of] for tensor in tensors])
    return [
        [Digits.of(marks, terms=tensor.rows * tensor.cols) for marks in of_tensor]
        for tensor, of_tensor in zip(tensors, told, strict=True)
    ]


class _Tensor(abc.ABC):
    """One tensor during an update: what is the same for matrices and vectors."""

    def __init__(self, part: TensorPart, *, eps: float) -> None:
        numel = math.prod(part.shape)
        if part.first < 0 or part.first + part.param.size > numel:
            raise CallError(
                f"Expected a part of {part.name!r} within its {numel} elements, got {part.param.size} from element "
                f"{part.first} on. Pass the flat index of the first element held."
            )
        check_count(f"step of {part.name!r}", part.step, minimum=1)
        self.part = part
        self.rows, self.cols = folded(part.shape)
        self.eps = eps
        self.dtype = part.param.dtype  # what is computed in

    @abc.abstractmethod
    def square_sums(self, way: Summation) -> Array:
        """Return what this rank adds to the second moments: a row for each of `way`'s sums. Float64."""

    def largest_moment(self) -> float:
        """Return the largest square that `square_sums` sums."""
        return largest_square(gradient for _, gradient in self.gradients())

    def largest_update(self) -> float:
        """Return the largest square of the update."""
        return largest_square(update for _, update in self.updates())

    def largest_param(self) -> float:
        """Return the largest square of a parameter."""
        return largest_square([self.part.param])

    def param_square_sums(self, way: Summation) -> Array:
        """Return the sums of the squares of the parameter, over what this rank holds."""
        held = pieces(self.part.first, self.part.param.size, self.cols)
        return sums_of([way.square_sums(self.part.param[piece.held]) for piece in held], way)

    @abc.abstractmethod
    def absorb(self, sums: Array, *, beta: float) -> None:
        """Take the sums of all ranks into the state, which decays by `beta`."""

    @abc.abstractmethod
    def direct(self, gradient: Array, piece: Piece) -> None:
        """Turn a piece of the scaled gradient into that piece of the update, in place."""

    def gradients(self) -> Iterator[tuple[Piece, Array]]:
        """Yield each piece of the part and its scaled gradient. 1-D, a temporary."""
        buffer = np.empty(min(PIECE_NUMEL, self.part.param.size), self.dtype)
        scale = self.dtype.type(self.part.grad_scale)
        for piece in pieces(self.part.first, self.part.param.size, self.cols):
            gradient = buffer[: piece.held.stop - piece.held.start]
            native.cast_into(gradient, self.part.grad[piece.held])
            gradient *= scale
            yield piece, gradient

    def updates(self) -> Iterator[tuple[Piece, Array]]:
        """Yield each piece of the part and its update, before clipping. 1-D, a temporary."""
        for piece, gradient in self.gradients():
            self.direct(gradient, piece)
            yield piece, gradient

    def update_square_sums(self, way: Summation) -> Array:
        """Return the sums of the squares of the update, over what this rank holds."""
        return sums_of([way.square_sums(update) for _, update in self.updates()], way)

    def rms(self, square_sum: float) -> float:
        """Return the root mean square of the whole tensor, given the sum of its squares."""
        return math.sqrt(square_sum / max(1, self.rows * self.cols))

    def apply(self, *, step_size: float, keep: float) -> None:
        """Make the update: shrink the parameters to `keep` of what they are, and subtract."""
        param, copy_out = self.part.param, self.part.copy_out
        for piece, update in self.updates():
            held = param[piece.held]
            held *= self.dtype.type(keep)
            update *= self.dtype.type(step_size)
            held -= update
        if copy_out is not None:
            native.round_master(copy_out, param)


class _Matrix(_Tensor):
    """A tensor whose second moments are the product of a row and a column, over their mean."""

    def square_sums(self, way: Summation) -> Array:
        sums = np.zeros((way.count, self.rows + self.cols))
        for piece, gradient in self.gradients():
            squares = np.square(gradient, dtype=np.float64).reshape(-1, piece.width)
            for row, part in zip(sums, way.split(squares), strict=True):
                self._add(piece, part, by_row=row[: self.rows], by_col=row[self.rows :])
        return sums

    @staticmethod
    def _add(piece: Piece, squares: Array, *, by_row: Array, by_col: Array) -> None:
        if piece.width <= _NARROW:
            for col in range(piece.width):
                by_row[piece.rows] += squares[:, col]
                by_col[piece.cols.start + col] += squares[:, col].sum()
        else:
            by_row[piece.rows] += squares.sum(axis=1)
            by_col[piece.cols] += squares.sum(axis=0)

    def absorb(self, sums: Array, *, beta: float) -> None:
        row, col = self.part.state["row"], self.part.state["col"]
        if self.rows * self.cols == 0:
            return
        for moment, total, numel in ((row, sums[: self.rows], self.cols), (col, sums[self.rows :], self.rows)):
            moment[:] = beta * moment.astype(np.float64) + (1.0 - beta) * (total / numel + self.eps)
        wide = row.astype(np.float64)
        self.by_row = np.sqrt(wide.mean() / wide).astype(self.dtype)
        self.by_col = np.sqrt(1.0 / col.astype(np.float64)).astype(self.dtype)

    def direct(self, gradient: Array, piece: Piece) -> None:
        matrix = gradient.reshape(-1, piece.width)
        if piece.width <= _NARROW:
            for col in range(piece.width):
                matrix[:, col] *= self.by_row[piece.rows]
                matrix[:, col] *= self.by_col[piece.cols.start + col]
        else:
            matrix *= self.by_row[piece.rows, np.newaxis]
            matrix *= self.by_col[piece.cols]


class _Vector(_Tensor):
    """A tensor whose second moments are kept element by element; no other rank is needed for them."""

    def square_sums(self, way: Summation) -> Array:
        return np.zeros((way.count, 0))

    def largest_moment(self) -> float:
        return 0.0

    def absorb(self, sums: Array, *, beta: float) -> None:
        for piece, gradient in self.gradients():
            moment = self.part.state["exp_avg_sq"][piece.held]
            gradient *= gradient
            gradient += self.dtype.type(self.eps)
            gradient *= self.dtype.type(1.0 - beta)
            moment *= self.dtype.type(beta)
            moment += gradient

    def direct(self, gradient: Array, piece: Piece) -> None:
        gradient /= np.sqrt(self.part.state["exp_avg_sq"][piece.held])
