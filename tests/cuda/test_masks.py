"""Masks of pruned elements on the GPU are those of the host."""

import subprocess
import sys

import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

from zerort.native.dtypes import numpy_dtype  # noqa: E402
from zerort.optim.forms import masks, masks_cuda  # noqa: E402

NUMEL = 20_004


def values_of(dtype, seed=0):
    """Return values among which many are equal, NaN and zeros of both signs included."""
    lot = np.random.default_rng(seed)
    values = (np.round(lot.standard_normal(NUMEL) * 8) / 8).astype(dtype)
    values[:4], values[100:103] = -0.0, (np.nan, np.inf, -np.inf)
    mask = np.packbits(lot.random(NUMEL) < 0.3, bitorder="little")
    return values, mask


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_histograms_and_the_smallest_are_the_hosts(dtype):
    values, mask = values_of(dtype)
    there, mask_there = put(values), put(mask)
    bits, prefix, shift = 8 * values.itemsize, 0, 8 * values.itemsize
    gone = np.unpackbits(mask, bitorder="little")[:NUMEL].view(bool)
    chosen = np.sort(np.abs(values[~gone]))[5_000].astype(dtype).view(f"u{values.itemsize}")
    while shift:
        width = min(11, shift)
        shift -= width
        counts, counts_there = np.zeros(1 << width, np.int64), put(np.zeros(1 << width, np.int64))
        for module, row, array, octets in (
            (masks, counts, values, mask),
            (masks_cuda, counts_there, there, mask_there),
        ):
            module.add_histogram(row, array, octets, shift=shift, width=width, prefix=prefix)
        digit = int(chosen) >> shift & ((1 << width) - 1)
        assert counts_there.get()[digit] == counts[digit] > 0
        last = -1 if shift + width == bits else counts.size  # the host counts what is pruned as the largest
        np.testing.assert_array_equal(counts_there.get()[:last], counts[:last])
        prefix = prefix << width | digit
    of = int(counts[digit])
    assert of > 10
    for equal in (0, 1, of // 2, of):
        here, other = mask.copy(), put(mask)
        masks.mark_smallest(here, values, threshold=prefix, equal=equal, of=of)
        masks_cuda.mark_smallest(other, there, threshold=prefix, equal=equal, of=of)
        assert other.get().tobytes() == here.tobytes()
        assert np.unpackbits(here).sum() > np.unpackbits(mask).sum()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_two_of_four_and_zeros_are_the_hosts(dtype):
    values, mask = values_of(numpy_dtype(dtype))
    there, mask_there = put(values), put(mask)
    if values.itemsize > 2:  # of masters
        masks.mark_two_of_four(mask, values)
        masks_cuda.mark_two_of_four(mask_there, there)
        assert mask_there.get().tobytes() == mask.tobytes()
    masks.zero_marked(values, mask)
    masks_cuda.zero_marked(there, mask_there)
    assert there.get().tobytes() == values.tobytes()


def test_the_real_compiler_takes_every_kernel():
    if nvrtc.find_library() is None or nvrtc.find_headers() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12, or both without -cu12 for CUDA 13")
    words = [sys.executable, "-I", nvrtc.__file__, str(masks_cuda.SOURCE), nvrtc.find_headers(), *masks_cuda.OPTIONS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert {"sm_75", "sm_80", "sm_90", "sm_100"} <= set(found)
    wanted = {"add_histogram", "mark_smallest", "mark_two_of_four", "zero_marked"}
    assert all(kernels == wanted for kernels in found.values()), found
