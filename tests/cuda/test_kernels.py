"""The kernels of the GPU give the host's bits."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

from zerort import native  # noqa: E402
from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.kernel_module import KernelModule  # noqa: E402
from zerort.errors import CallError  # noqa: E402
from zerort.optim import SGD, AdamW, Blocks, Lion, clip_factor, norm_of, square_sums, square_sums_of  # noqa: E402
from zerort.optim import kernels_cuda as cuda  # noqa: E402
from zerort.optim.kernels import kernels_for  # noqa: E402

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = [0, 33, 5_003]
STEPS = 4


def numbers(numel, dtype="float32", seed=0, spread=3.0):
    """Numbers of all magnitudes, zeros among them."""
    lot = np.random.default_rng(seed)
    values = lot.standard_normal(numel) * np.exp(spread * lot.standard_normal(numel))
    values[::17] = 0
    with np.errstate(all="ignore"):
        return values.astype(DTYPES[dtype])


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.get().tobytes() == expected.tobytes()


OPTIMIZERS = {
    "adamw": AdamW(lr=3e-3, weight_decay=0.1),
    "adamw-plain": AdamW(lr=1e-2, betas=(0.0, 0.5), eps=1e-3, weight_decay=0.0),
    "sgd": SGD(lr=0.1),
    "sgd-decay": SGD(lr=0.1, weight_decay=0.3),
    "sgd-momentum": SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "lion": Lion(lr=1e-3, weight_decay=0.2),
}


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "copy_dtype"),
    [
        ("float32", "float32", None),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float64", "float64", None),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_hosts_bits(name, dtype, grad_dtype, copy_dtype, numel):
    optimizer = OPTIMIZERS[name]
    here = {"param": numbers(numel, dtype, seed=1)}
    state = {spec.name: np.zeros(numel, spec.dtype) for spec in optimizer.states_in(dtype, (numel,))}
    copy = None if copy_dtype is None else np.zeros(numel, DTYPES[copy_dtype])
    there, state_there = put(here["param"]), {key: put(array) for key, array in state.items()}
    copy_there = None if copy is None else put(copy)
    for step in range(1, STEPS + 1):
        grad = numbers(numel, grad_dtype, seed=10 + step, spread=1.0)
        settings = {"lr": optimizer.lr_at(step), "step": step, "grad_scale": 0.37}
        optimizer.update_(here["param"], grad, state, **settings, copy_out=copy)
        optimizer.update_(there, put(grad), state_there, **settings, copy_out=copy_there)
    assert_same_bits(there, here["param"])
    for key, array in state.items():
        assert_same_bits(state_there[key], array)
    if copy is not None:
        assert_same_bits(copy_there, copy)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov", "lion"])
def test_masters_in_halves_have_the_hosts_bits(name, numel):
    optimizer = OPTIMIZERS[name]
    master = numbers(numel, seed=1)
    upper, lower = np.empty(numel, DTYPES["bfloat16"]), np.empty(numel, np.uint16)
    native.split_master(upper, lower, master)
    upper_there, lower_there, master_there = put(np.zeros_like(upper)), put(np.zeros_like(lower)), put(master)
    cuda.split_master(upper_there, lower_there, master_there)
    state = {spec.name: np.zeros(numel, spec.dtype) for spec in optimizer.states_in("float32", (numel,))}
    state_there = {key: put(array) for key, array in state.items()}
    for step in range(1, STEPS + 1):
        grad = numbers(numel, "bfloat16", seed=10 + step, spread=1.0)
        settings = {"lr": optimizer.lr_at(step), "step": step, "grad_scale": 0.37}
        optimizer.update_(lower, grad, state, **settings, copy_out=upper)
        optimizer.update_(lower_there, put(grad), state_there, **settings, copy_out=upper_there)
    assert_same_bits(upper_there, upper)
    assert_same_bits(lower_there, lower)
    native.join_master(master, upper, lower)
    cuda.join_master(master_there, upper_there, lower_there)
    assert_same_bits(master_there, master)
    cuda.round_master(upper_there, master_there)
    assert_same_bits(upper_there, upper)
    with pytest.raises(CallError, match="Expected copy_out, the bfloat16 half"):
        optimizer.update_(lower_there, put(grad), state_there, **settings, copy_out=None)


@pytest.mark.parametrize("master", ["float32", "remainder"])
@pytest.mark.parametrize("numel", [0, 33, 256, 5_003])
def test_moments_in_blocks_have_the_hosts_bits(master, numel):
    optimizer = AdamW(lr=3e-3, weight_decay=0.1, moments="int8")
    param, upper, lower = numbers(numel, seed=1), np.empty(numel, DTYPES["bfloat16"]), np.empty(numel, np.uint16)
    native.split_master(upper, lower, param)
    here = lower if master == "remainder" else param
    there, upper_there = put(here), put(upper)
    payloads = [np.zeros(-(-numel // 256) * 260, np.uint8) for _ in range(2)]
    payloads_there = [put(payload) for payload in payloads]
    names = ("exp_avg.int8", "exp_avg_sq.int8")
    for step in range(1, STEPS + 1):
        grad = numbers(numel, "bfloat16", seed=10 + step, spread=1.0)
        grad[grad.size // 2 :][:300:7] = np.inf if step == STEPS else 0
        for array, copy, gradient, blocks in (
            (here, upper, grad, payloads),
            (there, upper_there, put(grad), payloads_there),
        ):
            state = {name: Blocks(payload, 2**33 + 512) for name, payload in zip(names, blocks, strict=True)}
            optimizer.update_(array, gradient, state, lr=3e-3, step=step, grad_scale=0.37, copy_out=copy)
    number = ~np.isnan(upper.astype(np.float32))
    np.testing.assert_array_equal(there.get()[number], here[number])
    np.testing.assert_array_equal(upper_there.get()[number], upper[number])
    for payload_there, payload in zip(payloads_there, payloads, strict=True):
        assert_same_bits(payload_there, payload)


def test_the_copy_may_take_the_gradients_place():
    param, grad = numbers(5000), numbers(5000, "bfloat16", seed=2)
    on_gpu, gradient = put(param), put(grad)
    SGD(lr=0.1).update_(param, grad, {}, lr=0.1, step=1, grad_scale=1.0, copy_out=grad)
    SGD(lr=0.1).update_(on_gpu, gradient, {}, lr=0.1, step=1, grad_scale=1.0, copy_out=gradient)
    assert_same_bits(gradient, grad)


@pytest.mark.parametrize("other", ["float32", "float64", "float16", "bfloat16"])
def test_casts_give_the_hosts_bits(other):
    special = [0.0, -0.0, np.inf, -np.inf, 65504, 65520, 1e-8, 6e-8, 3e38, 1e-45, 1.0039062, 1.0117188]
    for source_dtype, out_dtype in (("float32", other), (other, "float32")):
        with np.errstate(all="ignore"):
            source = np.concatenate([numbers(5_001, seed=3, spread=8.0), special]).astype(DTYPES[source_dtype])
        out = np.empty(source.size, DTYPES[out_dtype])
        there = put(out)
        native.cast_into(out, source)
        cuda.cast_into(there, put(source))
        assert_same_bits(there, out)
        cuda.cast_into(there, put(np.full(source.size, np.nan, source.dtype)))
        assert np.isnan(there.get().astype(np.float64)).all()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("out", "source"),
    [*((dtype, dtype) for dtype in DTYPES), ("float32", "bfloat16"), ("float32", "float16")],
)
def test_sums_give_the_hosts_bits(out, source, numel):
    here, more = numbers(numel, out, seed=1), numbers(numel, source, seed=2)
    there = put(here)
    with np.errstate(all="ignore"):
        native.add_into(here, more)
    cuda.add_into(there, put(more))
    assert_same_bits(there, here)


def test_a_copy_is_looked_at_later():
    """A number would have to be waited for: one look at all that was copied promises it."""
    values = numbers(5_003)
    values[[4_000, 7]] = np.nan, np.inf
    there = cupy.zeros(5_003, np.float32)
    assert cuda.copy_checked(there, put(values)) is None
    assert_same_bits(there, values)
    assert int(cuda.look_for_nonfinite(there)) == 7
    assert int(cuda.look_for_nonfinite(there[8:4_000])) == -1


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sums_give_the_hosts_bits(dtype, numel):
    array = numbers(numel, dtype, seed=4, spread=1.0)
    there = put(array)
    for block in (1, 31, 1000, 1024):
        if numel <= 1000 or block > 100:
            assert_same_bits(square_sums(there, block), square_sums(array, block))
    assert cuda.square_sum(there) == pytest.approx(native.square_sum(array), rel=1e-12)
    assert norm_of(square_sums(there, 1024)) == norm_of(square_sums(array, 1024))
    assert square_sums(there).tolist() == [cuda.square_sum(there)]
    assert clip_factor(norm_of(square_sums(there, 1024)), 1e9) == 1.0


@pytest.mark.parametrize("block", [None, 1024])
def test_square_sums_of_several_arrays_are_those_of_each(block):
    arrays = [put(numbers(numel, seed=numel, spread=1.0)) for numel in (5_003, 0, 1, 300_000, 1_024)]
    with CudaDevice(0) as device:
        for given in (arrays, arrays[1:2], []):
            found = square_sums_of(given, block, device=device)
            assert len(found) == len(given)
            for sums, array in zip(found, given, strict=True):
                assert_same_bits(put(sums), device.fetch(square_sums(array, block)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_that_is_not_finite_is_found(dtype):
    array = numbers(4_000, dtype, seed=5, spread=1.0)
    assert cuda.first_nonfinite(put(array)) == -1
    for place, value in ((3_999, np.nan), (2_000, -np.inf), (1_999, np.inf), (0, np.nan)):
        array[place] = value
        assert cuda.first_nonfinite(put(array)) == place == native.first_nonfinite(array)
    assert cuda.first_nonfinite(put(array[:0])) == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaling_measures_what_it_leaves(dtype):
    array = numbers(5_003, dtype, seed=6, spread=1.0)
    there = put(array)
    sums, first = cuda.unscale_(there, 1 / 3)
    scaled = (array.astype(np.float32) * np.float32(1 / 3)).astype(array.dtype)
    if dtype == "float64":
        scaled = array * (1 / 3)
    assert_same_bits(there, scaled)
    assert_same_bits(sums, square_sums(scaled, 1024))
    assert int(first[0]) == np.iinfo(np.uint64).max
    scaled[4_000] = np.inf
    assert int(cuda.unscale_(put(scaled), 2.0)[1][0]) == 4_000


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: cuda.lion_(p, p.get(), p, lr=1, beta1=0, beta2=0, weight_decay=0), "CuPy array like the others"),
        (lambda p: cuda.sgd_(p, p[:3].copy(), None, lr=1), "of 8 elements, got 3"),
        (lambda p: cuda.sgd_(p, p.astype(np.int32), None, lr=1), "of dtype float32, bfloat16, float16"),
        (lambda p: cuda.sgd_(p, cupy.ones((2, 8), np.float32)[:, 0], None, lr=1), "contiguous"),
        (lambda p: cuda.sgd_(p, p, None, lr=1), "param and grad apart|grad and param apart"),
        (lambda p: cuda.sgd_(p, p.copy(), None, lr=1, momentum=0.9), "momentum_buffer"),
        (lambda p: cuda.sgd_(p, p.copy(), None, lr=1, copy_out=p.copy()), "copy_out of dtype bfloat16"),
        (
            lambda p: (lambda g: cuda.sgd_(p, g, None, lr=1, copy_out=g.view("e")[:8]))(p.copy()),
            "apart, got ranges that",
        ),
        (lambda p: cuda.cast_into(p.astype(np.float64), p.astype(np.float16)), "by way of float32"),
        (lambda p: cuda.add_into(p, p.astype(np.float64)), "no wider than out, float32, got float64"),
        (lambda p: cuda.square_sums_into(cupy.empty(1), p, 0), "at least 1"),
        (lambda p: cuda.square_sums_into(cupy.empty(2), p, 8), "of 1 elements"),
    ],
)
def test_what_kernels_cannot_take_they_refuse(call, match):
    with pytest.raises(CallError, match=match):
        call(cupy.ones(8, np.float32))


def test_the_arrays_device_decides():
    assert kernels_for(cupy.ones(1)) is cuda
    assert kernels_for(np.ones(1)) is native


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_subnormal_numbers_are_no_zeros(name):
    """CuPy's own modules are compiled with -ftz=true, which takes them for zeros."""
    optimizer = OPTIMIZERS[name]
    tiny = np.random.default_rng(7).uniform(1e-41, 1e-38, 999).astype(np.float32)
    assert (tiny < np.finfo(np.float32).tiny).any()
    here, grad = tiny.copy(), tiny[::-1].copy()
    state = {spec.name: tiny.copy() for spec in optimizer.states((tiny.size,))}
    there, state_there = put(here), {key: put(value) for key, value in state.items()}
    settings = {"lr": 0.1, "step": 3, "grad_scale": 0.5, "copy_out": None}
    optimizer.update_(here, grad, state, **settings)
    optimizer.update_(there, put(grad), state_there, **settings)
    assert_same_bits(there, here)
    for key, value in state.items():
        assert_same_bits(state_there[key], value)
    assert (here != 0).any()


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What NVRTC is told from now on, one list of options for each compilation; nothing was compiled before."""
    from cupy.cuda import compiler

    compile_program, lists = compiler.nvrtc.compileProgram, []
    monkeypatch.setattr(
        compiler.nvrtc,
        "compileProgram",
        lambda program, options: (lists.append(options), compile_program(program, options)),
    )
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return lists


SMALL = """extern "C" __global__ void half_of(float *x) { x[threadIdx.x] *= 0.5f; }"""


def test_what_was_compiled_is_kept_for_the_next_process(told, tmp_path, monkeypatch):
    """On the disk, as a whole: what is damaged is compiled again, and without a disk it works, too."""
    source = tmp_path / "small.cu"
    source.write_text(SMALL)

    def run():
        array = put(np.full(8, 1e-40, np.float32))
        KernelModule(source, ()).get_function("half_of")((1,), (8,), (array,))
        assert_same_bits(array, np.full(8, 1e-40, np.float32) * np.float32(0.5))

    run()
    run()
    assert len(told) == 1
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    run()
    assert len(told) == 2
    source.write_text(SMALL + "\n")  # another source
    run()
    assert len(told) == 3
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/nowhere")
    run()
    assert len(told) == 4
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    run()
    assert len(told) == 5


def test_the_real_compiler_takes_every_kernel(told):
    """To PTX, for every architecture from Volta on that this NVRTC knows; with the very options that it is told here.

    No product is fused with a sum, and no instruction flushes subnormal numbers.
    """
    if nvrtc.find_library() is None or nvrtc.find_headers() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12, or both without -cu12 for CUDA 13")
    KernelModule(cuda.SOURCE, cuda.OPTIONS, cuda.TEMPLATES).get_function("cast")
    [options] = told
    options = [option for option in options if not option.startswith(("-I", "-arch", "--pch"))]
    # Isolated: what emulates a GPU for this process must not reach that one.
    words = [
        sys.executable,
        "-I",
        nvrtc.__file__,
        str(cuda.SOURCE),
        nvrtc.find_headers(),
        *options,
        *cuda.TEMPLATES,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    oldest = {"sm_70"} if nvrtc.find_library().endswith(".12") else set()
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} | oldest <= set(found)
    wanted = {f"{name}<{kind}>" for name in ("adamw", "sgd", "lion") for kind in ("float", "double")}
    wanted |= {"cast", "add", "measure", "split_master", "join_master", "adamw_blocks"}
    assert all(kernels == wanted for kernels in found.values()), found
