"""Rows of tables on the host: copied, summed, and brought up to date. `kernels_cuda.py` has the same for a GPU.

    empty take_rows put_rows          rows by their numbers
    sum_rows sum_rows_by_value        gradients of rows that come several times
    adamw_rows_                       an update of some rows where they lie
    late_adamw_ late_sgd_ late_lion_  updates that rows have missed, given what these do by age

Rows to be brought up to date are 2-D copies with an age for each: how many updates it has missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from zerort import native
from zerort.native import adamw_rows_, put_rows, take_rows
from zerort.typing import Array

__all__ = [
    "ROW_BLOCK",
    "adamw_rows_",
    "empty",
    "late_adamw_",
    "late_lion_",
    "late_sgd_",
    "put_rows",
    "sum_rows",
    "sum_rows_by_value",
    "take_rows",
]

ROW_BLOCK: Final = 1 << 15
"""Elements that are best copied out, computed with and copied back at once: they stay in a core's cache."""


def empty(numel: int, dtype: np.dtype[Any]) -> Array:
    """Return memory for some elements."""
    return np.empty(numel, dtype)


def sum_rows(values: Array, order: Array, starts: Array) -> Array:
    """Return sums of rows, in new memory.

    Args:
        values: 2-D.
        order: Numbers of rows of ``values``, int64: those that are summed follow each other.
        starts: Where each sum begins in ``order``, int64, ascending.
    """
    if starts.size == order.size:
        found: Array = values[order]
        return found
    with np.errstate(all="ignore"):  # a sum that is not finite is found where the norm is
        return np.add.reduceat(values[order], starts, axis=0)


def sum_rows_by_value(values: Array, order: Array, starts: Array) -> Array:
    """Return the same, of three and more summands of an element the smallest first: whatever their order."""
    repeats = np.diff(starts, append=order.size)
    sums: Array = values[order[starts]]
    for count in np.unique(repeats[repeats > 1]):
        which = np.flatnonzero(repeats == count)
        summands = values[order[starts[which, np.newaxis] + np.arange(count)]]  # row, sender, element
        if count > 2:
            summands = np.sort(summands, axis=1)
        total = summands[:, 0].copy()
        with np.errstate(all="ignore"):
            for at in range(1, count):
                total += summands[:, at]
        sums[which] = total
    return sums


def late_adamw_(
    param: Array,
    mean: Array,
    square: Array,
    ages: Array,
    *,
    decays: Array,
    means: Array,
    squares: Array,
    terms: Array,
    updates: Array,
    eps: float,
    error: float,
) -> None:
    """Make up for missed updates of AdamW; see `zerort.optim.late` and `zerort.native.late_adamw_`.

    Args:
        param: Rows, changed.
        mean: The same of the running mean.
        square: The same of the running mean of squares.
        ages: int64, one for each row.
        decays: What parameters shrink by, by age.
        means: What ``mean`` fades by.
        squares: What ``square`` fades by.
        terms: Coefficients of the series, and the bound of its error.
        updates: Decay, step size and root correction of each update, the last one first.
        eps: Of AdamW.
        error: Largest error, relative to the result.
    """
    series = _Series(decays, means, squares, terms, updates, eps, error)
    for here in _blocks(param):
        p, m, v, old = param[here], mean[here], square[here], ages[here]
        left = native.late_adamw_(
            p.reshape(-1),
            m.reshape(-1),
            v.reshape(-1),
            old,
            decays=decays,
            means=means,
            squares=squares,
            terms=terms,
            eps=eps,
            error=error,
        )
        if left.any():
            rows = np.flatnonzero(left)
            with np.errstate(all="ignore"):  # NaN and infinity stay what they are
                p[rows] = series.by_element(p[rows], m[rows], v[rows], old[rows])
                m[rows] *= _by_row(means[old[rows]], m.dtype)
                v[rows] *= _by_row(squares[old[rows]], v.dtype)


