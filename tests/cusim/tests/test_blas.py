"""cuBLAS: products are NumPy's, run in the order of their stream, and what they touch is checked."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy.cuda import Stream, runtime
from cupy_backends.cuda.libs import cublas

BOUNDS = {"e": 2e-3, "f": 1e-5, "d": 1e-13, "F": 1e-5, "D": 1e-13}
NOTHING, TRANSPOSED, ADJOINT = range(3)
BFLOAT16 = 14  # CUDA_R_16BF, which CuPy 13 does not name


def numbers(shape, dtype="f", seed=0):
    lot = np.random.default_rng([seed, *np.atleast_1d(shape)])
    values = lot.standard_normal(shape)
    return (values + 1j * lot.standard_normal(shape) if dtype in "FD" else values).astype(dtype)


def assert_near(found, expected, dtype):
    assert found.dtype == expected.dtype
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(found.get() / scale, expected / scale, atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("left", "right"), [((3, 5), (5, 7)), ((17, 64), (64, 33)), ((7,), (7, 5)), ((5, 7), (7,)), ((8, 1), (1, 4))]
)
def test_products_are_numpys(left, right, dtype):
    a, b = numbers(left, dtype), numbers(right, dtype, seed=1)
    assert_near(cupy.asarray(a) @ cupy.asarray(b), a @ b, dtype)


@pytest.mark.parametrize("dtype", "fdFD")
@pytest.mark.parametrize(("left", "right"), [((2, 3, 9, 5), (2, 3, 5, 4)), ((2, 1, 9, 5), (3, 5, 4))])
def test_batches_are_numpys(left, right, dtype):
    a, b = numbers(left, dtype), numbers(right, dtype, seed=1)
    assert_near(cupy.asarray(a) @ cupy.asarray(b), a @ b, dtype)


def test_products_of_views():
    """Transposes and rows with a gap go to cuBLAS as they are, or as copies that it makes."""
    a, b = numbers((12, 20)), numbers((12, 30), seed=1)
    x, y = cupy.asarray(a), cupy.asarray(b)
    assert_near(x.T @ y, a.T @ b, "f")
    assert_near(y[:, ::3].T @ x, b[:, ::3].T @ a, "f")
    assert_near(x[:, 2:9].T @ y[:, 5:], a[:, 2:9].T @ b[:, 5:], "f")
    assert_near(cupy.asfortranarray(x), a, "f")
    assert_near(cupy.einsum("ij,ik->jk", x, y), np.einsum("ij,ik->jk", a, b), "f")
    assert_near(cupy.tensordot(x.reshape(3, 4, 20), y.reshape(3, 4, 30), 2 * [[0, 1]]), a.T @ b, "f")


def test_products_of_bfloat16():
    a, b = (numbers((8, 40), seed=seed).astype(ml_dtypes.bfloat16) for seed in (0, 1))
    x, y = (cupy.asarray(one.view("u2")) for one in (a, b))
    out = cupy.empty((8, 8), "f")
    one, zero = np.float32(1).reshape(1), np.float32(0).reshape(1)
    call = (cupy.cuda.device.get_cublas_handle(), TRANSPOSED, NOTHING, 8, 8, 40, one.ctypes.data)
    call += (y.data.ptr, BFLOAT16, 40, x.data.ptr, BFLOAT16, 40, zero.ctypes.data)
    cublas.gemmEx(*call, out.data.ptr, runtime.CUDA_R_32F, 8, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT)
    assert_near(out, a.astype("f") @ b.astype("f").T, "f")


@pytest.mark.parametrize("dtype", "fdFD")
def test_factors_and_leading_dimensions(dtype):
    """A corner of a larger matrix, in Fortran's order, with all that cuBLAS can do to it."""
    gemm = {"f": cublas.sgemm, "d": cublas.dgemm, "F": cublas.cgemm, "D": cublas.zgemm}[dtype]
    a, b, c = (numbers((12, 11), dtype, seed).T for seed in range(3))
    x, y, z = (cupy.asarray(one.T) for one in (a, b, c))
    alpha, beta = np.array(0.5, dtype), np.array(-2, dtype)
    handle = cupy.cuda.device.get_cublas_handle()
    factors = alpha.ctypes.data, beta.ctypes.data
    gemm(handle, ADJOINT, TRANSPOSED, 4, 3, 5, factors[0], x.data.ptr, 11, y.data.ptr, 11, factors[1], z.data.ptr, 11)
    c[:4, :3] = 0.5 * a[:5, :4].conj().T @ b[:3, :5].T - 2 * c[:4, :3]
    assert_near(z, c.T, dtype)


