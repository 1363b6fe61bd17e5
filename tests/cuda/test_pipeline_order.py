"""The pipeline between a GPU and a store has one order: of reads, computing and writes, also when a run fails."""

import mmap
import threading
import time

import hardware
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.pinned import PinnedMemory  # noqa: E402
from zerort.streaming import Pipeline, StoreTransfer  # noqa: E402
from zerort.testing.memory_store import MemoryStore  # noqa: E402

NUMEL, CHUNKS = 1024, 8
SLOT = NUMEL * 4
VALUES = np.arange(NUMEL * CHUNKS, dtype=np.float32)


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


class Noting(PinnedMemory):
    """Pinned memory that knows which arrays it has given out."""

    def __init__(self, memory):
        super().__init__(memory)
        self.given = []

    def empty(self, *shape, **options):
        self.given.append(super().empty(*shape, **options))
        return self.given[-1]


@pytest.fixture
def pinned(device):
    with Noting(np.frombuffer(mmap.mmap(-1, 1024**2), np.uint8)) as memory:
        yield memory


@pytest.fixture(autouse=True)
def elsewhere():
    """The caller works on a stream of its own."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def host_uses(array, *, write):
    """Tell the race check what the host does with pinned memory."""
    (hardware.host_writes if write else hardware.host_reads)(array)


class Late(MemoryStore):
    """The GPU takes its time before each copy: whoever does not wait for it comes first."""

    def read(self, name, out, *, offset=0):
        self._dawdle()
        return super().read(name, out, offset=offset)

    def write(self, name, source, *, offset=0):
        self._dawdle()
        return super().write(name, source, offset=offset)

    def _dawdle(self):
        def work():
            cupy.cuda.get_current_stream().launch_host_func(lambda _: time.sleep(0.01), None)

        self._stream.submit(work, after=())


def filled(store):
    """Return chunks of a value that a store has got."""
    store.create("value", VALUES.nbytes)
    store.write("value", VALUES).wait()
    return [[StoreTransfer(store=store, name="value", numel=NUMEL, offset=at * SLOT)] for at in range(CHUNKS)]


def double(number, part):
    if isinstance(part, np.ndarray):
        host_uses(part, write=True)
    part += part


@pytest.mark.parametrize("depth", [1, 3])
def test_what_a_run_has_written_can_be_looked_at(device, pinned, depth):
    """Slots are on the GPU, and the value is on the host."""
    with (
        Late(device, memory=pinned) as store,
        Pipeline(slot_nbytes=SLOT, depth=depth, device=device) as pipeline,
    ):
        pipeline.run(filled(store), double)
        host_uses(store.view("value"), write=False)
        assert (store.view("value").view(np.float32) == 2 * VALUES).all()


def test_what_was_left_to_be_written_can_be_looked_at_after_finish(device, pinned):
    with Late(device, memory=pinned) as store, Pipeline(slot_nbytes=SLOT, depth=3, device=device) as pipeline:
        pipeline.run(filled(store), double, finish=False)
        pipeline.finish()
        host_uses(store.view("value"), write=False)
        assert (store.view("value").view(np.float32) == 2 * VALUES).all()


def test_slots_are_free_when_a_pipeline_is_closed(device, pinned):
    """They are on the host, and the value is on the GPU, whose copies are not waited for until then."""
    with Late(device) as store:
        with Pipeline(slot_nbytes=SLOT, depth=3, device=pinned) as pipeline:
            pipeline.run(filled(store), double, finish=False)
        for slot in pinned.given:
            host_uses(slot, write=True)
        assert (store.view("value").view(np.float32).get() == 2 * VALUES).all()


@pytest.mark.parametrize("last", [0, CHUNKS - 1])
def test_slots_are_free_when_a_run_has_failed(device, pinned, last):
    """At the first chunk others are being read, at the last one others are being written."""

    def fail(number, part):
        double(number, part)
        if number == last:
            raise ZeroDivisionError

    with Late(device) as store, Pipeline(slot_nbytes=SLOT, depth=3, device=pinned) as pipeline:
        with pytest.raises(ZeroDivisionError):
            pipeline.run(filled(store), fail)
        assert len(pinned.given) == 3
        for slot in pinned.given:
            host_uses(slot, write=True)


class Hesitating(MemoryStore):
    """Whoever reads what is not at the beginning is in there for a while."""

    def __init__(self, device):
        super().__init__(device)
        self.entered, self.left = threading.Event(), threading.Event()

    def read(self, name, out, *, offset=0):
        if offset:
            self.entered.set()
            self.left.wait(0.2)
            self.left.set()
        return super().read(name, out, offset=offset)


def test_nothing_is_asked_of_a_store_when_a_run_has_failed(device):
    def fail(number, part):
        store.entered.wait(20)
        raise ZeroDivisionError

    with Hesitating(device) as store, Pipeline(slot_nbytes=SLOT, depth=3, device=device) as pipeline:
        with pytest.raises(ZeroDivisionError):
            pipeline.run(filled(store), fail)
        assert store.left.is_set()


def test_what_a_run_leaves_to_the_gpu_comes_before_what_is_read_next(device):
    """It returns when all was asked of the store, however late the GPU is with what is to be written."""
    gate, calls = threading.Event(), device.stream("calls")

    def fill(number, part):
        def work():
            cupy.cuda.get_current_stream().launch_host_func(lambda _: gate.wait(20), None)
            part.fill(number)

        return calls.submit(work)

    with MemoryStore(device) as store, Pipeline(slot_nbytes=SLOT, depth=CHUNKS, device=device) as pipeline:
        chunks = filled(store)
        threading.Timer(0.1, gate.set).start()
        pipeline.run(chunks, fill, finish=False)
        found = store.read("value", np.empty_like(VALUES)).wait()
    assert (found == np.repeat(np.arange(CHUNKS, dtype=np.float32), NUMEL)).all()
