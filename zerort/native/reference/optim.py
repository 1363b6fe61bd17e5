"""NumPy forms of the fused optimizers; see `zerort.native.optim` for what they promise.

Each operation rounds to the parameter's dtype, float32 or float64, and stands in the order of ``src/optim.cpp``: change
both or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerort.native.dtypes import BFLOAT16, FLOAT32, Array
from zerort.native.reference.arrays import BLOCK, blocks, cast_into, put_rows, take_rows
from zerort.native.reference.masters import join_master, split_master
from zerort.native.scalars import adamw_scalars, lion_scalars, sgd_scalars

__all__ = ["adamw_", "lion_", "sgd_"]


def _computed_in(param: Array) -> np.dtype[Any]:
    return FLOAT32 if param.dtype == np.uint16 else param.dtype


def _rounded(param: Array, scalars: tuple[float, ...]) -> list[Any]:
    return [_computed_in(param).type(scalar) for scalar in scalars]


def _scaled_blocks(
    param: Array, grad: Array, scale: Any, copy_out: Array | None
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield each block, its parameters and its scaled gradient, a temporary; then copy the parameters out."""
    buffer = np.empty(min(BLOCK, param.size), _computed_in(param))
    masters = np.empty(buffer.size if param.dtype == np.uint16 else 0, FLOAT32)
    for block in blocks(param.size):
        g = buffer[: block.stop - block.start]
        cast_into(g, grad[block])
        g *= scale
        if masters.size and copy_out is not None:
            p, remainder = masters[: g.size], param[block]
            join_master(p, copy_out[block], remainder)
            yield block, p, g
            split_master(copy_out[block], remainder, p)
            continue
        yield block, param[block], g
        if copy_out is not None:
            if copy_out.dtype == BFLOAT16:
                split_master(copy_out[block], None, param[block])
            else:
                cast_into(copy_out[block], param[block])


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
    """Make one step of AdamW."""
    scale, decay, b1, rest1, b2, rest2, root_correction, epsilon, step_size = _rounded(
        param, adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    )
    scratch = np.empty(min(BLOCK, param.size), _computed_in(param))
    with np.errstate(all="ignore"):
        for block, p, g in _scaled_blocks(param, grad, scale, copy_out):
            m, v, t = exp_avg[block], exp_avg_sq[block], scratch[: g.size]
            m *= b1
            m += np.multiply(g, rest1, out=t)
            v *= b2
            np.multiply(g, rest2, out=t)
            v += np.multiply(t, g, out=t)
            denominator = np.sqrt(v, out=t)
            denominator *= root_correction
            denominator += epsilon
            update = np.multiply(m, step_size, out=g)
            update /= denominator
            p *= decay
            p -= update


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
    """Make one step of SGD."""
    scale, wd, mu, rest, rate = _rounded(
        param, sgd_scalars(lr, momentum, dampening, weight_decay, grad_scale, nesterov=nesterov)
    )
    scratch = np.empty(min(BLOCK, param.size), _computed_in(param))
    with np.errstate(all="ignore"):
        for block, p, g in _scaled_blocks(param, grad, scale, copy_out):
            t = scratch[: g.size]
            g += np.multiply(p, wd, out=t)
            direction: np.ndarray[Any, Any] = g
            if momentum != 0.0 and momentum_buffer is not None:
                b = momentum_buffer[block]
                if first:
                    np.copyto(b, g)
                else:
                    b *= mu
                    b += np.multiply(g, rest, out=t)
                direction = np.add(g, np.multiply(b, mu, out=t), out=g) if nesterov else b
            p -= np.multiply(direction, rate, out=t)


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
    """Make one step of Lion."""
    scale, decay, b1, rest1, b2, rest2, rate = _rounded(param, lion_scalars(lr, beta1, beta2, weight_decay, grad_scale))
    scratch = np.empty(min(BLOCK, param.size), _computed_in(param))
    spare = np.empty_like(scratch)
    with np.errstate(all="ignore"):
        for block, p, g in _scaled_blocks(param, grad, scale, copy_out):
            m, t, direction = exp_avg[block], scratch[: g.size], spare[: g.size]
            np.multiply(m, b1, out=direction)
            direction += np.multiply(g, rest1, out=t)
            p *= decay
            p -= np.multiply(np.sign(direction, out=direction), rate, out=direction)
            m *= b2
            m += np.multiply(g, rest2, out=t)


def adamw_rows_(
    param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, rows: Array, *, width: int, **settings: Any
) -> None:
    """Make one step of AdamW over some rows."""
    columns = [param, exp_avg, exp_avg_sq]
    found = [np.empty(grad.size, param.dtype) for _ in columns]
    for values, column in zip(found, columns, strict=True):
        take_rows(values, column, rows, width)
    adamw_(found[0], grad, *found[1:], **settings)
    for values, column in zip(found, columns, strict=True):
        put_rows(column, values, rows, width)


def late_adamw_(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    ages: Array,
    left: Array,
    decays: Array,
    means: Array,
    squares: Array,
    terms: Array,
    *,
    eps: float,
    error: float,
) -> None:
    """Make up for missed updates of AdamW; mark rows that stay as they were."""
    if not ages.size:
        return
    made, width = param.dtype.type, param.size // ages.size
    terms = terms.reshape(-1, decays.size)[:, ages]
    with np.errstate(all="ignore"):
        root = np.sqrt(exp_avg_sq.reshape(-1, width))
        least = root.min(axis=1).astype(np.float64)
        x = np.cumprod(np.broadcast_to(eps / least, (len(terms) - 1, ages.size)), axis=0)
        enough = (x * terms[1:] <= error * terms[0]) & np.isfinite(terms[0])
        needed = np.where(enough.any(axis=0), enough.argmax(axis=0) + 1, len(terms))
        needed[~exp_avg.reshape(-1, width).any(axis=1)] = 0
        left[:] = needed == len(terms)
        for count in np.unique(needed[left == 0]):
            which = needed == count
            p, m, v = (one.reshape(-1, width)[which] for one in (param, exp_avg, exp_avg_sq))
            p *= decays[ages[which]].astype(made)[:, np.newaxis]
            if count:
                first, *rest = terms[:count, which].astype(made)[..., np.newaxis]
                series: Array = first
                if rest:
                    x = made(-eps) / root[which]
                    series = x * rest.pop()
                    while rest:
                        series = (series + rest.pop()) * x
                    series = series + first
                p -= m / root[which] * series
            m *= means[ages[which]].astype(made)[:, np.newaxis]
            v *= squares[ages[which]].astype(made)[:, np.newaxis]
            for one, new in zip((param, exp_avg, exp_avg_sq), (p, m, v), strict=True):
                one.reshape(-1, width)[which] = new