def test_vectors_with_gaps():
    a, x, y = numbers((6, 4), "d"), numbers(8, "d", 1), numbers(18, "d", 2)
    there = [cupy.asarray(one) for one in (a, x, y)]
    matrix, vector, out = (one.data.ptr for one in there)
    handle, two, three = cupy.cuda.device.get_cublas_handle(), np.array(2.0), np.array(3.0)
    # By columns, the array is 4 x 6: transposed, it is NumPy's.
    cublas.dgemv(handle, TRANSPOSED, 4, 6, two.ctypes.data, matrix, 4, vector, 2, three.ctypes.data, out, 3)
    y[::3] = 2 * a @ x[::2] + 3 * y[::3]
    assert_near(there[2], y, "d")
    result = np.zeros(1)
    cublas.ddot(handle, 4, vector, 2, out, 3, result.ctypes.data)  # waits: the result is the host's
    np.testing.assert_allclose(result[0], x[::2] @ y[:12:3], rtol=1e-12)


def test_factors_may_be_on_the_device():
    """They are then read in the order of the stream, not at the call."""
    stream = Stream(non_blocking=True)
    a = numbers((3, 3), "d")
    handle = cupy.cuda.device.get_cublas_handle()
    with stream:
        x, out = cupy.asarray(a), cupy.empty((3, 3))
        factors = cupy.asarray([5.0, 0.0])
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_DEVICE)
        cublas.dgeam(
            handle, 0, 0, 3, 3, factors.data.ptr, x.data.ptr, 3, factors[1:].data.ptr, x.data.ptr, 3, out.data.ptr, 3
        )
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
        assert_near(out, 5 * a, "d")


def test_what_the_target_held_does_not_matter():
    a, out = numbers((4, 4)), cupy.asarray(np.full((4, 4), np.nan, "f"))
    cupy.matmul(cupy.asarray(a), cupy.asarray(a), out=out)
    assert_near(out, a @ a, "f")


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_must_come_before_its_input_is_overwritten(batch, found):
    one, two = Stream(non_blocking=True), Stream(non_blocking=True)
    a, b = (cupy.asarray(numbers((*batch, 16, 16), "f", seed)) for seed in (0, 1))
    runtime.deviceSynchronize()
    with one:
        first = a @ b
    two.wait_event(one.record())
    runtime.memsetAsync(a.data.ptr, 0, a.nbytes, two.ptr)
    assert found() == []
    with one:
        second = a @ b
    runtime.memsetAsync(a.data.ptr, 0, 64, two.ptr)
    [line] = found()
    assert line.startswith("race: ")
    assert "cublasGemm" in line
    assert "fill of 64 bytes" in line
    assert first.shape == second.shape


def test_batches_by_pointers_are_checked_when_they_run(found):
    one, two = Stream(non_blocking=True), Stream(non_blocking=True)
    a, b = cupy.asarray(numbers((3, 1, 4, 4))), cupy.asarray(numbers((1, 5, 4, 4)))
    runtime.deviceSynchronize()
    with one:
        product = a @ b
    runtime.memsetAsync(b.data.ptr + 64, 0, 4, two.ptr)
    [line] = found()
    assert "cublasSgemmBatched" in line
    assert product.shape == (3, 5, 4, 4)


def test_products_stay_within_their_arrays(found):
    call = cupy.cuda.device.get_cublas_handle(), NOTHING, NOTHING
    one = np.ones(1, "f").ctypes.data
    block = runtime.malloc(4096)
    with pytest.raises(cublas.CUBLASError, match="INVALID_VALUE"):
        cublas.sgemm(*call, 32, 33, 1, one, block, 32, block, 1, one, block, 32)
    [line] = found()
    assert "cublasSgemm of 4224 bytes goes 128 bytes past the end" in line
    runtime.free(block)
    host = np.ones(4, "f").ctypes.data
    with pytest.raises(cublas.CUBLASError, match="INVALID_VALUE"):
        cublas.sgemm(*call, 2, 2, 2, one, host, 2, host, 2, one, host, 2)
    [line] = found()
    assert "cublasSgemm gets host memory that is not pinned" in line


def test_what_is_not_emulated_says_so(capfd):
    handle, x = cupy.cuda.device.get_cublas_handle(), cupy.asarray(numbers(4))
    with pytest.raises(cublas.CUBLASError, match="NOT_SUPPORTED"):
        cublas.saxpy(handle, 4, np.ones(1, "f").ctypes.data, x.data.ptr, 1, x.data.ptr, 1)
    assert "cublasSaxpy_v2 is not emulated (see tests/cusim/README.md)" in capfd.readouterr().err
