"""Deltas and arrays of which much is zero on the GPU have the host's bytes."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip("cupy")

from arrays import put  # noqa: E402

from zerort.codec import apply_delta, changes_cuda, encode_delta, measure_delta  # noqa: E402
from zerort.errors import CallError  # noqa: E402
from zerort.native.reference.changes import marks_nbytes  # noqa: E402

WAYS = {"gaps": 0, "bitmap": 1, "all": 2}


def changed(numel, places, dtype=ml_dtypes.bfloat16):
    """Return any bits, and the same with some elements changed."""
    base = np.frombuffer(np.random.default_rng(numel).bytes(numel * np.dtype(dtype).itemsize), dtype)
    now = base.copy()
    now.view(f"u{now.itemsize}")[places] ^= 1
    return base, now


def some_of(numel, share):
    return np.flatnonzero(np.random.default_rng(7).random(numel) < share)


CASES = {
    "none": (5_000, [], "gaps"),
    "empty": (0, [], "gaps"),
    "one": (1, [0], "all"),
    "first": (5_000, [0], "gaps"),
    "last": (70_001, [70_000], "gaps"),
    "escapes": (70_001, [254, 255, 510, 2_047, 2_048, 2_048 + 256, 2_048 + 512, 60_000], "gaps"),
    "few": (70_001, some_of(70_001, 0.003), "gaps"),
    "some": (33_333, some_of(33_333, 0.2), "bitmap"),
    "most": (9_001, some_of(9_001, 0.95), "all"),
    "all": (9_001, slice(None), "all"),
}


@pytest.mark.parametrize(("numel", "places", "way"), CASES.values(), ids=CASES)
def test_a_delta_has_the_hosts_bytes(numel, places, way):
    base, now = changed(numel, places)
    before, after = put(base), put(now)
    size = measure_delta(base, now)
    assert measure_delta(before, after) == size
    assert size.way == WAYS[way]
    payload = encode_delta(base, now)
    there = encode_delta(before, after, size=size)
    assert there.get().tobytes() == payload.tobytes()
    for target in (before, after):  # values are absolute
        apply_delta(target, there)
        assert target.get().tobytes() == now.tobytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_elements_of_any_width_are_compared(dtype):
    for share in (0.001, 0.3):
        base, now = changed(20_011, some_of(20_011, share), dtype)
        there = encode_delta(put(base), put(now))
        assert there.get().tobytes() == encode_delta(base, now).tobytes()
        target = put(base)
        apply_delta(target, there)
        assert target.get().tobytes() == now.tobytes()


def test_kernels_stay_within_room_and_payload_that_are_given():
    """Also if arrays are others than those that were measured: what is too much is left out."""
    base, now = changed(30_000, some_of(30_000, 0.01))
    size = measure_delta(base, now)
    room = put(np.zeros(marks_nbytes(now.size), np.uint8))
    memory = put(np.full(size.nbytes + 8, 77, np.uint8))
    other = now.copy()
    other.view(np.uint16)[::3] ^= 1
    encode_delta(put(base), put(other), size=size, out=memory[: size.nbytes], room=room)
    assert memory[size.nbytes :].get().tolist() == [77] * 8
    with pytest.raises(CallError, match="Expected room of 512 bytes for 30000 elements, got 511"):
        measure_delta(put(base), put(now), room=room[:-1])
    with pytest.raises(CallError, match="Expected arrays alike"):
        measure_delta(put(base), put(now[:-1]))


def test_the_real_compiler_takes_every_kernel():
    if nvrtc.find_library() is None or nvrtc.find_headers() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12, or both without -cu12 for CUDA 13")
    words = [sys.executable, "-I", nvrtc.__file__, str(changes_cuda.SOURCE), nvrtc.find_headers()]
    words += changes_cuda.OPTIONS
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert {"sm_75", "sm_80", "sm_90", "sm_100"} <= set(found)
    wanted = {"mark_changes", "mark_positions", "scan_marks", "begin_payload", "write_changes", "apply_positions"}
    assert all(kernels == wanted for kernels in found.values()), found
