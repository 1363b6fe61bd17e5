"""The block formats and bfloat16 on the GPU give the host's bits."""

import subprocess
import sys

import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

from zerort.codec import BFLOAT16, INT4, INT8, ROWS, Coded, LargestFormat, Stochastic, kernels_cuda  # noqa: E402
from zerort.errors import CallError  # noqa: E402
from zerort.native import cast_into  # noqa: E402
from zerort.native.dtypes import numpy_dtype  # noqa: E402

FORMATS = [INT8, INT4, BFLOAT16]


def values_of(numel, seed=0):
    """Return any bits at all, and numbers of like magnitude."""
    lot = np.random.default_rng(seed)
    values = lot.standard_normal(numel).astype(np.float32)
    values[numel // 2 :] = np.frombuffer(lot.bytes(4 * (numel - numel // 2)), np.float32)
    values[: min(300, numel)] = 0
    if numel > 2_000:
        values[700:703] = np.nan, np.inf, -np.inf
        values[900:1_400] *= np.float32(1e-42)
    return values


@pytest.mark.parametrize("numel", [0, 1, 129, 255, 5_003])
@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_codes_and_values_are_the_hosts(format, numel):
    roundings = [None] if format is BFLOAT16 else [None, Stochastic(5, 6, 7)]
    for rounding in roundings:
        for start in (0, 1024, (1 << 32) - 1024):
            source = values_of(numel, seed=numel)
            payload = np.zeros(format.nbytes(numel), np.uint8)
            format.encode(payload, source, start=start, rounding=rounding)
            there = put(np.zeros_like(payload))
            format.encode(there, put(source), start=start, rounding=rounding)
            assert there.get().tobytes() == payload.tobytes()
            out, out_there = np.zeros(numel, np.float32), put(np.zeros(numel, np.float32))
            format.decode(out, payload)
            format.decode(out_there, there)
            if format is BFLOAT16:  # the payload of a NaN is not promised
                np.testing.assert_array_equal(out_there.get(), out)
            else:
                assert out_there.get().tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", [INT8, INT4], ids=lambda one: one.name)
def test_halves_are_coded_and_decoded_as_on_the_host(format, dtype):
    source = np.empty(5_003, numpy_dtype(dtype))
    cast_into(source, np.clip(values_of(source.size), -6e4, 6e4))  # also NaN
    payload = np.zeros(format.nbytes(source.size), np.uint8)
    format.encode(payload, source, start=1024)
    there = put(np.zeros_like(payload))
    format.encode(there, put(source), start=1024)
    assert there.get().tobytes() == payload.tobytes()
    out = np.empty_like(source)
    format.decode(out, payload)
    out_there = put(np.zeros_like(source))
    format.decode(out_there, there)
    assert out_there.get().tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [INT8, INT4], ids=lambda one: one.name)
