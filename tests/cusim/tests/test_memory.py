"""Memory: limits, kinds, poison, bounds, and a host that may not touch what is the device's."""

import re

import cupy
import numpy as np
import pytest
from cupy.cuda import Stream, runtime


def test_out_of_memory_is_cupys_error_and_memory_comes_back():
    total = runtime.memGetInfo()[1]
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(total + 1, "u1")
    free = runtime.memGetInfo()[0]
    block = runtime.malloc(total // 2)
    assert runtime.memGetInfo()[0] == free - total // 2
    runtime.free(block)
    assert runtime.memGetInfo()[0] == free


def test_pointers_know_their_kind(pinned):
    host, device, managed = pinned(10, "f"), cupy.empty(10, "f"), runtime.mallocManaged(64)
    assert runtime.pointerGetAttributes(host.ctypes.data).type == 1
    assert runtime.pointerGetAttributes(device.data.ptr).type == 2
    assert runtime.pointerGetAttributes(managed).type == 3
    assert runtime.pointerGetAttributes(np.zeros(1).ctypes.data).type == 0
    runtime.free(managed)
    with cupy.cuda.Device(1):
        assert runtime.pointerGetAttributes(cupy.empty(1).data.ptr).device == 1


def test_registered_memory_is_pinned_until_it_is_not():
    host = np.zeros(1 << 16, "u1")
    runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    assert runtime.pointerGetAttributes(host.ctypes.data).type == 1
    with pytest.raises(runtime.CUDARuntimeError, match="AlreadyRegistered"):
        runtime.hostRegister(host.ctypes.data + 4096, 4096, 0)
    runtime.hostUnregister(host.ctypes.data)
    assert runtime.pointerGetAttributes(host.ctypes.data).type == 0
    with pytest.raises(runtime.CUDARuntimeError, match="NotRegistered"):
        runtime.hostUnregister(host.ctypes.data)


def test_pinned_memory_can_run_out(program):
    done = program(
        """
        kept = cupy.cuda.alloc_pinned_memory(3 << 20)
        try:
            cupy.cuda.alloc_pinned_memory(2 << 20)
        except runtime.CUDARuntimeError as error:
            print("refused", error)
        """,
        pinned_mb=4,
    )
    assert "refused cudaErrorMemoryAllocation" in done.stdout, done.stderr


def test_fresh_memory_is_poisoned(pinned):
    assert np.isnan(cupy.empty(100, "f").get()).all()
    assert np.isnan(cupy.empty(100, "e").get()).all()
    memory = cupy.cuda.PinnedMemory(400)
    assert np.isnan(np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), "f", 100)).all()


def test_freed_arrays_are_poisoned():
    array = cupy.zeros(100, "f")
    stale = cupy.ndarray(100, "f", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.data.ptr, 400, None), 0))
    assert (stale.get() == 0).all()
    del array
    assert np.isnan(stale.get()).all()


def test_an_array_may_go_while_its_own_stream_still_uses_it():
    stream = Stream(non_blocking=True)
    with stream:
        array = cupy.ones(1000, "f")
        total = array.sum()
        del array
    stream.synchronize()
    assert total.get() == 1000


def test_an_array_that_goes_while_another_stream_uses_it_is_a_race(found, pinned):
    array, target, stream = cupy.ones(1000, "f"), pinned(1000, "f"), Stream(non_blocking=True)
    stream.wait_event(Stream.null.record())
    runtime.memcpyAsync(target.ctypes.data, array.data.ptr, 4000, runtime.memcpyDefault, stream.ptr)
    del array
    [line] = found()
    assert line.startswith("race: ")
    assert "free of an array of 4000 bytes" in line
    assert "copy of 4000 bytes (device to pinned) reads" in line


def test_memory_that_comes_back_from_the_pool_needs_no_order_with_its_free(pinned):
    source, stream = pinned(1000, "f"), Stream(non_blocking=True)
    array = cupy.ones(1000, "f")
    address = array.data.ptr
    Stream.null.synchronize()
    del array
    again = cupy.empty(1000, "f")
    assert again.data.ptr == address
    runtime.memcpyAsync(again.data.ptr, source.ctypes.data, 4000, runtime.memcpyDefault, stream.ptr)
    stream.synchronize()


