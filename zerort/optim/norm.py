"""The pieces of global-norm clipping that need no communication.

    grad shard ── square_sums ──> sums of blocks ── (the ranks' sums, one after the other) ── norm_of ──> norm
                                                                      norm ── clip_factor ──> what gradients shrink by

A block's sum depends on its elements alone, and the sums are added in an order that their number alone decides: where
blocks are cut at the same elements, the norm is the same to the bit on any number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from zerort.errors import CallError
from zerort.optim.checks import check_count, check_number
from zerort.optim.kernels import kernels_for
from zerort.typing import Array, Device

__all__ = ["clip_factor", "norm_of", "square_sums", "square_sums_of"]


def square_sums(grad: Array, block: int | None = None) -> Array:
    """Return the sum of squares of each block of `block` elements, from the array's first element on.

    >>> square_sums(np.arange(5, dtype=np.float32), 2)
    array([ 1., 13., 16.])

    Args:
        grad: 1-D, contiguous, floating-point; may be empty.
        block: Elements per block, the last one may be shorter; None: one sum of all, 0 for an empty array.

    Returns:
        1-D, float64.
    """
    if block is None:
        return np.array([kernels_for(grad).square_sum(grad)])
    check_count("block", block, minimum=1)
    sums = np.empty_like(grad, np.float64, shape=(-(-grad.size // block),))  # where the gradient lies
    kernels_for(grad).square_sums_into(sums, grad, block)
    return sums


def square_sums_of(grads: Sequence[Array], block: int | None = None, *, device: Device) -> list[Array]:
    """Return the `square_sums` of several arrays, on the host, which waits once for a GPU, not for each of them.

    >>> from zerort.device import HostDevice
    >>> square_sums_of([np.ones(3, np.float32), np.ones(5, np.float32)], 2, device=HostDevice())
    [array([2., 1.]), array([2., 2., 1.])]

    Args:
        grads: As in `square_sums`, on one device.
        block: As in `square_sums`.
        device: Theirs.
    """
    if device.in_host_memory or not grads:
        return [square_sums(grad, block) for grad in grads]
    kernels = kernels_for(grads[0])
    each = kernels.SUM_BLOCK if block is None else block
    marks = list(itertools.accumulate((-(-grad.size // each) for grad in grads), initial=0))
    sums = device.scratch(marks[-1], "float64")
    for grad, first, last in zip(grads, marks, marks[1:], strict=False):
        kernels.square_sums_into(sums[first:last], grad, each)
    found = np.split(device.fetch(sums), marks[1:-1])
    return found if block is not None else [np.array([part.sum()]) for part in found]


def norm_of(sums: Array) -> float:
    """Return the norm of a vector, given the sums of squares of its blocks in their order.

    Neighbours are added until one is left, so zeros at the end change nothing. NaN and infinity stay what they are.

    >>> norm_of(np.array([9.0, 16.0]))
    5.0

    Args:
        sums: 1-D, float64, none negative; empty for an empty vector.
    """
    with np.errstate(all="ignore"):
        while sums.size > 1:
            paired = sums[0::2].copy()
            paired[: sums.size // 2] += sums[1::2]
            sums = paired
    return math.sqrt(float(sums[0])) if sums.size else 0.0


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by so that their norm is at most `max_norm`; 1.0 if it is already.

    >>> clip_factor(0.5, 1.0), clip_factor(4.0, 1.0)
    (1.0, 0.25)

    Args:
        norm: The norm of all gradients; finite, because nothing sensible can be done to others.
        max_norm: The largest norm wanted; above 0.

    Raises:
        CallError: If a number is not what it must be.
    """
    check_number("max_norm", max_norm, above=0.0)
    if not math.isfinite(norm) or norm < 0.0:
        raise CallError(f"Expected a finite norm of at least 0, got {norm!r}. Skip the update instead of clipping it.")
    return 1.0 if norm <= max_norm else max_norm / norm
