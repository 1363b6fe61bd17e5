"""`late_updates`: the updates that rows without a gradient have missed, made up for at once.

A dense update changes every row: weight decay shrinks it, moments move it on and fade. What that does to a row depends
on its own values and on its *age*, how many updates it has missed, and for each age it is a few numbers:

    AdamW   p = D p - m/r (C_0 + C_1 x + C_2 x² + …),  x = -eps/r, r = √v      m and v fade by powers of the betas
    SGD     (p, b) = M (p, b)                                                  a 2 x 2 matrix
    Lion    p = D p - E sign(m)                                                m fades

The numbers of all ages are kept up with every update (`advance`), from the learning rate it had, in float64 and from
factors that are rounded as the kernels round them. AdamW's series converges where eps is small beside √v. The first
term that is left out bounds the error, so each row has as many terms as it needs, mostly one or two; elements for which
all of them are not enough are updated step by step (decision 0155). The arithmetic is in `rows/`, for hosts and GPUs.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.native.scalars import adamw_scalars, lion_scalars, sgd_scalars
from zerort.optim.elementwise import SGD, AdamW, Lion
from zerort.optim.kernels import row_kernels_for
from zerort.optim.optimizer import Optimizer
from zerort.typing import Array

__all__ = ["MOST_MISSED", "LateUpdates", "late_updates"]

MOST_MISSED: Final = 1024
"""Updates that a row may miss: numbers are kept for no more ages. Whoever keeps rows brings older ones up to date."""

_TERMS: Final = 6
"""Of AdamW's series. With six, eps may be 1/600 of √v in float64, and 1/20 in float32."""


