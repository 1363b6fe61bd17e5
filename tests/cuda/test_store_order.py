"""What a store does for arrays on a GPU has one order: with its caller, its slots, and what else was asked of it."""

import mmap
import threading

import hardware
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.pinned import PinnedMemory  # noqa: E402
from zerort.storage import BridgedStore  # noqa: E402
from zerort.streaming import ArrayTransfer, Staging  # noqa: E402
from zerort.testing.memory_store import MemoryStore  # noqa: E402

SLOT = 4096


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


@pytest.fixture
def pinned(device):
    with PinnedMemory(np.frombuffer(mmap.mmap(-1, 1024**2), np.uint8)) as memory:
        yield memory


@pytest.fixture(autouse=True)
def elsewhere():
    """The caller works on a stream of its own."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture
def gate():
    """What is behind it happens when `soon` has opened it: too late for whoever does not wait."""
    gate = threading.Event()
    yield gate
    gate.set()


def soon(gate):
    threading.Timer(0.05, gate.set).start()


@pytest.fixture
def store(device, pinned):
    with BridgedStore(
        MemoryStore(), device, slot_nbytes=SLOT, depth=1, pinned=pinned.empty(2 * SLOT, "uint8")
    ) as store:
        store.create("value", 2 * SLOT)
        yield store


def two_blocks():
    return np.repeat(np.array([1, 2], np.uint8), SLOT)


class Slow(MemoryStore):
    """Nothing is written before a gate opens."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def write(self, name, source, *, offset=0):
        self._stream.submit(lambda: self._gate.wait(20))
        return super().write(name, source, offset=offset)


def test_a_slot_is_not_filled_while_a_disk_reads_it(device, gate):
    with BridgedStore(Slow(gate), device, slot_nbytes=SLOT, depth=1) as store:
        store.create("value", 2 * SLOT)
        ticket = store.write("value", cupy.asarray(two_blocks()))
        soon(gate)
        ticket.wait()
        assert (store.read("value", np.empty(2 * SLOT, np.uint8)).wait() == two_blocks()).all()


def test_what_the_caller_has_queued_comes_first(store, gate, elsewhere):
    source, out, seen = cupy.empty(2 * SLOT, np.uint8), cupy.zeros(2 * SLOT, np.uint8), cupy.empty(2 * SLOT, np.uint8)
    elsewhere.launch_host_func(lambda _: gate.wait(20), None)
    source.fill(3)
    ticket = store.write("value", source)
    soon(gate)
    ticket.wait()
    seen[:] = out
    store.read("value", out).wait()
    assert (seen.get() == 0).all()
    assert (out.get() == 3).all()


def test_a_read_comes_after_the_write_before_it(store, gate, elsewhere):
    source, out = cupy.asarray(two_blocks()), cupy.empty(2 * SLOT, np.uint8)
    elsewhere.launch_host_func(lambda _: gate.wait(20), None)
    store.write("value", source)
    ticket = store.read("value", out)
    soon(gate)
    assert (ticket.wait().get() == two_blocks()).all()


def test_a_value_goes_after_what_was_asked_of_it(store, gate, elsewhere):
    source = cupy.asarray(two_blocks())
    elsewhere.launch_host_func(lambda _: gate.wait(20), None)
    ticket = store.write("value", source)
    soon(gate)
    store.delete("value")
    assert ticket.wait() is source
    assert store.nbytes == 0


def test_a_value_that_was_made_can_be_looked_at(device):
    with MemoryStore(device) as store:
        store.create("value", 100_000)
        assert (store.view("value").get() == 0).all()


def test_what_was_flushed_can_be_looked_at(device, pinned):
    with MemoryStore(device, memory=pinned) as store:
        store.create("value", 100_000)
        store.write("value", cupy.full(100_000, 5, np.uint8))
        store.flush()
        hardware.host_reads(store.view("value"))
        assert (store.view("value") == 5).all()


def test_a_staging_closes_behind_its_copies(device, pinned, gate):
    here, there = pinned.empty(50_000, "float32"), cupy.full(50_000, 5, np.float32)
    here.fill(0)

    def stop():
        cupy.cuda.get_current_stream().launch_host_func(lambda _: gate.wait(20), None)

    device.named_stream("copy out").submit(stop, after=())
    with Staging(device, slot_nbytes=here.nbytes, depth=1) as staging:  # a free slot, once freed, would stop the GPU
        staging.run(
            [[ArrayTransfer(here, read=False), ArrayTransfer(there, write=False)]],
            lambda _, a, b: np.copyto(a, b),
            on="device",
        )
        soon(gate)
    hardware.host_reads(here)
    assert (here == 5).all()
