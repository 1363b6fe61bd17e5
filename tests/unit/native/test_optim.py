"""Fused optimizers: against textbook formulas in float64, and the two forms against each other, bit by bit."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from zerort import native
from zerort.native import reference
from zerort.testing.tolerance import rounding

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMS = [pytest.param(native, id="native", marks=needs_native), pytest.param(reference, id="numpy")]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}
TOGETHER = [  # parameter and state, gradient, copy of the new parameter
    *(("float32", grad, copy) for grad in ("float32", "bfloat16", "float16") for copy in (None, "bfloat16", "float16")),
    ("float64", "float64", None),
]
STEPS = 5
SIZES = (0, 1, 17, 64, 2048, 2049, 20003)


class Run:
    """One optimizer over its arrays; `step` makes an update with the form's kernel, `exact` the same in float64."""

    def __init__(self, numel: int, dtype: str = "float32", *, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.param = self.rng.standard_normal(numel).astype(dtype)
        self.states = [np.zeros(numel, dtype) for _ in range(2)]
        self.exact_param = self.param.astype(np.float64)
        self.exact_states = [np.zeros(numel) for _ in range(2)]

    def grad(self, dtype: np.dtype) -> np.ndarray:
        return self.rng.standard_normal(self.param.size).astype(dtype)


def adamw_kernel(form, run: Run, grad: np.ndarray, step: int, **options) -> None:
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    form.adamw_(run.param, grad, *run.states, step=step, **(settings | options))


def adamw_exact(run: Run, grad: np.ndarray, step: int) -> None:
    """torch.optim.AdamW, line by line."""
    m, v = run.exact_states
    run.exact_param *= 1 - 1e-2 * 0.1
    m[:] = 0.9 * m + 0.1 * grad
    v[:] = 0.95 * v + 0.05 * grad * grad
    denominator = np.sqrt(v) / math.sqrt(1 - 0.95**step) + 1e-8
    run.exact_param -= 1e-2 / (1 - 0.9**step) * m / denominator


def sgd(momentum: float, dampening: float, *, nesterov: bool):
    def kernel(form, run: Run, grad: np.ndarray, step: int, **options) -> None:
        settings = {"lr": 0.1, "momentum": momentum, "dampening": dampening, "weight_decay": 0.01, "nesterov": nesterov}
        buffer = run.states[0] if momentum else None
        if step == 1 and momentum:
            buffer[:] = np.nan  # must not be read
        form.sgd_(run.param, grad, buffer, first=step == 1, **(settings | options))

    def exact(run: Run, grad: np.ndarray, step: int) -> None:
        """torch.optim.SGD, line by line."""
        buffer = run.exact_states[0]
        grad = grad + 0.01 * run.exact_param
        if momentum:
            buffer[:] = grad if step == 1 else momentum * buffer + (1 - dampening) * grad
            grad = grad + momentum * buffer if nesterov else buffer
        run.exact_param -= 0.1 * grad

    return kernel, exact


def lion_kernel(form, run: Run, grad: np.ndarray, step: int, **options) -> None:
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    form.lion_(run.param, grad, run.states[0], **(settings | options))


def lion_exact(run: Run, grad: np.ndarray, step: int) -> None:
    m = run.exact_states[0]
    run.exact_param -= 1e-2 * (np.sign(0.9 * m + 0.1 * grad) + 0.1 * run.exact_param)
    m[:] = 0.99 * m + 0.01 * grad


OPTIMIZERS = [
    pytest.param((adamw_kernel, adamw_exact), id="adamw"),
    pytest.param(sgd(0.0, 0.0, nesterov=False), id="sgd"),
    pytest.param(sgd(0.9, 0.0, nesterov=False), id="sgd-momentum"),
    pytest.param(sgd(0.9, 0.3, nesterov=False), id="sgd-dampening"),
    pytest.param(sgd(0.9, 0.0, nesterov=True), id="sgd-nesterov"),
    pytest.param((lion_kernel, lion_exact), id="lion"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "steps"), [("float64", 20), ("float32", 1)])
def test_follows_the_formula(form, optimizer, dtype: str, steps: int) -> None:
    """In float32 the first step: what is exactly 0 or not is the same there, and Lion's sign turns nowhere."""
    kernel, exact = optimizer
    run = Run(3001, dtype)
    for step in range(1, steps + 1):
        grad = run.grad(DTYPES[dtype])
        kernel(form, run, grad, step)
        exact(run, grad.astype(np.float64), step)
    # Per step about 12 operations and as many rounded factors; parameter and update, of up to 5, may cancel.
    bound = rounding(dtype, 24 * steps)
    np.testing.assert_allclose(run.param, run.exact_param, rtol=bound, atol=5 * bound)
    for state, exact_state in zip(run.states, run.exact_states, strict=True):
        np.testing.assert_allclose(state, exact_state, rtol=bound, atol=5 * bound)


@needs_native
@pytest.mark.parametrize(("dtype", "grad_dtype", "copy"), TOGETHER)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_native_equals_numpy_bitwise(optimizer, dtype: str, grad_dtype: str, copy: str | None) -> None:
    kernel, _ = optimizer
    for numel in SIZES:
        runs = {native: Run(numel, dtype), reference: Run(numel, dtype)}
        for step in range(1, STEPS + 1):
            copies = []
            for form, run in runs.items():
                grad = run.grad(DTYPES[grad_dtype])
                before = grad.tobytes()
                out = None if copy is None else np.zeros(numel, DTYPES[copy])
                kernel(form, run, grad, step, grad_scale=1 / 3, copy_out=out)
                copies.append(b"" if out is None else out.tobytes())
                assert grad.tobytes() == before
                if out is not None:
                    rounded = np.empty_like(out)
                    native.round_master(rounded, run.param)
                    assert out.tobytes() == rounded.tobytes()
            assert copies[0] == copies[1]
            a, b = runs.values()
            assert a.param.tobytes() == b.param.tobytes()
            assert [s.tobytes() for s in a.states] == [s.tobytes() for s in b.states]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_masters_in_halves_have_the_bits_of_whole_ones(form, optimizer, grad_dtype: str) -> None:
    kernel, _ = optimizer
    for numel in SIZES:
        whole, halved = Run(numel), Run(numel)
        copy, upper, lower = (np.empty(numel, dtype) for dtype in (BFLOAT16, BFLOAT16, np.uint16))
        native.split_master(upper, lower, halved.param)
        halved.param = lower
        for step in range(1, STEPS + 1):
            grad = whole.grad(DTYPES[grad_dtype])
            kernel(form, whole, grad, step, grad_scale=1 / 3, copy_out=copy)
            kernel(form, halved, grad, step, grad_scale=1 / 3, copy_out=upper)
        joined = np.empty(numel, np.float32)
        native.join_master(joined, upper, lower)
        assert joined.tobytes() == whole.param.tobytes()
        assert upper.tobytes() == copy.tobytes()
        assert [one.tobytes() for one in halved.states] == [one.tobytes() for one in whole.states]


def test_a_remainder_alone_is_no_parameter() -> None:
    lower, state = np.zeros(8, np.uint16), np.zeros(8, np.float32)
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    with pytest.raises(ValueError, match="Expected copy_out, the bfloat16 half"):
        native.adamw_(lower, state.copy(), state, state.copy(), **settings)
    grad = np.zeros(8, BFLOAT16)
    with pytest.raises(ValueError, match="apart"):
        native.adamw_(lower, grad, state, state.copy(), copy_out=grad, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copy_may_take_the_place_of_the_gradient(form, optimizer) -> None:
    kernel, _ = optimizer
    one, other = Run(5003), Run(5003)
    grad = one.grad(BFLOAT16)
    out = np.empty_like(grad)
    kernel(form, one, grad, 1, copy_out=out)
    kernel(form, other, grad, 1, copy_out=grad)
    assert grad.tobytes() == out.tobytes()
    assert one.param.tobytes() == other.param.tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_slice_leaves_its_neighbours_alone(form, optimizer) -> None:
    kernel, _ = optimizer
    whole = Run(4099)
    part = Run(4099)
    inner = slice(3, 4090)
    before = part.param.copy()
    part.param, part.states = part.param[inner], [state[inner] for state in part.states]
    grad = whole.grad(np.dtype(np.float32))
    kernel(form, whole, grad, 1)
    kernel(form, part, grad[inner], 1)
    np.testing.assert_array_equal(part.param, whole.param[inner])
    np.testing.assert_array_equal(part.param.base[:3], before[:3])
    np.testing.assert_array_equal(part.param.base[4090:], before[4090:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_broken_gradient_shows(form, optimizer) -> None:
    kernel, _ = optimizer
    run = Run(300)
    grad = run.grad(np.dtype(np.float32))
    grad[100:120] = np.nan
    kernel(form, run, grad, 1)
    assert np.isnan(run.param[100:120]).all()
    assert np.isfinite(run.param[:100]).all()
