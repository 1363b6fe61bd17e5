"""Optimizers over 1-D shards, and what surrounds an update. Nothing here communicates.

    optimizer.py      Optimizer, ElementwiseOptimizer, TensorOptimizer, StateSpec: the contract
    elementwise.py    AdamW, SGD, Lion over the fused kernels of an array's device
    forms/            in which form state is kept: master weights, moments in 8 bits, masks of pruned elements
    kernels.py        which kernels serve an array: the host's, or those of a GPU (kernels_cuda.py)
    adafactor.py      Adafactor: factored second moments; pieces.py cuts a shard of a matrix into rectangles
    late.py           updates that rows without a gradient have missed, made up for at once
    rows/             kernels over rows of tables, on hosts and GPUs
    exact.py          sums whose bits do not depend on how tensors are cut over ranks
    groups.py         ParameterGroup: settings by name; resolve, settings_of, unmatched, warn_of_unmatched
    schedules.py      constant, warmup_linear, warmup_cosine; any callable will do
    norm.py           square_sums, square_sums_of, norm_of, clip_factor: the global norm
    loss_scale.py     LossScale, LossScaler: float16
    checks.py         what options may be

**How to add an optimizer.** Say what it keeps (`states`) and how it updates 1-D arrays in place (`update_`). The
engine makes the state (zeros, sharded like the parameter), shards it, saves it and brings it back by its name; groups,
schedules, clipping and loss scaling work at once. Complete::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class SignSGD(ElementwiseOptimizer):
        lr: float | Schedule
        decay: float = 0.9

        def __post_init__(self) -> None:
            check_lr(self.lr)
            check_number("decay", self.decay, below=1.0)

        def states(self, shape):
            return (StateSpec(name="average"),)

        def update_(self, param, grad, state, *, lr, step, grad_scale, copy_out):
            average = state["average"]
            average *= self.decay
            average += grad.astype(average.dtype) * (grad_scale * (1.0 - self.decay))
            param -= lr * np.sign(average)
            if copy_out is not None:
                native.round_master(copy_out, param)

Element i may depend on element i only: shards begin and end anywhere. An optimizer that needs more, such as the norm
of a whole tensor, is a `TensorOptimizer`: it yields what its rank can add and is sent the sum over all ranks; state
that is no element's own has a `StateSpec` with a shape, and is the same on every rank. See `Adafactor`.
"""

from __future__ import annotations

from zerort.optim.adafactor import Adafactor
from zerort.optim.checks import check_bool, check_choice, check_count, check_lr, check_number, check_pair
from zerort.optim.elementwise import SGD, AdamW, Lion
from zerort.optim.forms.masters import MASTERS, MasterForm, master_form
from zerort.optim.forms.moments import Blocks
from zerort.optim.forms.sparsity import Sparsity
from zerort.optim.groups import Match, ParameterGroup, resolve, settings_of, unmatched, warn_of_unmatched
from zerort.optim.loss_scale import LossScale, LossScaler
from zerort.optim.norm import clip_factor, norm_of, square_sums, square_sums_of
from zerort.optim.optimizer import (
    JSON,
    ElementwiseOptimizer,
    Optimizer,
    Schedule,
    StateFormat,
    StateSpec,
    TensorOptimizer,
    TensorPart,
)
from zerort.optim.schedules import WarmupDecay, constant, warmup_cosine, warmup_linear

__all__ = [
    "JSON",
    "MASTERS",
    "SGD",
    "Adafactor",
    "AdamW",
    "Blocks",
    "ElementwiseOptimizer",
    "Lion",
    "LossScale",
    "LossScaler",
    "MasterForm",
    "Match",
    "Optimizer",
    "ParameterGroup",
    "Schedule",
    "Sparsity",
    "StateFormat",
    "StateSpec",
    "TensorOptimizer",
    "TensorPart",
    "WarmupDecay",
    "check_bool",
    "check_choice",
    "check_count",
    "check_lr",
    "check_number",
    "check_pair",
    "clip_factor",
    "constant",
    "master_form",
    "norm_of",
    "resolve",
    "settings_of",
    "square_sums",
    "square_sums_of",
    "unmatched",
    "warmup_cosine",
    "warmup_linear",
    "warn_of_unmatched",
]
