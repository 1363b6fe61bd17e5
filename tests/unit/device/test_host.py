"""The host as a device, its streams in a trace, and its pool."""

import threading

import pytest

from zerort import trace
from zerort.device import HostDevice, HostStream, SlabPool
from zerort.errors import CallError, ClosedError
from zerort.testing.device_contract import DeviceContract


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
        first = stream.submit(lambda: gate.wait(10))  # occupies the worker, or nobody yet
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
    ticket = stream.submit(lambda: gate.wait(30))
    with pytest.raises(TimeoutError):
        ticket.wait(timeout=0.02)
    stream.abandon()
    with pytest.raises(ClosedError):
        stream.submit(lambda: None)
    gate.set()


@pytest.fixture
def pool():
    with HostDevice() as device, SlabPool(device, slab_nbytes=3_000_001, count=2) as pool:
        yield pool


def test_slabs_have_exactly_the_size_asked_for(pool):
    with pool.lease() as slab:
        assert slab.nbytes == 3_000_001
        assert slab.ctypes.data % 4096 == 0
    assert pool.counters().nbytes == 3_000_001


def test_slabs_are_reused_and_counted(pool):
    first = pool.lease()
    address = first.array.ctypes.data
    first.release()
    first.release()
    again, other = pool.lease(), pool.lease()
    assert again.array.ctypes.data == address
    counters = pool.counters()
    assert (counters.allocated, counters.leased, counters.peak, counters.reuses) == (2, 2, 2, 1)
    again.release()
    assert (pool.counters().leased, pool.counters().peak) == (1, 2)
    other.release()


def test_a_released_lease_gives_no_slab(pool):
    lease = pool.lease()
    lease.release()
    with pytest.raises(ClosedError, match="released"):
        _ = lease.array


def test_a_lease_waits_for_a_slab_to_come_back(pool):
    leases = [pool.lease(), pool.lease()]
    with pytest.raises(TimeoutError, match="larger count"):
        pool.lease(timeout=0.02)
    threading.Timer(0.05, leases[0].release).start()
    third = pool.lease(timeout=10)
    assert pool.counters().leased == 2
    third.release()
    leases[1].release()


def test_closing_a_pool_wakes_those_who_wait(pool):
    leases = [pool.lease(), pool.lease()]
    threading.Timer(0.05, pool.close).start()
    with pytest.raises(ClosedError):
        pool.lease(timeout=10)
    for lease in leases:
        lease.release()
    assert pool.counters().allocated == 0


@pytest.mark.parametrize(("slab_nbytes", "count"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(slab_nbytes, count):
    with pytest.raises(CallError, match="at least one slab"):
        SlabPool(HostDevice(), slab_nbytes=slab_nbytes, count=count)
