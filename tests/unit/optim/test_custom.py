"""An optimizer of one's own, as `zerort.optim` says how to write one: elementwise, and over whole tensors."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from zerort import native, optim
from zerort.errors import CallError
from zerort.optim import (
    ElementwiseOptimizer,
    ParameterGroup,
    Schedule,
    StateSpec,
    TensorOptimizer,
    TensorPart,
    check_lr,
    check_number,
    resolve,
)
from zerort.testing.tolerance import rounding


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


def test_it_is_the_one_in_the_documentation() -> None:
    assert textwrap.indent(inspect.getsource(SignSGD), "    ").rstrip() in optim.__doc__


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_equals_a_loop_over_elements(dtype: str) -> None:
    optimizer = SignSGD(lr=lambda update: 0.1 / update, decay=0.5)
    rng = np.random.default_rng(0)
    param = rng.standard_normal(50).astype(dtype)
    state = {spec.name: np.zeros(50, spec.dtype) for spec in optimizer.states_in(dtype, (5, 10))}
    want, average = param.astype(np.float64).tolist(), [0.0] * 50
    copy = np.empty(50, ml_dtypes.bfloat16) if dtype == "float32" else None
    for step in (1, 2, 3):
        grad = rng.standard_normal(50).astype(np.float16)
        optimizer.update_(param, grad, state, lr=optimizer.lr_at(step), step=step, grad_scale=0.25, copy_out=copy)
        for i, g in enumerate(grad.tolist()):
            average[i] = 0.5 * average[i] + 0.5 * 0.25 * g
            want[i] -= 0.1 / step * ((average[i] > 0) - (average[i] < 0))
    # Averages have few digits, so their signs are exact; a parameter of up to 3 is rounded in each of three updates.
    np.testing.assert_allclose(param, want, rtol=0, atol=3 * rounding(dtype, 6))
    if copy is not None:
        np.testing.assert_array_equal(copy, param.astype(ml_dtypes.bfloat16))


def test_groups_checks_and_descriptions_work_at_once() -> None:
    base = SignSGD(lr=0.1)
    assert resolve(base, [ParameterGroup("*.bias", decay=0.0)], "a.bias", (3,)) == SignSGD(lr=0.1, decay=0.0)
    assert base.describe() == {"kind": "SignSGD", "lr": 0.1, "decay": 0.9}
    with pytest.raises(CallError, match=r"Expected decay .* below 1, got 1.5"):
        SignSGD(lr=0.1, decay=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSGD(TensorOptimizer):
    """Every tensor moves by `lr` in all: the gradient over its norm."""

    lr: float | Schedule

    def states(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        return (StateSpec(name="norm", dtype="float64", shape=()),)

    def update_parts_(self, parts: Sequence[TensorPart]) -> Generator[np.ndarray, np.ndarray, None]:
        sums = yield np.array([native.square_sum(part.grad) for part in parts])
        for part, total in zip(parts, sums, strict=True):
            part.state["norm"][...] = np.sqrt(total)
            part.param -= part.grad * float(part.lr / np.sqrt(total))


def test_a_tensor_optimizer_gets_its_sums() -> None:
    grad = np.arange(1, 10, dtype=np.float32)
    param, norms = np.zeros(9, np.float32), [np.zeros(()) for _ in range(3)]
    ranges = [slice(0, 4), slice(4, 4), slice(4, 9)]
    ranks = [
        NormedSGD(lr=0.5).update_parts_(
            [
                TensorPart(
                    name="w",
                    shape=(3, 3),
                    first=range_.start,
                    param=param[range_],
                    grad=grad[range_],
                    state={"norm": norm},
                    lr=0.5,
                    step=1,
                    grad_scale=1.0,
                    copy_out=None,
                )
            ]
        )
        for range_, norm in zip(ranges, norms, strict=True)
    ]
    total = np.sum([next(rank) for rank in ranks], axis=0)
    for rank in ranks:
        with pytest.raises(StopIteration):
            rank.send(total)
    exact = math.sqrt(sum(i * i for i in range(1, 10)))
    np.testing.assert_allclose(param, -0.5 * grad / exact, rtol=rounding("float32", 4))
    assert norms[0] == norms[1] == norms[2] == pytest.approx(exact, rel=rounding("float64", 10))
