"""Rows of tables on the GPU: copied, summed, updated and brought up to date as on the host."""

import subprocess
import sys

import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

import zerort as zr  # noqa: E402
from zerort.native.dtypes import numpy_dtype  # noqa: E402
from zerort.optim.kernels import row_kernels_for  # noqa: E402
from zerort.optim.late import MOST_MISSED, late_updates  # noqa: E402
from zerort.optim.optimizer import row_blocks  # noqa: E402
from zerort.optim.rows import kernels, kernels_cuda  # noqa: E402

FLOATS = pytest.mark.parametrize("dtype", ["float32", "float64"])


def lot(*numbers):
    return np.random.default_rng(numbers)


def test_an_array_says_which_kernels_it_has():
    assert row_kernels_for(np.zeros(3)) is kernels
    assert row_kernels_for(cupy.zeros(3)) is kernels_cuda


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [1, 5, 70])
def test_rows_are_copied_by_their_numbers(dtype, width):
    kind = numpy_dtype(dtype)
    table = lot(1).standard_normal((90, width)).astype(kind)
    rows = np.array([3, 89, 0, 3, 44])
    there, found = put(table.reshape(-1)), kernels_cuda.empty(5 * width, kind)
    kernels_cuda.take_rows(found, there, rows, width)
    assert found.get().tobytes() == table[rows].tobytes()
    rows, values = np.array([7, 2]), lot(2).standard_normal((2, width)).astype(kind)
    kernels_cuda.put_rows(there, put(values.reshape(-1)), rows, width)
    table[rows] = values
    assert there.get().tobytes() == table.tobytes()
    kernels_cuda.put_rows(there, kernels_cuda.empty(0, kind), np.zeros(0, np.int64), width)
    for unfit in ([90], [-1, 4]):
        with pytest.raises(ValueError, match="Expected rows from 0 to 89, got"):
            kernels_cuda.take_rows(found, there, np.array(unfit), width)


@FLOATS
def test_sums_of_rows_are_the_hosts(dtype):
    """Those by value to the bit, whatever the order of the summands; NaN, infinity and zeros of both signs included."""
    kind, width = np.dtype(dtype), 6
    rows = lot(3).integers(0, 12, 60)
    values = (lot(4).standard_normal((60, width)) * 10.0 ** lot(5).integers(-4, 4, (60, width))).astype(kind)
    odd = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, 2.5], kind)
    values[::3] = odd[lot(6).integers(0, 6, (20, width))]
    values[rows == rows[0], 0] = -0.0
    for shuffled in (np.arange(60), lot(7).permutation(60)):
        order = shuffled[np.argsort(rows[shuffled], kind="stable")]
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        expected = kernels.sum_rows_by_value(values, order, starts)
        found = kernels_cuda.sum_rows_by_value(put(values), order, starts).get()
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        is_number = ~np.isnan(expected)
        assert found[is_number].tobytes() == expected[is_number].tobytes()
        in_order = kernels_cuda.sum_rows(put(values), order, starts).get()
        plain = kernels.sum_rows(values, order, starts)
        scale = np.abs(values[np.isfinite(values)]).max() * np.finfo(kind).eps * 64
        np.testing.assert_allclose(in_order, plain, rtol=0, atol=scale)
    few = np.arange(3)  # each once: a copy in another order
    np.testing.assert_array_equal(kernels_cuda.sum_rows(put(values[:3]), few[::-1], few).get(), values[2::-1])


@FLOATS
def test_an_update_of_rows_is_the_hosts_and_the_dense_one(dtype):
    width, rows = 5, np.array([2, 30, 31, 77])
    optimizer = zr.AdamW(lr=0.02, weight_decay=0.1)
    columns = [lot(at).standard_normal(90 * width).astype(dtype) for at in range(3)]
    columns[2] = np.abs(columns[2])
    gradient = lot(9).standard_normal(4 * width).astype(dtype)
    settings = {"width": width, "lr": 0.02, "step": 3, "grad_scale": 0.5}
    there, gradient_there = [put(one) for one in columns], put(gradient)
    for param, mean, square, grad in ((*columns, gradient), (*there, gradient_there)):
        optimizer.update_rows_(param, grad, {"exp_avg": mean, "exp_avg_sq": square}, rows, **settings)
    assert [one.get().tobytes() for one in there] == [one.tobytes() for one in columns]