class _Series:
    """AdamW's missed updates of single elements, in float64. The arguments are those of `late_adamw_`."""

    def __init__(
        self, decays: Array, means: Array, squares: Array, terms: Array, updates: Array, eps: float, error: float
    ) -> None:
        self._decays, self._means, self._squares = decays, means, squares
        self._terms, self._updates = terms, updates
        self._eps, self._error = eps, error

    def by_element(self, param: Array, mean: Array, square: Array, ages: Array) -> Array:
        """Return rows of which some elements have all terms of the series, and others are updated step by step."""
        wide = [array.astype(np.float64) for array in (param, mean, square)]
        param, mean, square = wide
        *terms, bound = self._terms[:, ages, np.newaxis]
        root = np.sqrt(square)
        ratio, x = mean / root, self._eps / root
        series = terms[-1] * -x
        for term in terms[-2:0:-1]:
            series = (series + term) * -x
        moved = (series + terms[0]) * ratio
        moved[mean == 0.0] = 0.0
        found: Array = param * self._decays[ages, np.newaxis] - moved
        missing = np.abs(ratio) * x ** len(terms) * bound
        replayed = ~(missing <= self._error * (np.abs(found) + np.abs(moved))) & (mean != 0.0)
        if replayed.any():
            older = np.broadcast_to(ages[:, np.newaxis], replayed.shape)[replayed]
            found[replayed] = self._replayed(param[replayed], mean[replayed], square[replayed], older)
        return found

    def _replayed(self, param: Array, mean: Array, square: Array, ages: Array) -> Array:
        """Return elements after every update that they have missed, one after the other."""
        order = np.argsort(-ages, kind="stable")  # the oldest first: those that an update changes are a beginning
        ages = ages[order]
        p, m, v = param[order], mean[order], square[order]
        beta1, beta2 = self._means[1], self._squares[1]
        for missed in range(int(ages[0]), 0, -1):
            decay, size, root = self._updates[:, missed - 1]
            old = slice(int(np.searchsorted(-ages, -missed, side="right")))
            m[old] *= beta1
            v[old] *= beta2
            p[old] = p[old] * decay - m[old] * size / (np.sqrt(v[old]) * root + self._eps)
        found = np.empty_like(p)
        found[order] = p
        return found


def late_sgd_(param: Array, running: Array | None, ages: Array, *, matrix: Array) -> None:
    """Make up for missed updates of SGD.

    Args:
        param: Rows, changed.
        running: The same of the running gradient; None: there is none.
        ages: int64, one for each row.
        matrix: By age: parameters and running gradients after, given those before.
    """
    with np.errstate(all="ignore"):
        for here in _blocks(param):
            p, by_row = param[here], _by_row(matrix[:, :, ages[here]], param.dtype)
            if running is None:
                p *= by_row[0, 0]
                continue
            b = running[here]
            before = p * by_row[1, 0]
            p *= by_row[0, 0]
            p += b * by_row[0, 1]
            b *= by_row[1, 1]
            b += before


def late_lion_(param: Array, mean: Array, ages: Array, *, decays: Array, moved: Array, means: Array) -> None:
    """Make up for missed updates of Lion.

    Args:
        param: Rows, changed.
        mean: The same of the running mean.
        ages: int64, one for each row.
        decays: What parameters shrink by, by age.
        moved: How far they move against the sign of the mean.
        means: What ``mean`` fades by.
    """
    least = np.finfo(param.dtype).tiny
    with np.errstate(all="ignore"):
        for here in _blocks(param):
            p, m, old = param[here], mean[here], ages[here]
            p *= _by_row(decays[old], p.dtype)
            p -= np.sign(m) * _by_row(moved[old], p.dtype)
            faded = m * _by_row(means[old], m.dtype)
            if means[1] > 0.5:  # products of the kernel never round to zero then, so that the sign stays
                np.copyto(faded, np.copysign(least, m), where=(np.abs(faded) < least) & (m != 0))
            m[:] = faded


def _blocks(rows: Array) -> Iterator[slice]:
    """Yield which rows are computed with at once, so that temporaries stay in a core's cache."""
    most = max(ROW_BLOCK // max(rows.shape[1], 1), 1)
    for first in range(0, len(rows), most):
        yield slice(first, first + most)


def _by_row(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """Return a number for each row as what rows are multiplied by."""
    return numbers.astype(dtype)[..., np.newaxis]
