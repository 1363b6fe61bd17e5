"""Races: each program runs twice, in order (nothing is found) and without (found, also when the answer is right)."""

import re
import threading

import cupy
import numpy as np
import pytest
from cupy.cuda import Event, Stream, runtime

import cusim

ADD = cupy.RawKernel(
    """extern "C" __global__ void add(const float *x, float *y, int n) {
      int i = blockDim.x * blockIdx.x + threadIdx.x;
      if (i < n) y[i] += x[i];
    }""",
    "add",
)
VERB = r"(reads and writes|reads|writes) \((.+)\)"
SHAPE = re.compile(rf"race: (.+?) {VERB} and (.+?) {VERB} have no order on bytes \[(\d+), (\d+)\)")


@pytest.fixture
def one():
    return Stream(non_blocking=True)


@pytest.fixture
def two():
    return Stream(non_blocking=True)


@pytest.fixture
def arrays():
    """Two arrays that everyone may use: the host has waited for what made them."""
    x, y = cupy.ones(1024, "f"), cupy.zeros(1024, "f")
    runtime.deviceSynchronize()
    return x, y


def add(stream, x, y, count=1024):
    with stream:
        ADD((8,), (128,), (x, y, np.int32(count)))


def only(lines):
    [line] = lines
    return SHAPE.match(line).groups()


def test_two_kernels_that_write_the_same(arrays, one, two, found):
    x, y = arrays
    add(one, x, y)
    one.synchronize()  # the host knows that it is done …
    add(two, x, y)
    assert found() == []
    add(one, x, y)
    two.wait_event(one.record())  # … or the stream does
    add(two, x, y)
    assert found() == []
    add(one, x, y)
    let_it_run(one)
    add(two, x, y)
    runtime.deviceSynchronize()
    assert (y.get() == 6).all()  # the right answer, by luck
    first, a, place, second, b, other, start, end = only(found())
    assert (first, second) == ("kernel add", "kernel add")
    assert place != other
    assert (start, end) == ("0", "4096")
    assert "writes" in (a, b)


def let_it_run(stream):
    """Wait until a stream has run dry without asking CUDA, which would be an order."""
    idle = threading.Event()
    stream.launch_host_func(lambda _: idle.set(), None)
    idle.wait()


def test_reading_together_is_no_race(arrays, one, two, found):
    x, y = arrays
    z = cupy.zeros(1024, "f")
    runtime.deviceSynchronize()
    add(one, x, y)
    add(two, x, z)
    assert found() == []


def test_neighbouring_bytes_are_no_race(arrays, one, two, found):
    x, y = arrays
    add(one, x[:500], y[:500], 500)
    add(two, x[500:], y[500:], 524)
    assert found() == []


def test_ranges_are_exact_to_the_byte(arrays, one, two, found):
    x, y = arrays
    runtime.memsetAsync(y.data.ptr + 100, 0, 4, one.ptr)
    add(two, x[25:], y[25:], 1)
    *_, start, end = only(found())
    offset = int(start) % 512  # y lies in a block of the pool
    assert int(end) - int(start) == 4
    assert offset == 100


def test_a_copy_out_must_wait_for_the_kernel(arrays, one, two, pinned, found):
    x, y = arrays
    host = pinned(1024, "f")

    def copy_out():
        runtime.memcpyAsync(host.ctypes.data, y.data.ptr, y.nbytes, runtime.memcpyDefault, two.ptr)

    add(one, x, y)
    event = Event()
    event.record(one)
    two.wait_event(event)
    copy_out()
    assert found() == []
    event.record(one)  # before the kernel: the wait is for what came before it
    add(one, x, y)
    two.wait_event(event)
    copy_out()
    first, _, _, second, *_ = only(found())
    assert {first, second} == {"kernel add", "copy of 4096 bytes (device to pinned)"}


def test_the_default_stream_orders_blocking_streams_alone(arrays, found):
    x, y = arrays
    blocking, free = Stream(non_blocking=False), Stream(non_blocking=True)
    add(blocking, x, y)
    add(Stream.null, x, y)
    add(blocking, x, y)
    assert found() == []
    add(Stream.null, x, y)
    add(free, x, y)
    assert "the default stream" in "".join(only(found()))


def test_order_passes_through_third_streams(arrays, one, two, found):
    x, y = arrays
    between = Stream(non_blocking=True)
    add(one, x, y)
    between.wait_event(one.record())
    two.wait_event(between.record())
    add(two, x, y)
    assert found() == []


def test_waiting_for_an_event_is_not_waiting_for_its_stream(arrays, one, two, found):
    x, y = arrays
    event = one.record()
    add(one, x, y)
    event.synchronize()
    add(two, x, y)
    assert len(found()) == 1


def test_strided_copies_touch_their_rows_alone(one, two, found):
    table = cupy.zeros((64, 64), "u1")
    runtime.deviceSynchronize()
    left, right = np.ones((64, 32), "u1"), np.ones((64, 32), "u1")
    for stream, half, at in ((one, left, 0), (two, right, 32)):
        runtime.memcpy2DAsync(table.data.ptr + at, 64, half.ctypes.data, 32, 32, 64, runtime.memcpyDefault, stream.ptr)
    assert found() == []
    runtime.memcpy2DAsync(table.data.ptr, 64, left.ctypes.data, 32, 32, 64, runtime.memcpyDefault, one.ptr)
    runtime.memcpy2DAsync(table.data.ptr + 31, 64, right.ctypes.data, 32, 32, 64, runtime.memcpyDefault, two.ptr)
    [line] = found()
    assert "and 63 more ranges" in line


def test_host_code_says_what_it_does_with_pinned_memory(arrays, one, pinned, found):
    host = pinned(1024, "f")
    runtime.memcpyAsync(host.ctypes.data, arrays[1].data.ptr, 4096, runtime.memcpyDefault, one.ptr)
    one.synchronize()
    cusim.host_reads(host)
    assert found() == []
    runtime.memcpyAsync(host.ctypes.data, arrays[1].data.ptr, 4096, runtime.memcpyDefault, one.ptr)
    cusim.host_reads(host, "the loss's print")
    first, _, _, second, *_ = only(found())
    assert {first, second} == {"copy of 4096 bytes (device to pinned)", "the loss's print"}


def test_pinned_memory_must_outlive_its_copies(arrays, one, found):
    host = np.zeros(1 << 14, "f")
    runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    runtime.memcpyAsync(host.ctypes.data, arrays[1].data.ptr, 4096, runtime.memcpyDefault, one.ptr)
    runtime.hostUnregister(host.ctypes.data)
    assert "cudaHostUnregister" in "".join(only(found()))
    runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    runtime.memcpyAsync(host.ctypes.data, arrays[1].data.ptr, 4096, runtime.memcpyDefault, one.ptr)
    one.synchronize()
    runtime.hostUnregister(host.ctypes.data)
    assert found() == []


def test_stream_ordered_memory_belongs_to_its_stream(one, two, found):
    block = runtime.mallocAsync(4096, one.ptr)
    runtime.memsetAsync(block, 0, 4096, one.ptr)
    two.wait_event(one.record())
    runtime.memsetAsync(block, 0, 4096, two.ptr)
    one.wait_event(two.record())
    runtime.freeAsync(block, one.ptr)
    assert found() == []
    block = runtime.mallocAsync(4096, one.ptr)
    runtime.memsetAsync(block, 0, 4096, two.ptr)
    one.wait_event(two.record())
    runtime.freeAsync(block, one.ptr)
    assert "cudaMallocAsync" in "".join(only(found()))