def test_rows_are_changed_a_block_at_a_time(monkeypatch):
    """As many as the kernels of their device say, and all of them."""
    monkeypatch.setattr(kernels_cuda, "ROW_BLOCK", 20)
    table, rows = np.arange(200, dtype=np.float64), np.arange(3, 33, 2)
    there, sizes = put(table), []
    for here, (some,) in row_blocks([there], rows, width=5):
        sizes.append(here.stop - here.start)
        some *= 2
    assert sizes == [4, 4, 4, 3]
    table.reshape(-1, 5)[rows] *= 2
    np.testing.assert_array_equal(there.get(), table)


OPTIMIZERS = {
    "adamw": (zr.AdamW(lr=0.02, weight_decay=0.1), ("exp_avg", "exp_avg_sq")),
    "adamw-large-eps": (zr.AdamW(lr=0.02, weight_decay=0.1, eps=0.3), ("exp_avg", "exp_avg_sq")),
    "sgd": (zr.SGD(lr=0.05, weight_decay=0.1), ()),
    "momentum": (zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True), ("momentum_buffer",)),
    "lion": (zr.Lion(lr=0.01, weight_decay=0.1), ("exp_avg",)),
}


@FLOATS
@pytest.mark.parametrize("width", [1, 5, 70])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_rows_have_missed_is_made_up_for_as_on_the_host(name, width, dtype):
    """To the bit: rows that the series serves, single elements of others, replays; moments of zeros, NaN, infinity."""
    optimizer, kinds = OPTIMIZERS[name]
    late = late_updates(optimizer, dtype)
    for step in range(1, 41):
        late.advance(lr=0.02 / step, step=step)
    ages = lot(1).integers(0, 41, 60)
    param = lot(2).standard_normal((60, width)).astype(dtype)
    state = {kind: lot(at, 3).standard_normal((60, width)).astype(dtype) for at, kind in enumerate(kinds)}
    if "exp_avg_sq" in state:  # from far above eps to far below, in rows and in single elements
        state["exp_avg_sq"] = np.square(state["exp_avg_sq"]) * (10.0 ** -lot(4).integers(0, 25, (60, 1))).astype(dtype)
        state["exp_avg_sq"][::5, width // 2] *= np.dtype(dtype).type(1e-20)
    for kind in kinds:
        state[kind][7] = 0.0
        state[kind][8, 0] = np.nan
        state[kind][9, 0] = np.inf
    if "exp_avg" in state:
        state["exp_avg"][11] = np.finfo(dtype).tiny
    there, state_there = put(param), {kind: put(one) for kind, one in state.items()}
    late.catch_up_(param, state, ages)
    late.catch_up_(there, state_there, ages)
    for found, expected in ((there, param), *((state_there[kind], state[kind]) for kind in kinds)):
        np.testing.assert_array_equal(found.get(), expected)


def test_no_age_is_beyond_the_numbers():
    late = late_updates(zr.AdamW(lr=0.02), "float64")
    for step in range(1, MOST_MISSED + 1):
        late.advance(lr=0.001, step=step)
    arrays = [lot(at).random((3, 4)) for at in range(3)]
    ages = np.array([0, MOST_MISSED - 1, MOST_MISSED])
    there = [put(one) for one in arrays]
    for param, mean, square in (arrays, there):
        late.catch_up_(param, {"exp_avg": mean, "exp_avg_sq": square}, ages)
    for found, expected in zip(there, arrays, strict=True):
        np.testing.assert_array_equal(found.get(), expected)


def test_the_real_compiler_takes_every_kernel():
    if nvrtc.find_library() is None or nvrtc.find_headers() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12, or both without -cu12 for CUDA 13")
    words = [sys.executable, "-I", nvrtc.__file__, str(kernels_cuda.SOURCE), nvrtc.find_headers()]
    words += [*kernels_cuda.OPTIONS, *kernels_cuda.TEMPLATES]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert {"sm_75", "sm_80", "sm_90", "sm_100"} <= set(found)
    assert all(kernels == set(kernels_cuda.TEMPLATES) for kernels in found.values()), found
