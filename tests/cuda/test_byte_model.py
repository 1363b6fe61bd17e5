"""The byte model computes on the GPU what it computes on the host, with the same lines."""

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

from zerort.testing.tolerance import rounding  # noqa: E402
from zerort.workload import ByteModel, ByteText  # noqa: E402

MODEL = ByteModel(width=8, layers=2, context=12, heads=2)
TEXT = ByteText(rows=3, context=MODEL.context, limit=10_000)


def parameters(dtype):
    """Parameters of which none is zero or one, so that every term of a gradient counts."""
    lot = np.random.default_rng(1)
    return {
        unit: {
            name: (value + 0.3 * lot.standard_normal(value.shape)).astype(dtype)
            for name, value in MODEL.init(unit).items()
        }
        for unit in MODEL.units
    }


def walk(params, x, y):
    """One forward and backward over all units: loss, logits, gradients."""
    saved, grads = {}, {}
    for unit in MODEL.units:
        x, saved[unit] = MODEL.forward(unit, params[unit], x)
    logits = x
    loss, slope = MODEL.loss(x, y, weight=0.7)
    for unit in reversed(MODEL.units):
        slope, grads[unit] = MODEL.backward(unit, params[unit], saved[unit], slope)
    return loss, logits, grads


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [MODEL.context, 2])
def test_forward_and_backward_are_the_hosts(tokens, dtype):
    """Sums of up to 256 products in some layers: 2000 roundings at most, of terms that cancel to about a quarter."""
    bound = rounding("float64" if dtype is np.float64 else "float32", 2000, condition=4)  # 16 bits: in float32
    params, (x, y) = parameters(dtype), TEXT.batch(0)
    there = {unit: {name: put(value) for name, value in p.items()} for unit, p in params.items()}
    loss, logits, grads = walk(params, x[:, :tokens], y[:, :tokens])
    found_loss, found_logits, found_grads = walk(there, x[:, :tokens], y[:, :tokens])
    assert isinstance(found_loss, float)
    assert found_loss == pytest.approx(loss, rel=bound)
    np.testing.assert_allclose(found_logits.get(), logits, rtol=0, atol=bound * np.abs(logits).max())
    for unit, expected in grads.items():
        assert list(found_grads[unit]) == list(expected)
        for name, grad in expected.items():
            found = found_grads[unit][name]
            assert (type(found), found.dtype, found.shape) == (cupy.ndarray, grad.dtype, grad.shape), name
            largest = max(np.abs(one).max() for one in expected.values())
            np.testing.assert_allclose(found.get(), grad, rtol=0, atol=bound * largest, err_msg=f"{unit}.{name}")


def test_batches_may_lie_on_the_gpu():
    params, (x, y) = parameters(np.float32), TEXT.batch(0)
    there = {unit: {name: put(value) for name, value in p.items()} for unit, p in params.items()}
    assert walk(there, put(x), put(y))[0] == walk(there, x, y)[0]
