"""Fused optimizer steps: one pass over parameter, gradient and state, all in place (hence the underscore).

Parameter and state are float32, the gradient is float32, bfloat16 or float16, and `copy_out` takes a bfloat16 or
float16 copy of the new parameter in the same pass; it may be the gradient's own memory. Or all are float64, and there
is no copy. Or the parameter is in two halves, bfloat16 in `copy_out` and the rest of its bits, uint16, in `param`
(`masters.py`): both are read and written. All arrays are 1-D, contiguous and of one length, such as a shard. Both forms
agree to the bit, up to the payload of a NaN. Rows of a table are updated where they lie (decision 0173).
Imports the siblings of this folder only.
"""

from __future__ import annotations

import numpy as np

from zerort.native import checks, reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form
from zerort.native.scalars import adamw_scalars, lion_scalars, sgd_scalars

__all__ = ["adamw_", "adamw_rows_", "late_adamw_", "lion_", "sgd_"]


def adamw_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    copy_out: Array | None = None,
) -> None:
    """Make one step of AdamW (Adam with decoupled weight decay), as ``torch.optim.AdamW`` does.

    Args:
        param: Parameters, float32 or float64, or remainders, uint16; updated.
        grad: Gradient; only read.
        exp_avg: Running mean of the gradient, in the parameters' dtype, updated.
        exp_avg_sq: Running mean of its square, in the parameters' dtype, updated.
        lr: Learning rate.
        beta1: Decay of `exp_avg`.
        beta2: Decay of `exp_avg_sq`.
        eps: Added to the root in the denominator.
        weight_decay: Decoupled decay: parameters shrink by ``lr * weight_decay``.
        step: Number of this update, from 1.
        grad_scale: The gradient is multiplied by it first, to unscale or to average.
        copy_out: Where a half-precision copy of the new parameters goes.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    if kernels is not None and kernels.adamw(param, grad, exp_avg, exp_avg_sq, copy_out, *scalars):
        return
    checks.check_optimizer(param, grad, copy_out, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    use_numpy_form()
    reference.adamw_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        copy_out=copy_out,
    )


def sgd_(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    grad_scale: float = 1.0,
    copy_out: Array | None = None,
) -> None:
    """Make one step of SGD, as ``torch.optim.SGD`` does.

    Args:
        param: Parameters, float32 or float64, updated.
        grad: Gradient; only read.
        momentum_buffer: Running gradient, float32, updated; None if `momentum` is 0.
        lr: Learning rate.
        momentum: Decay of `momentum_buffer`.
        dampening: What the gradient loses on its way into `momentum_buffer`.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: Look ahead along the momentum.
        first: This is the first update: `momentum_buffer` is set to the gradient, its contents are not read.
        grad_scale: The gradient is multiplied by it first, to unscale or to average.
        copy_out: Where a half-precision copy of the new parameters goes.

    Raises:
        ValueError: If an array is not what it can work on, a number out of range, or the buffer of a momentum missing.
    """
    scalars = sgd_scalars(lr, momentum, dampening, weight_decay, grad_scale, nesterov=nesterov)
    if momentum == 0.0:
        momentum_buffer = None  # torch leaves it alone as well
    elif momentum_buffer is None:
        raise ValueError(f"Expected a momentum_buffer with momentum {momentum}, got None. Pass one, or momentum=0.")
    if kernels is not None and kernels.sgd(param, grad, momentum_buffer, copy_out, first, nesterov, *scalars):
        return
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    checks.check_optimizer(param, grad, copy_out, **states)
    use_numpy_form()
    reference.sgd_(
        param,
        grad,
        momentum_buffer,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first=first,
        grad_scale=grad_scale,
        copy_out=copy_out,
    )


def lion_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    copy_out: Array | None = None,
) -> None:
    """Make one step of Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    Args:
        param: Parameters, float32 or float64, updated.
        grad: Gradient; only read.
        exp_avg: Running mean of the gradient, in the parameters' dtype, updated.
        lr: Learning rate: how far every parameter moves, up or down.
        beta1: Weight of `exp_avg` against the gradient in the direction.
        beta2: Decay of `exp_avg`.
        weight_decay: Decoupled decay: parameters shrink by ``lr * weight_decay``.
        grad_scale: The gradient is multiplied by it first, to unscale or to average.
        copy_out: Where a half-precision copy of the new parameters goes.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    scalars = lion_scalars(lr, beta1, beta2, weight_decay, grad_scale)
    if kernels is not None and kernels.lion(param, grad, exp_avg, copy_out, *scalars):
        return
    checks.check_optimizer(param, grad, copy_out, exp_avg=exp_avg)
    use_numpy_form()
    reference.lion_(
        param,
        grad,
        exp_avg,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
        copy_out=copy_out,
    )


def adamw_rows_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    rows: Array,
    *,
    width: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Make one step of AdamW over some rows of a table, where they lie; the others stay as they are.

    Args:
        param: All rows, one after the other, float32 or float64; updated.
        grad: A row for each of ``rows``, in the parameters' dtype.
        exp_avg: As in `adamw_`, of all rows.
        exp_avg_sq: As in `adamw_`, of all rows.
        rows: Numbers of rows, int64, each once.
        width: Elements of a row.
        lr: As in `adamw_`, like all that follows.
        beta1: See `adamw_`.
        beta2: See `adamw_`.
        eps: See `adamw_`.
        weight_decay: See `adamw_`.
        step: See `adamw_`.
        grad_scale: See `adamw_`.

    Raises:
        ValueError: If an array is not what it can work on, there is no such row, or a number is out of range.
    """
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    if kernels is not None and kernels.adamw_rows(param, grad, exp_avg, exp_avg_sq, rows, width, *scalars):
        return
    for column in (param, exp_avg, exp_avg_sq):
        checks.check_rows(grad, column, rows, width, takes=False)
    checks.check_late(param, exp_avg, exp_avg_sq)
    use_numpy_form()
    reference.adamw_rows_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        rows,
        width=width,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
    )


def late_adamw_(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    ages: Array,
    *,
    decays: Array,
    means: Array,
    squares: Array,
    terms: Array,
    eps: float,
    error: float,
) -> Array:
    """Make up for the updates of AdamW without a gradient that rows have missed, given what these do by age.

    Args:
        param: Rows one after the other, float32 or float64; updated.
        exp_avg: The same of the running mean, updated.
        exp_avg_sq: The same of the running mean of squares, updated.
        ages: Updates that each row has missed, int64.
        decays: What parameters shrink by, by age, float64; as the next three.
        means: What `exp_avg` fades by.
        squares: What `exp_avg_sq` fades by.
        terms: Coefficients of the series in ``-eps / sqrt(exp_avg_sq)``: seven for each age, of which the last one
            bounds the error of the first six.
        eps: Of AdamW.
        error: Largest error, relative to the first term.

    Returns:
        Which rows stay as they were, for the series is too short for them: 1, else 0.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    left = np.zeros(ages.size, np.uint8)
    numbers = (decays, means, squares, terms.reshape(-1))
    if kernels is not None and kernels.late_adamw(param, exp_avg, exp_avg_sq, ages, left, *numbers, eps, error):
        return left
    checks.check_late(param, exp_avg, exp_avg_sq)
    checks.check_ages(param, ages, *numbers)
    use_numpy_form()
    reference.late_adamw_(param, exp_avg, exp_avg_sq, ages, left, *numbers, eps=eps, error=error)
    return left