def test_differences_have_the_hosts_bits(format, dtype):
    """Taken from a base and added to it, in which NaN and infinities count as 0."""
    for numel in (1, 129, 5_003):
        source, base = (np.empty(numel, numpy_dtype(dtype)) for _ in range(2))
        for array, seed in ((source, numel), (base, numel + 1)):
            if dtype == "float32":
                array[:] = values_of(numel, seed=seed)
            else:
                cast_into(array, values_of(numel, seed=seed))
        payload = np.zeros(format.nbytes(numel), np.uint8)
        format.encode(payload, source, start=1024, base=base)
        there, base_there = put(np.zeros_like(payload)), put(base)
        format.encode(there, put(source), start=1024, base=base_there)
        assert there.get().tobytes() == payload.tobytes()
        format.decode(base, payload, adds=True)
        format.decode(base_there, there, adds=True)
        assert base_there.get().tobytes() == base.tobytes()
    with pytest.raises(CallError, match="Expected what lies beside source of 5003 elements"):
        format.encode(there, put(source), base=base_there[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_are_decoded_as_on_the_host(rows, dtype):
    for numel in (0, 1, 130, 5_003):
        source = np.empty(numel, numpy_dtype(dtype))
        values = np.clip(values_of(numel, seed=1), -6e4, 6e4)
        if dtype == "float32":
            source[:] = values
        else:
            cast_into(source, values)
        octets = np.empty(rows.nbytes_of(numel), np.uint8)
        rows.encode(octets, source)
        out, out_there = np.zeros_like(source), put(np.zeros_like(source))
        rows.decode(out, octets)
        rows.decode(out_there, put(octets))
        assert out_there.get().tobytes() == out.tobytes()
    with pytest.raises(CallError, match=f"bytes \\(uint8, 1-D\\) for 7 elements in rows of {rows.name}"):
        rows.decode(put(np.zeros(7, np.float32)), put(np.zeros(7, np.uint8)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_feedback_and_sums_have_the_hosts_bits(format, dtype):
    """What codes lose is kept in the same pass; payloads of three senders are summed in order, and rounded once."""
    numel = 5 * 256 + 77
    payloads, payloads_there = (np.zeros((3, -(-format.nbytes(numel) // 4) * 4), np.uint8) for _ in range(2))
    payloads_there = put(payloads_there)
    residual = np.zeros(numel, numpy_dtype("bfloat16"))
    residual_there = put(residual)
    for sender in range(3):
        source = np.empty(numel, numpy_dtype(dtype))
        source[:] = np.clip(np.nan_to_num(values_of(numel, seed=sender)), -1e30, 1e30)
        source[700:703] = np.nan, np.inf, -np.inf
        mine, there = (one[sender, : format.nbytes(numel)] for one in (payloads, payloads_there))
        format.encode_with_feedback(mine, source, residual, start=1024)
        format.encode_with_feedback(there, put(source), residual_there, start=1024)
        assert there.get().tobytes() == mine.tobytes()
        assert residual_there.get().tobytes() == residual.tobytes()
        assert residual.astype(np.float32).any() != (format.name == dtype)  # which loses nothing
    out, out_there = np.zeros(numel, numpy_dtype(dtype)), put(np.zeros(numel, numpy_dtype(dtype)))
    for target, rows in ((out, payloads), (out_there, payloads_there)):
        format.decode_sum(target, [[Coded(numel, row[: format.nbytes(numel)])] for row in rows])
    np.testing.assert_array_equal(out_there.get().astype(np.float32), out.astype(np.float32))
    unsorted = [[Coded(numel, payloads_there[at, : format.nbytes(numel)])] for at in (0, 2, 1)]
    with pytest.raises(CallError, match="payloads at equal distances"):
        format.decode_sum(out_there, unsorted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3, 1.0])
def test_the_largest_of_each_block_are_the_hosts(fraction, dtype):
    """NaN, infinity and equal magnitudes included; what is not sent is kept, and three senders' are summed in order."""
    format = LargestFormat(fraction)
    for numel in (0, 1, 31, 1_023, 2 * 1_024 + 77):
        payloads = np.zeros((3, format.nbytes(numel)), np.uint8)
        payloads_there = put(payloads)
        residual = np.random.default_rng(1).standard_normal(numel).astype(np.float32)
        residual_there = put(residual)
        for sender in range(3):
            source = np.empty(numel, numpy_dtype(dtype))
            lot = np.random.default_rng(sender)
            source[:] = lot.standard_normal(numel) * 10.0 ** lot.uniform(-40, 4, numel)  # also subnormal
            source[:40], source[40:60] = -0.0, 3.5
            if numel > 2_000:
                source[700:703] = np.nan, np.inf, -np.inf
            mine, there = payloads[sender], payloads_there[sender]
            if sender == 1:
                format.encode(mine, source, start=2_048)
                format.encode(there, put(source), start=2_048)
            else:
                format.encode_with_feedback(mine, source, residual)
                format.encode_with_feedback(there, put(source), residual_there)
            assert there.get().tobytes() == mine.tobytes(), (numel, sender)
            assert residual_there.get().tobytes() == residual.tobytes(), (numel, sender)
        out, out_there = np.zeros(numel, numpy_dtype(dtype)), put(np.zeros(numel, numpy_dtype(dtype)))
        for target, rows in ((out, payloads), (out_there, payloads_there)):
            format.decode_sum(target, [[Coded(numel, row)] for row in rows])
        found, expected = out_there.get().astype(np.float32), out.astype(np.float32)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found[expected == 0]), np.signbit(expected[expected == 0]))


def test_wrong_arrays_are_named():
    with pytest.raises(CallError, match="starts a block of 1024 elements, got start=64"):
        LargestFormat(0.1).encode(put(np.zeros(4, np.uint8)), put(np.zeros(3, np.float32)), start=64)
    with pytest.raises(CallError, match="payload of 12 elements of uint8"):
        LargestFormat(0.1).encode(put(np.zeros(4, np.uint8)), put(np.zeros(3, np.float32)))
    with pytest.raises(CallError, match="blocks of 1024 elements on GPUs, got 512"):
        kernels_cuda.sum_largest(put(np.zeros(3, np.float32)), [put(np.zeros(12, np.uint8))], block=512, keep=3)
    with pytest.raises(CallError, match="multiple of a block, 128"):
        INT4.encode(put(np.zeros(INT4.nbytes(300), np.uint8)), put(np.zeros(300, np.float32)), start=64)
    with pytest.raises(CallError, match="source of 300 elements of float32"):
        INT4.encode(put(np.zeros(INT4.nbytes(300), np.uint8)), put(np.zeros(300, np.float64)))
    with pytest.raises(CallError, match="scales to be a CuPy array"):
        INT4.encode(np.zeros(INT4.nbytes(300), np.uint8), put(np.zeros(300, np.float32)))
    with pytest.raises(CallError, match="Expected float32 and bfloat16 or float16, got float64"):
        BFLOAT16.encode(put(np.zeros(600, np.uint8)), put(np.zeros(300, np.float64)))
    with pytest.raises(CallError, match="bits of 8 or 4, got 5"):
        kernels_cuda.decode_blocks(put(np.zeros(3, np.float32)), None, None, bits=5)


def test_the_real_compiler_takes_every_kernel():
    if nvrtc.find_library() is None or nvrtc.find_headers() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12, or both without -cu12 for CUDA 13")
    words = [sys.executable, "-I", nvrtc.__file__, str(kernels_cuda.SOURCE), nvrtc.find_headers()]
    words += kernels_cuda.OPTIONS
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert {"sm_75", "sm_80", "sm_90", "sm_100"} <= set(found)
    wanted = {"encode_blocks", "decode_blocks", "decode_rows", "sum_payloads", "narrow_with_residual", "cast_values"}
    wanted |= {"encode_largest", "sum_largest"}
    assert all(kernels == wanted for kernels in found.values()), found
