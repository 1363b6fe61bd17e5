"""The numbers that a fused optimizer works with, computed once, in float64, for both of its forms.

Each function turns a user's hyperparameters into the factors of the update loop, in the order of the struct of that
name in ``src/optim.h``. Both forms round them to the parameter's dtype and apply them alike, which is why they agree to
the bit.
Plain tuples: named ones would double the cost of a call on a small array.
"""

from __future__ import annotations

from math import sqrt

__all__ = ["adamw_scalars", "lion_scalars", "sgd_scalars"]


def adamw_scalars(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float
) -> tuple[float, float, float, float, float, float, float, float, float]:
    """Return the factors of AdamW's update number `step`, counted from 1.

    Returns:
        grad_scale, decay (1 - lr · weight_decay), beta1, 1 - beta1, beta2, 1 - beta2,
        root correction (1 / sqrt(1 - beta2 ** step)), eps, step size (lr / (1 - beta1 ** step)).
    """
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise _betas_error(beta1, beta2)
    if step < 1:
        raise ValueError(f"Expected step of 1 or more, got {step}. Count the update about to be made, from 1.")
    return (
        grad_scale,
        1.0 - lr * weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
    )


def sgd_scalars(
    lr: float, momentum: float, dampening: float, weight_decay: float, grad_scale: float, *, nesterov: bool
) -> tuple[float, float, float, float, float]:
    """Return the factors of an SGD update: grad_scale, weight_decay, momentum, 1 - dampening, lr."""
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError(
            f"Expected momentum > 0 and dampening 0 with nesterov, got {momentum} and {dampening}. "
            "Set them so, or nesterov=False."
        )
    return grad_scale, weight_decay, momentum, 1.0 - dampening, lr


def lion_scalars(
    lr: float, beta1: float, beta2: float, weight_decay: float, grad_scale: float
) -> tuple[float, float, float, float, float, float, float]:
    """Return the factors of a Lion update.

    Returns:
        grad_scale, decay (1 - lr · weight_decay), beta1, 1 - beta1, beta2, 1 - beta2, lr.
    """
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise _betas_error(beta1, beta2)
    return grad_scale, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr


def _betas_error(beta1: float, beta2: float) -> ValueError:
    return ValueError(f"Expected beta1 and beta2 in [0, 1), got {beta1} and {beta2}. Usual are 0.9 and 0.999 or 0.99.")