def test_memory_that_comes_back_from_the_pool_needs_an_order_with_its_last_use(found, pinned):
    source, stream = pinned(1000, "f"), Stream(non_blocking=True)
    array = cupy.ones(1000, "f")
    del array
    again = cupy.empty(1000, "f")
    runtime.memcpyAsync(again.data.ptr, source.ctypes.data, 4000, runtime.memcpyDefault, stream.ptr)
    [line] = found()
    assert "kernel cupy_fill writes (the default stream" in line
    assert "copy of 4000 bytes (pinned to device) writes" in line


def test_copies_out_of_bounds_are_refused_and_named(found):
    block, host = runtime.malloc(1000), np.zeros(2000, "u1")
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.memcpy(block + 10, host.ctypes.data, 1000, runtime.memcpyDefault)
    [line] = found()
    assert line.startswith("bounds: a copy's destination of 1000 bytes goes 10 bytes past the end of allocation ")
    assert "1000 bytes at" in line
    runtime.memcpy(block + 10, host.ctypes.data, 990, runtime.memcpyDefault)
    runtime.free(block)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.memset(block, 0, 100)
    [line] = found()
    assert line.startswith("bounds: a fill outside any allocation: 100 bytes at")
    assert "0 bytes into the freed allocation" in line


WRITE = cupy.RawKernel('extern "C" __global__ void write(char *p, long at) { p[at] = 1; }', "write")


@pytest.mark.parametrize(
    ("at", "words"),
    [(1000, "0 bytes past the end of"), (-1, "bytes past the end of|below every"), (4095, "3095 bytes past")],
)
def test_kernels_out_of_bounds_break_the_context(found, at, words):
    block = runtime.malloc(1000)
    WRITE((1,), (1,), (block, np.int64(999)))
    runtime.deviceSynchronize()
    WRITE((1,), (1,), (block, np.int64(at)))
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        runtime.deviceSynchronize()
    [line] = found()
    assert line.startswith("bounds: kernel write writes 1 byte at")
    assert re.search(words, line), line
    runtime.free(block)


def test_a_broken_context_answers_every_question_with_its_fault(found):
    stream, before, after = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    before.record(stream)
    with stream:
        WRITE((1,), (1,), (0, np.int64(64)))
    after.record(stream)
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        stream.synchronize()
    assert [runtime.eventQuery(event.ptr) for event in (before, after)] == [700, 700]
    assert runtime.streamQuery(stream.ptr) == 700
    assert len(found()) == 1


def test_kernels_in_freed_memory(found):
    block = runtime.malloc(1000)
    runtime.free(block)
    WRITE((1,), (1,), (block, np.int64(5)))
    [line] = found()
    assert "kernel write writes 1 byte at" in line
    assert "5 bytes into the freed allocation" in line


def test_kernels_at_no_memory_at_all(found):
    WRITE((1,), (1,), (0, np.int64(64)))
    assert found() == ["bounds: kernel write touches 0x40, which is no memory of the device"]


def test_kernels_with_host_memory(found):
    host = np.zeros(10, "u1")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="ILLEGAL_ADDRESS"):
        WRITE((1,), (1,), (host.ctypes.data, np.int64(0)))
    [line] = found()
    assert line.startswith("pointer: kernel write gets host memory that is not pinned")


def test_kernels_may_use_pinned_memory(pinned):
    host = pinned(16, "u1")
    host[:] = 0
    WRITE((1,), (1,), (host.ctypes.data, np.int64(3)))
    runtime.deviceSynchronize()
    assert host.tolist() == [0, 0, 0, 1] + [0] * 12


def test_the_host_cannot_read_device_memory(program):
    done = program(
        """
        import ctypes
        array = cupy.zeros(100)
        array.get()
        print("asked", flush=True)
        ctypes.string_at(array.data.ptr, 8)
        print("read")
        """
    )
    assert done.stdout.split() == ["asked"]
    assert done.returncode == -11
    assert "host code touched device memory: 1 byte at" in done.stderr
    assert "allocation" in done.stderr


def test_the_host_cannot_write_device_memory_even_while_streams_run(program):
    done = program(
        """
        import ctypes, time
        array = cupy.zeros(100)
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.launch_host_func(lambda _: time.sleep(5), None)
        ctypes.memset(array.data.ptr, 1, 8)
        """
    )
    assert done.returncode == -11
    assert "host code touched device memory" in done.stderr
