"""AdamW, SGD and Lion: the fused kernels of the array's device with their settings and the names of their state.

optimizer   state per parameter element                bytes (of float64 parameters twice as many)
AdamW       exp_avg, exp_avg_sq                         8; with moments="int8" 2.03
SGD         momentum_buffer, or none without momentum   4 or 0
Lion        exp_avg                                     4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerort.errors import CallError
from zerort.optim.checks import check_bool, check_choice, check_lr, check_number, check_pair
from zerort.optim.forms.moments import format_of, rounding_keys
from zerort.optim.forms.sparsity import Sparsity, check_sparsity
from zerort.optim.kernels import kernels_for, row_kernels_for
from zerort.optim.optimizer import ElementwiseOptimizer, Schedule, StateSpec
from zerort.typing import Array

__all__ = ["SGD", "AdamW", "Lion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(ElementwiseOptimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` computes it.

    >>> AdamW(lr=3e-4, weight_decay=0.1).describe()["betas"]
    [0.9, 0.999]
    """

    lr: float | Schedule
    """Learning rate, or a schedule of it."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square; below 1."""

    eps: float = 1e-8
    """Added to the root in the denominator."""

    weight_decay: float = 0.01
    """Parameters shrink by ``lr * weight_decay`` per update."""

    master: Literal["float32", "remainder"] = "float32"
    """How the master weights of 16-bit parameters are kept. ``"remainder"``, for bfloat16: the 16 bits that the
    parameter lacks, 2 bytes instead of 4, and the same bits in every step."""

    moments: Literal["float32", "int8"] = "float32"
    """How the running means are kept. ``"int8"``: 1 byte instead of 4 each, rounded by chance, which changes the
    results a little; those of tensors below 4,096 elements stay float32."""

    sparsity: Sparsity | None = None
    """How many elements are pruned, and when; None: none."""

    def __post_init__(self) -> None:
        check_lr(self.lr)
        object.__setattr__(self, "betas", check_pair("betas", self.betas, below=1.0))
        check_number("eps", self.eps)
        check_number("weight_decay", self.weight_decay)
        check_choice("master", self.master, ("float32", "remainder"))
        check_choice("moments", self.moments, ("float32", "int8"))
        check_sparsity(self.sparsity)
        if self.sparsity is not None and (self.master, self.moments) != ("float32", "float32"):
            raise CallError(
                f"Expected master='float32' and moments='float32' with sparsity, got {self.master!r} and "
                f"{self.moments!r}: elements are pruned in whole masters and moments. Leave one of them out."
            )

    @property
    def master_name(self) -> str:
        """The form that master weights are kept in."""
        return self.master

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return the running means of the gradient and of its square."""
        format = format_of(self.moments, shape)
        if format is None:
            return StateSpec(name="exp_avg"), StateSpec(name="exp_avg_sq")
        return tuple(
            StateSpec(name=f"{name}.{format.name}", dtype="uint8", format=format) for name in ("exp_avg", "exp_avg_sq")
        )

    def check_parameter(self, name: str, dtype: str) -> None:
        """Refuse 8-bit moments of float64 parameters."""
        if self.moments == "int8" and dtype == "float64":
            raise CallError(
                f"Expected parameters in float32, bfloat16 or float16 with moments='int8' of AdamW, got {name!r} in "
                f"float64. Convert it, or keep its moments whole: zr.ParameterGroup({name!r}, moments='float32')."
            )

    def update_(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        lr: float,
        step: int,
        grad_scale: float,
        copy_out: Array | None,
    ) -> None:
        """Update in place; see `ElementwiseOptimizer.update_`."""
        settings = self._settings(lr=lr, step=step, grad_scale=grad_scale, copy_out=copy_out)
        kernels = kernels_for(param)
        if "exp_avg" in state:
            kernels.adamw_(param, grad, state["exp_avg"], state["exp_avg_sq"], **settings)
        else:
            (mean, start), (square, _) = state["exp_avg.int8"], state["exp_avg_sq.int8"]
            kernels.adamw_blocks_(param, grad, mean, square, start=start, keys=rounding_keys(step), **settings)

    def update_rows_(self, param: Array, grad: Array, state: Mapping[str, Array], rows: Array, **how: Any) -> None:
        """Update some rows where they lie; see `ElementwiseOptimizer.update_rows_`."""
        moments = state["exp_avg"], state["exp_avg_sq"]
        row_kernels_for(param).adamw_rows_(param, grad, *moments, rows, **self._settings(**how))

    def _settings(self, **update: Any) -> dict[str, Any]:
        """Return what kernels are told: of this optimizer, and of one update."""
        beta1, beta2 = self.betas
        return {"beta1": beta1, "beta2": beta2, "eps": self.eps, "weight_decay": self.weight_decay, **update}


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(ElementwiseOptimizer):
    """Stochastic gradient descent, with momentum if wanted, as ``torch.optim.SGD`` computes it.

    >>> SGD(lr=0.1).states((3, 4))
    ()
    """

    lr: float | Schedule
    """Learning rate, or a schedule of it."""

    momentum: float = 0.0
    """Decay of the running gradient; 0: none is kept."""

    dampening: float = 0.0
    """What the gradient loses on its way into the running one."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    nesterov: bool = False
    """Whether to look ahead along the momentum."""

    sparsity: Sparsity | None = None
    """How many elements are pruned, and when; None: none."""

    def __post_init__(self) -> None:
        check_lr(self.lr)
        check_number("momentum", self.momentum)
        check_number("dampening", self.dampening)
        check_number("weight_decay", self.weight_decay)
        check_bool("nesterov", self.nesterov)
        check_sparsity(self.sparsity)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise CallError(
                f"Expected a momentum above 0 and no dampening with nesterov, got momentum={self.momentum!r} and "
                f"dampening={self.dampening!r}. Set them so, or nesterov=False."
            )

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return the running gradient, if there is a momentum."""
        return (StateSpec(name="momentum_buffer"),) if self.momentum else ()

    def update_(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        lr: float,
        step: int,
        grad_scale: float,
        copy_out: Array | None,
    ) -> None:
        """Update in place; see `ElementwiseOptimizer.update_`."""
        kernels_for(param).sgd_(
            param,
            grad,
            state["momentum_buffer"] if self.momentum else None,
            lr=lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            first=step == 1,
            grad_scale=grad_scale,
            copy_out=copy_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(ElementwiseOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): the sign of a running gradient.

    It wants a learning rate three to ten times below AdamW's, and a weight decay as many times above.

    >>> [state.name for state in Lion(lr=1e-4).states((3, 4))]
    ['exp_avg']
    """

    lr: float | Schedule
    """Learning rate, or a schedule of it: how far every parameter moves, up or down."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Weight of the running gradient in the direction, and its decay; below 1."""

    weight_decay: float = 0.0
    """Parameters shrink by ``lr * weight_decay`` per update."""

    sparsity: Sparsity | None = None
    """How many elements are pruned, and when; None: none."""

    def __post_init__(self) -> None:
        check_lr(self.lr)
        object.__setattr__(self, "betas", check_pair("betas", self.betas, below=1.0))
        check_number("weight_decay", self.weight_decay)
        check_sparsity(self.sparsity)

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Return the running mean of the gradient."""
        return (StateSpec(name="exp_avg"),)

    def update_(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        lr: float,
        step: int,
        grad_scale: float,
        copy_out: Array | None,
    ) -> None:
        """Update in place; see `ElementwiseOptimizer.update_`."""
        kernels_for(param).lion_(
            param,
            grad,
            state["exp_avg"],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            grad_scale=grad_scale,
            copy_out=copy_out,
        )
