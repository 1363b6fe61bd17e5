"""Streams and events: nothing is done when a call returns, and everything is when a wait does."""

import time

import cupy
import numpy as np
import pytest
from cupy.cuda import Event, Stream, runtime

N = 1 << 18


@pytest.fixture
def streams():
    return Stream(non_blocking=True), Stream(non_blocking=True)


def copy(to, source, stream):
    """Copy between a CuPy array and a pinned one, on a stream."""
    address = [a.data.ptr if isinstance(a, cupy.ndarray) else a.ctypes.data for a in (to, source)]
    runtime.memcpyAsync(*address, source.nbytes, runtime.memcpyDefault, stream.ptr)


def keep_busy(stream):
    stream.launch_host_func(lambda _: time.sleep(0.05), None)


def test_a_copy_is_not_done_when_the_call_returns(streams, pinned):
    source, target = pinned(N, "f"), pinned(N, "f")
    source[:], target[:] = 7, 0
    device = cupy.empty(N, "f")
    stream = streams[0]
    stream.wait_event(Stream.null.record())
    keep_busy(stream)
    copy(device, source, stream)
    copy(target, device, stream)
    event = stream.record()
    assert not event.done
    assert not stream.done
    assert target[0] == 0
    event.synchronize()
    assert event.done
    assert (target == 7).all()


def test_an_event_orders_two_streams(streams, pinned):
    one, two = streams
    source, target = pinned(N, "f"), pinned(N, "f")
    source[:] = np.arange(N)
    device = cupy.empty(N, "f")
    keep_busy(one)
    copy(device, source, one)
    two.wait_event(one.record())
    copy(target, device, two)
    two.synchronize()
    assert (target == source).all()


def test_an_event_that_is_recorded_again_keeps_old_waits(streams):
    one, two = streams
    event = Event()
    event.record(one)
    two.wait_event(event)
    keep_busy(one)
    event.record(one)
    two.synchronize()  # waits for the first record alone
    assert not event.done
    event.synchronize()


def test_elapsed_time(streams):
    first, last = Event(), Event()
    first.record(streams[0])
    keep_busy(streams[0])
    last.record(streams[0])
    last.synchronize()
    assert cupy.cuda.get_elapsed_time(first, last) >= 50


def test_the_default_stream_and_blocking_streams_wait_for_each_other():
    blocking = Stream(non_blocking=False)
    keep_busy(blocking)
    a = cupy.arange(10)  # on the default stream: after what `blocking` was given
    assert blocking.done or not Stream.null.done
    assert (a.get() == np.arange(10)).all()
    assert blocking.done


def test_a_non_blocking_stream_runs_beside_the_default_stream(streams):
    keep_busy(Stream.null)
    streams[0].synchronize()
    assert not Stream.null.done
    Stream.null.synchronize()


def test_a_destroyed_stream_finishes_its_work(pinned):
    target = pinned(10, "i")
    target[:] = 0
    device = cupy.full(10, 5, "i")
    Stream.null.synchronize()
    stream = Stream(non_blocking=True)
    keep_busy(stream)
    copy(target, device, stream)
    del stream
    runtime.deviceSynchronize()
    assert (target == 5).all()


def test_pageable_memory_is_taken_before_the_call_returns(streams):
    source, device = np.full(N, 3, "f"), cupy.empty(N, "f")
    stream = streams[0]
    keep_busy(stream)
    copy(device, source, stream)
    source[:] = 9
    stream.synchronize()
    assert (device.get() == 3).all()


def test_threads_have_default_streams_of_their_own():
    assert Stream.ptds.done
    with Stream.ptds:
        a = cupy.arange(100) * 2
    Stream.ptds.synchronize()
    assert (a.get() == np.arange(100) * 2).all()
