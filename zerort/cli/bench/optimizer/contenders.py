"""What ``bench optimizer`` runs, as one table: the bytes that a step must move per parameter, and who else can do it.

step                      reads                       writes                 bytes per element
adamw_                    param grad avg avg_sq       param avg avg_sq       16 + 12 = 28
adamw_ bf16 → bf16        param grad(2) avg avg_sq    param avg avg_sq copy(2)   14 + 14 = 28
sgd_ with momentum        param grad buffer           param buffer           12 +  8 = 20
lion_                     param grad avg              param avg              12 +  8 = 20
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort import native
from zerort.native import reference
from zerort.typing import Array

__all__ = ["NBYTES_PER_ELEMENT", "Arrays", "numpy_steps", "our_steps", "torch_steps"]

NBYTES_PER_ELEMENT = {"adamw_": 28, "adamw_ bf16 grad, bf16 copy": 28, "sgd_ momentum": 20, "lion_": 20}
"""Bytes that a step must read and write, by the name of the step."""

Steps = dict[str, Callable[[], object]]

_ADAMW = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True)
class Arrays:
    """What all steps work on. 1-D, of one length, touched."""

    param: Array
    grad: Array
    exp_avg: Array
    exp_avg_sq: Array
    half_grad: Array
    half_copy: Array

    @classmethod
    def make(cls, numel: int) -> Arrays:
        """Return arrays of ``numel`` elements: gradients of both signs, no zeros and no denormals."""
        steps = np.arange(numel, dtype=np.float32)
        steps %= 251
        grad = (steps - 125.5) * np.float32(1e-3)
        half = np.empty(numel, native.BFLOAT16)
        native.cast_into(half, grad)
        return cls(
            param=steps * np.float32(1e-2) + 1,
            grad=grad,
            exp_avg=grad * np.float32(0.5),
            exp_avg_sq=np.square(grad),
            half_grad=half,
            half_copy=half.copy(),
        )


def _steps(forms: Any, arrays: Arrays) -> Steps:
    param, grad, avg, avg_sq = arrays.param, arrays.grad, arrays.exp_avg, arrays.exp_avg_sq
    return {
        "adamw_": lambda: forms.adamw_(param, grad, avg, avg_sq, step=10, **_ADAMW),
        "adamw_ bf16 grad, bf16 copy": lambda: forms.adamw_(
            param, arrays.half_grad, avg, avg_sq, step=10, copy_out=arrays.half_copy, **_ADAMW
        ),
        "sgd_ momentum": lambda: forms.sgd_(param, grad, avg, lr=1e-4, momentum=0.9, weight_decay=0.01),
        "lion_": lambda: forms.lion_(param, grad, avg, lr=1e-5, beta1=0.9, beta2=0.99, weight_decay=0.01),
    }


def our_steps(arrays: Arrays) -> Steps:
    """Return the steps as zerort runs them here."""
    return _steps(native, arrays)


def numpy_steps(arrays: Arrays) -> Steps:
    """Return their NumPy forms."""
    return _steps(reference, arrays)


def torch_steps(arrays: Arrays) -> Steps:
    """Return torch's fused optimizers over the same parameters and gradients, on one thread.

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    torch.set_num_threads(1)

    def over(make: Callable[[list[Any]], Any]) -> Callable[[], object]:
        param = torch.nn.Parameter(torch.from_numpy(arrays.param))
        param.grad = torch.from_numpy(arrays.grad)
        optimizer = make([param])
        step: Callable[[], object] = optimizer.step
        return step

    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    return {
        "adamw_": over(lambda params: adamw(params, lr=1e-4, weight_decay=0.01, fused=True)),
        "sgd_ momentum": over(lambda params: sgd(params, lr=1e-4, momentum=0.9, weight_decay=0.01, fused=True)),
    }
