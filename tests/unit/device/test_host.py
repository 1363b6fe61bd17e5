"""The host as a device, its streams in a trace, and its pool."""

import threading

import pytest

from zerort import trace
from zerort.device import HostDevice, HostStream
from zerort.errors import ClosedError
from zerort.testing.contracts.device import DeviceContract


class TestHostDevice(DeviceContract):
    @pytest.fixture
    def device(self):
        with HostDevice() as device:
            yield device


def test_a_stream_is_a_track_in_a_trace():
    trace.reset()
    trace.enable()
    try:
        with HostStream("gather") as stream:
            stream.submit(lambda: None, name="unit 3").wait()
    finally:
        trace.disable()
    assert [(span.name, span.track) for span in trace.spans()] == [("unit 3", "gather")]
    trace.reset()


def test_a_waiter_takes_the_work_over():
    """A blocking call costs no thread switch: the thread that waits does the work, unless the stream forbids it."""
    with HostStream("helping") as stream:
        gate = threading.Event()
        first = stream.submit(lambda: gate.wait(200))  # occupies the worker, or nobody yet
        where = stream.submit(threading.current_thread)
        gate.set()
        first.wait()
        assert where.wait() in threading.enumerate()
    with HostStream("pinned", helping=False) as pinned:
        assert pinned.submit(threading.current_thread).wait().name == "zerort-pinned"
    with HostStream("eager") as eager:
        assert eager.submit(threading.current_thread, eager=True).wait() is threading.current_thread()


def test_an_abandoned_stream_does_not_wait():
    stream, gate = HostStream("stuck"), threading.Event()
    ticket = stream.submit(lambda: gate.wait(200))
    with pytest.raises(TimeoutError):
        ticket.wait(timeout=0.02)
    stream.abandon()
    with pytest.raises(ClosedError):
        stream.submit(lambda: None)
    gate.set()
