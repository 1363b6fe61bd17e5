"""The numbers that a fused optimizer works with, computed once, in float64, for both of its forms.

Each function turns a user's hyperparameters into the factors of the update loop. Both forms round them to float32 and
apply them in the same order, which is why they agree to the bit. Imports nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["AdamWScalars", "LionScalars", "SgdScalars", "adamw_scalars", "lion_scalars", "sgd_scalars"]


class AdamWScalars(NamedTuple):
    """Factors of AdamW, in the order of ``struct AdamWScalars`` in ``src/optim.h``."""

    grad_scale: float
    decay: float
    """1 - lr · weight_decay"""
    beta1: float
    rest1: float
    """1 - beta1"""
    beta2: float
    rest2: float
    """1 - beta2"""
    root_correction: float
    """1 / sqrt(1 - beta2 ** step)"""
    eps: float
    step_size: float
    """lr / (1 - beta1 ** step)"""


class SgdScalars(NamedTuple):
    """Factors of SGD, in the order of ``struct SgdScalars`` in ``src/optim.h``."""

    grad_scale: float
    weight_decay: float
    momentum: float
    rest: float
    """1 - dampening"""
    lr: float


class LionScalars(NamedTuple):
    """Factors of Lion, in the order of ``struct LionScalars`` in ``src/optim.h``."""

    grad_scale: float
    decay: float
    """1 - lr · weight_decay"""
    beta1: float
    rest1: float
    """1 - beta1"""
    beta2: float
    rest2: float
    """1 - beta2"""
    lr: float


def _check_betas(beta1: float, beta2: float) -> None:
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(
            f"Expected beta1 and beta2 in [0, 1), got {beta1} and {beta2}. Usual are 0.9 and 0.999 or 0.99."
        )


def adamw_scalars(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float
) -> AdamWScalars:
    """Return the factors of AdamW's update number `step`, counted from 1."""
    _check_betas(beta1, beta2)
    if step < 1:
        raise ValueError(f"Expected step of 1 or more, got {step}. Count the update about to be made, from 1.")
    return AdamWScalars(
        grad_scale,
        1.0 - lr * weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
    )


def sgd_scalars(
    lr: float, momentum: float, dampening: float, weight_decay: float, grad_scale: float, *, nesterov: bool
) -> SgdScalars:
    """Return the factors of an SGD update."""
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError(
            f"Expected momentum > 0 and dampening 0 with nesterov, got {momentum} and {dampening}. "
            "Set them so, or nesterov=False."
        )
    return SgdScalars(grad_scale, weight_decay, momentum, 1.0 - dampening, lr)


def lion_scalars(lr: float, beta1: float, beta2: float, weight_decay: float, grad_scale: float) -> LionScalars:
    """Return the factors of a Lion update."""
    _check_betas(beta1, beta2)
    return LionScalars(grad_scale, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)
