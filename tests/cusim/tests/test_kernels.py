"""Kernels: CuPy's own, and raw ones with barriers, shared memory, warps, atomics, templates and tables of pointers."""

import cupy
import numpy as np
import pytest

A = np.arange(1000, dtype="f")


@pytest.fixture
def a():
    return cupy.asarray(A)


def test_elementwise(a):
    kernel = cupy.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_distance")
    assert (kernel(a * 4, a).get() == (A * 3) ** 2).all()


def test_half_and_bfloat16(a):
    import ml_dtypes

    assert (a.astype("e").get() == A.astype("e")).all()
    kernel = cupy.RawKernel(
        """#include <cuda_bf16.h>
        extern "C" __global__ void round_to(const float *x, __nv_bfloat16 *y, int n) {
          int i = blockDim.x * blockIdx.x + threadIdx.x;
          if (i < n) y[i] = __float2bfloat16(x[i] * 1.37f);
        }""",
        "round_to",
    )
    out = cupy.empty(1000, "u2")
    kernel((8,), (128,), (a, out, np.int32(1000)))
    expected = (A * np.float32(1.37)).astype(ml_dtypes.bfloat16)
    assert (out.get() == expected.view("u2")).all()


@pytest.mark.parametrize("compiled", [("-ftz=true",), ("-ftz=true", "--ftz=false"), ()])
def test_subnormal_numbers_are_flushed_where_the_compiler_was_told_so(compiled):
    """CuPy adds -ftz=true to all that it compiles itself; the last word counts."""
    from cupy.cuda import compiler

    source = 'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }'
    module = cupy.cuda.Module()
    module.load(compiler.compile_using_nvrtc(source, compiled)[0])
    tiny = np.array([1e-40, 1e-37], "f")
    flushed = np.array([0, 2e-37], "f")
    for kernel, expected in (
        (module.get_function("twice"), flushed if compiled == ("-ftz=true",) else 2 * tiny),
        (cupy.RawKernel(source, "twice", options=("--ftz=false",)), flushed),
    ):
        x = cupy.asarray(tiny)
        kernel((1,), (2,), (x,))
        assert (x.get() == expected).all()


def test_reductions(a):
    assert float(a.sum()) == A.sum()
    table = cupy.arange(12.0).reshape(3, 4)
    assert (table.max(axis=1).get() == [3, 7, 11]).all()
    assert bool(cupy.isfinite(a).all())


def test_barriers_and_dynamic_shared_memory():
    kernel = cupy.RawKernel(
        """extern "C" __global__ void reverse(float *y) {
          extern __shared__ float s[];
          s[threadIdx.x] = y[threadIdx.x];
          __syncthreads();
          y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
        }""",
        "reverse",
    )
    y = cupy.arange(256, dtype="f")
    kernel((1,), (256,), (y,), shared_mem=1024)
    assert (y.get() == np.arange(256)[::-1]).all()


def test_warps_and_atomics(a):
    kernel = cupy.RawKernel(
        """extern "C" __global__ void total(const float *x, float *out, int n) {
          int i = blockDim.x * blockIdx.x + threadIdx.x;
          float v = i < n ? x[i] : 0.f;
          for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
          if ((threadIdx.x & 31) == 0) atomicAdd(out, v);
        }""",
        "total",
    )
    out = cupy.zeros(1, "f")
    kernel((4,), (256,), (a, out, np.int32(1000)))
    assert out.get()[0] == A.sum()


def test_templates():
    module = cupy.RawModule(
        code="""template <typename T> __global__ void fill(T *p, T v, int n) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) p[i] = v;
        }""",
        name_expressions=["fill<float>", "fill<int>"],
        options=("-std=c++17",),
    )
    out = cupy.empty(10, "i")
    module.get_function("fill<int>")((1,), (32,), (out, np.int32(9), np.int32(10)))
    assert (out.get() == 9).all()


def test_modules_come_and_go():
    for value in range(5):
        module = cupy.RawModule(code=f'extern "C" __global__ void set_{value}(int *p) {{ *p = {value}; }}')
        out = cupy.empty(1, "i")
        module.get_function(f"set_{value}")((1,), (1,), (out,))
        assert out.get()[0] == value
        del module
        cupy._util.clear_memo()


def test_module_variables():
    module = cupy.RawModule(
        code='__device__ float scale[2]; extern "C" __global__ void use(float *y) { y[0] *= scale[1]; }'
    )
    scale = cupy.ndarray(2, "f", module.get_global("scale"))
    scale[...] = cupy.asarray([2, 5], dtype="f")
    y = cupy.ones(1, "f")
    module.get_function("use")((1,), (1,), (y,))
    assert y.get()[0] == 5


def test_tables_of_pointers():
    parts = [cupy.full(100, i, "f") for i in range(3)]
    kernel = cupy.RawKernel(
        """extern "C" __global__ void add_one(float **parts, int n) {
          int i = threadIdx.x;
          if (i < n) parts[blockIdx.x][i] += 1;
        }""",
        "add_one",
    )
    table = cupy.asarray([part.data.ptr for part in parts], dtype="u8")
    kernel((3,), (128,), (table, np.int32(100)))
    assert [float(part.sum()) for part in parts] == [100, 200, 300]
    assert (cupy.concatenate(parts).get() == np.repeat([1, 2, 3], 100)).all()


def test_fused_functions(a):
    @cupy.fuse()
    def fused(x, y):
        return x * y + cupy.exp(-x)

    assert np.allclose(fused(a, a).get(), A * A + np.exp(-A))


def test_compile_errors_name_the_line():
    kernel = cupy.RawKernel('extern "C" __global__ void bad(int *x) { x = nope; }', "bad")
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nope"):
        kernel.compile()


def test_threads_that_miss_a_barrier_are_reported(found):
    kernel = cupy.RawKernel(
        """extern "C" __global__ void stuck(int *x) {
          if (threadIdx.x < 16) __syncwarp(0xffffffffu); else __syncthreads();
        }""",
        "stuck",
    )
    kernel((1,), (32,), (cupy.zeros(1, "i"),))
    assert found() == ["barrier: kernel stuck: its threads wait at barriers that not all of them reach"]