class LateUpdates(abc.ABC):
    """What updates without a gradient do to rows, by age. Made by `late_updates`."""

    def __init__(self, optimizer: Any, dtype: np.dtype[Any]) -> None:
        self._optimizer = optimizer
        self._type = dtype.type

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers of all ages."""
        return sum(one.nbytes for one in vars(self).values() if isinstance(one, np.ndarray))

    def _rounded(self, scalars: tuple[float, ...]) -> list[float]:
        """Return factors of an update as its kernel uses them: rounded to what is computed in."""
        return [float(self._type(one)) for one in scalars]

    @abc.abstractmethod
    def advance(self, *, lr: float, step: int) -> None:
        """Count one more update: rows that it does not touch are one update older now.

        Args:
            lr: Its learning rate.
            step: How many updates the tensor has had, this one included.
        """

    @abc.abstractmethod
    def catch_up_(self, param: Array, state: Mapping[str, Array], ages: Array) -> None:
        """Bring rows up to date in place, on the host or on a GPU.

        Args:
            param: 2-D, contiguous, a row for each age: parameters, or their master weights.
            state: The same of each kind of state, by name.
            ages: 1-D, int64, of the host, from 0 to `MOST_MISSED`: updates that each row has missed.
        """


class _LateAdamW(LateUpdates):
    """Missed updates of AdamW."""

    def __init__(self, optimizer: AdamW, dtype: np.dtype[Any]) -> None:
        super().__init__(optimizer, dtype)
        beta1, beta2, self._eps = self._rounded((*optimizer.betas, optimizer.eps))
        self._error = np.finfo(dtype).eps / 8  # of the result, relative: well below its rounding
        ages = np.arange(MOST_MISSED + 1, dtype=np.float64)
        self._powers = np.arange(1.0, _TERMS + 2)[:, np.newaxis]  # of 1/√v, by term; the last term is the bound
        with np.errstate(all="ignore"):  # where a term does not fade, its bound is infinite
            self._fading = (beta1 * np.float64(beta2) ** (-self._powers / 2)) ** ages
        self._mean, self._square = beta1**ages, beta2**ages
        self._decay = np.ones(ages.size)
        self._terms = np.zeros((_TERMS + 1, ages.size))
        self._updates = np.zeros((3, ages.size))  # decay, step size, root correction: of the last update first

    def advance(self, *, lr: float, step: int) -> None:
        """Count one more update."""
        one = self._optimizer
        beta1, beta2 = one.betas
        scalars = adamw_scalars(lr, beta1, beta2, one.eps, one.weight_decay, step, 1.0)
        _, decay, _, _, _, _, root, _, size = self._rounded(scalars)
        self._decay[1:] = self._decay[:-1] * decay
        with np.errstate(all="ignore"):
            self._terms[:, 1:] = self._terms[:, :-1] * decay + size * root**-self._powers * self._fading[:, 1:]
        self._updates[:, 1:] = self._updates[:, :-1].copy()
        self._updates[:, 0] = decay, size, root

    def catch_up_(self, param: Array, state: Mapping[str, Array], ages: Array) -> None:
        """Bring rows up to date in place."""
        row_kernels_for(param).late_adamw_(
            param,
            state["exp_avg"],
            state["exp_avg_sq"],
            ages,
            decays=self._decay,
            means=self._mean,
            squares=self._square,
            terms=self._terms,
            updates=self._updates,
            eps=self._eps,
            error=self._error,
        )


class _LateSGD(LateUpdates):
    """Missed updates of SGD."""

    def __init__(self, optimizer: SGD, dtype: np.dtype[Any]) -> None:
        super().__init__(optimizer, dtype)
        self._matrix = np.zeros((2, 2, MOST_MISSED + 1))  # (p, b) after, given (p, b) before
        self._matrix[0, 0] = self._matrix[1, 1] = 1.0

    def advance(self, *, lr: float, step: int) -> None:
        """Count one more update."""
        one = self._optimizer
        scalars = sgd_scalars(lr, one.momentum, one.dampening, one.weight_decay, 1.0, nesterov=one.nesterov)
        _, decay, momentum, rest, rate = self._rounded(scalars)
        param, running = self._matrix[:, :, :-1].copy()
        gradient = decay * param
        direction = gradient
        if one.momentum:
            running = gradient if step == 1 else momentum * running + rest * gradient
            direction = gradient + momentum * running if one.nesterov else running
        self._matrix[0, :, 1:] = param - rate * direction
        self._matrix[1, :, 1:] = running

    def catch_up_(self, param: Array, state: Mapping[str, Array], ages: Array) -> None:
        """Bring rows up to date in place."""
        row_kernels_for(param).late_sgd_(param, state.get("momentum_buffer"), ages, matrix=self._matrix)


class _LateLion(LateUpdates):
    """Missed updates of Lion."""

    def __init__(self, optimizer: Lion, dtype: np.dtype[Any]) -> None:
        super().__init__(optimizer, dtype)
        _, beta2 = self._rounded(optimizer.betas)
        self._mean = beta2 ** np.arange(MOST_MISSED + 1, dtype=np.float64)
        self._decay = np.ones(MOST_MISSED + 1)
        self._moved = np.zeros(MOST_MISSED + 1)

    def advance(self, *, lr: float, step: int) -> None:
        """Count one more update."""
        one = self._optimizer
        scalars = lion_scalars(lr, one.betas[0], one.betas[1], one.weight_decay, 1.0)
        _, decay, beta1, _, _, _, rate = self._rounded(scalars)
        self._decay[1:] = self._decay[:-1] * decay
        self._moved[1:] = self._moved[:-1] * decay + rate * (beta1 > 0.0) * (self._mean[:-1] > 0.0)

    def catch_up_(self, param: Array, state: Mapping[str, Array], ages: Array) -> None:
        """Bring rows up to date in place."""
        kernels = row_kernels_for(param)
        kernels.late_lion_(param, state["exp_avg"], ages, decays=self._decay, moved=self._moved, means=self._mean)


_LATE: Final[Mapping[type[Optimizer], Callable[[Any, np.dtype[Any]], LateUpdates]]] = {
    AdamW: _LateAdamW,
    SGD: _LateSGD,
    Lion: _LateLion,
}


def late_updates(optimizer: Optimizer, dtype: str) -> LateUpdates:
    """Return what makes up for updates that rows have missed.

    Args:
        optimizer: Whose updates.
        dtype: What it computes in: float32 or float64.

    Raises:
        CallError: What its updates do without a gradient is not known.
    """
    made = _LATE.get(type(optimizer))  # not of a class derived from one: that may update otherwise
    if made is None:
        raise CallError(
            f"Expected AdamW, SGD or Lion to make up for missed updates of rows, got {optimizer.kind}. Register them "
            "with lazy=True: rows without a gradient stay as they are then."
        )
    if isinstance(optimizer, Lion) and 0.0 < optimizer.betas[1] <= 0.5:
        raise CallError(
            f"Expected a Lion whose average fades by less than half in an update, got betas={optimizer.betas}: when it "
            "vanishes cannot be told. Raise the second above 0.5, or register the table with lazy=True."
        )
    return made(optimizer, numpy_dtype(dtype))
