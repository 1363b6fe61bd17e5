"""Stores whose values, or whose callers' arrays, lie on a GPU: they hold the contract, and nothing has two orders."""

import mmap

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import hardware  # noqa: E402
from arrays import put  # noqa: E402

from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.pinned import PinnedMemory  # noqa: E402
from zerort.errors import CallError  # noqa: E402
from zerort.optim.kernels import kernels_for  # noqa: E402
from zerort.storage import BridgedStore, NvmeStore  # noqa: E402
from zerort.streaming import ArrayTransfer, Pipeline, Staging, StoreTransfer, slot_nbytes_of  # noqa: E402
from zerort.testing.contracts.store import StoreContract  # noqa: E402
from zerort.testing.memory_store import MemoryStore  # noqa: E402

SLOT = 64 * 1024


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


@pytest.fixture
def pinned(device):
    with PinnedMemory(np.frombuffer(mmap.mmap(-1, 32 * 1024**2), np.uint8)) as memory:
        yield memory


@pytest.fixture(autouse=True)
def elsewhere():
    """Callers work on a stream of their own."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


class Told(MemoryStore):
    """Values on the host whose store tells the race check what it does to callers' arrays, from the call on."""

    def read(self, name, out, *, offset=0):
        tell(out, write=True)
        return super().read(name, out, offset=offset)

    def write(self, name, source, *, offset=0):
        tell(source, write=False)
        return super().write(name, source, offset=offset)


def tell(array, *, write):
    (hardware.host_writes if write else hardware.host_reads)(array)


class OnTheGpu(StoreContract):
    """The contract, with callers' arrays on the GPU."""

    ranges = 8

    def put(self, values):
        return put(values)

    def get(self, array):
        return array.view(np.uint8).get().view(array.dtype)


class OnTheHost(StoreContract):
    ranges = 8


class ValuesOnTheGpu:
    @pytest.fixture
    def store(self, device):
        with MemoryStore(device) as store:
            yield store


class ValuesInPinnedMemory:
    @pytest.fixture
    def store(self, device, pinned):
        with MemoryStore(device, memory=pinned) as store:
            yield store


class ValuesBehindABridge:
    @pytest.fixture
    def store(self, device, pinned):
        with BridgedStore(Told(), device, slot_nbytes=SLOT, depth=2, pinned=pinned.empty(4 * SLOT, "uint8")) as store:
            yield store


class ValuesOnADisk:
    @pytest.fixture
    def store(self, device, pinned, tmp_path):
        room = pinned.empty(6 * 1024**2, "uint8", alignment=4096)
        with BridgedStore(NvmeStore(tmp_path), device, slot_nbytes=1024**2, pinned=room) as store:
            yield store
        assert list(tmp_path.iterdir()) == []


class TestOnTheGpu(ValuesOnTheGpu, OnTheGpu):
    pass


class TestOnTheGpuFromTheHost(ValuesOnTheGpu, OnTheHost):
    pass


class TestInPinnedMemory(ValuesInPinnedMemory, OnTheGpu):
    pass


class TestBehindABridge(ValuesBehindABridge, OnTheGpu):
    pass


class TestOnADisk(ValuesOnADisk, OnTheGpu):
    pass


class TestOnADiskFromTheHost(ValuesOnADisk, OnTheHost):
    pass


def test_state_on_a_disk_streams_through_the_gpu(device, pinned, tmp_path):
    """The pipeline with slots on the GPU: read ahead, AdamW there, written back; the host's bits."""
    numel, steps = 100_003, 2
    lot = np.random.default_rng(5)
    param, *grads = (lot.standard_normal(numel).astype(np.float32) for _ in range(1 + steps))
    here = {"exp_avg": np.zeros(numel, np.float32), "exp_avg_sq": np.zeros(numel, np.float32)}
    there = put(param)
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    cuts = [(first, min(first + 16_384, numel)) for first in range(0, numel, 16_384)]
    room = pinned.empty(6 * SLOT, "uint8", alignment=4096)
    with BridgedStore(NvmeStore(tmp_path), device, slot_nbytes=SLOT, pinned=room) as store:
        for name in here:
            store.create(name, numel * 4)
        chunks = [[StoreTransfer(store=store, name=name, numel=b - a, offset=a * 4) for name in here] for a, b in cuts]
        with Pipeline(slot_nbytes=slot_nbytes_of(chunks), device=device) as pipeline:
            for step, grad in enumerate(grads, 1):
                gradient = put(grad)

                def update(number, first, second, step=step, gradient=gradient):
                    own = slice(*cuts[number])
                    kernels_for(first).adamw_(there[own], gradient[own], first, second, step=step, **settings)

                pipeline.run(chunks, update, finish=False)
                kernels_for(param).adamw_(param, grad, *here.values(), step=step, **settings)
        assert (there.get() == param).all()
        for name, values in here.items():
            assert (store.read(name, np.empty_like(values)).wait() == values).all()


def test_state_on_a_disk_passes_through_the_gpu_from_pinned_slots(device, pinned, tmp_path):
    """The pipeline with pinned slots, and a staging to compute: chunks are written when they have come back."""
    numel, cuts = 40_000, [(first, first + 5000) for first in range(0, 40_000, 5000)]
    there = put(np.arange(numel, dtype=np.float32))
    with NvmeStore(tmp_path) as store, Staging(device, slot_nbytes=20_000) as staging:
        store.create("sum", numel * 4)
        chunks = [[StoreTransfer(store=store, name="sum", numel=b - a, offset=a * 4)] for a, b in cuts]

        def accumulate(number, part):
            tell(part, write=True)  # it was read from the disk
            transfers = [ArrayTransfer(part), ArrayTransfer(there[slice(*cuts[number])], write=False)]
            return staging.run([transfers], lambda _, total, summand: np.add(total, summand, out=total), on="device")

        with Pipeline(slot_nbytes=slot_nbytes_of(chunks), device=pinned) as pipeline:
            for _ in range(3):
                pipeline.run(chunks, accumulate, finish=False)
        assert (store.read("sum", np.empty(numel, np.float32)).wait() == 3 * np.arange(numel)).all()


def test_a_slot_on_the_gpu_is_not_filled_while_a_kernel_reads_it(device, pinned):
    """Nothing is written, so the pipeline needs a ticket of what computing has queued."""
    values = np.arange(16_384, dtype=np.float32)
    total, calls = cupy.zeros(1024, np.float32), device.stream("calls")
    with MemoryStore(device, memory=pinned) as store:
        store.create("value", values.nbytes)
        store.write("value", values)
        chunks = [
            [StoreTransfer(store=store, name="value", numel=1024, offset=at * 4096, write=False)] for at in range(16)
        ]

        def add(number, part):
            np.add(total, part, out=total)
            return calls.submit(lambda: None)

        with Pipeline(slot_nbytes=4096, depth=2, device=device) as pipeline:
            pipeline.run(chunks, add)
        assert (total.get() == values.reshape(16, 1024).sum(0)).all()


@pytest.fixture
def seeded():
    """Set a seed of random delays; afterwards there are none."""
    if not hardware.EMULATED:
        pytest.skip("only on the emulated GPU: real ones have no seeds")
    yield hardware.reseed
    hardware.reseed(0)


@pytest.mark.parametrize("seed", range(1, 6))
def test_no_order_of_streams_changes_a_byte(device, pinned, seeded, seed):
    """Reads and writes of ranges that overlap, without a wait, by arrays on either side."""
    lot, numel = np.random.default_rng(seed), 200_000
    inner = [MemoryStore(device), MemoryStore(device, memory=pinned), Told()][seed % 3]
    stack = BridgedStore(inner, device, slot_nbytes=16_384, depth=2, pinned=pinned.empty(65_536, "uint8"))
    model, reads = np.zeros(numel, np.uint8), []
    seeded(seed)
    with stack as store:
        store.create("value", numel)
        for at in range(12):
            begin, end = sorted(lot.integers(0, numel + 1, 2).tolist())
            data = lot.integers(0, 256, end - begin, np.uint8)
            store.write("value", data if at % 4 == 3 else put(data), offset=begin)
            model[begin:end] = data
            begin, end = sorted(lot.integers(0, numel + 1, 2).tolist())
            out = np.empty(end - begin, np.uint8) if at % 4 == 2 else cupy.empty(end - begin, np.uint8)
            reads.append((store.read("value", out, offset=begin), model[begin:end].copy()))
        for ticket, expected in reversed(reads):
            found = ticket.wait()
            assert ((found if isinstance(found, np.ndarray) else found.get()) == expected).all()


class Refusing(MemoryStore):
    """Writes of other than zeros fail, late."""

    def write(self, name, source, *, offset=0):
        return self._stream.submit(lambda: 1 // int(not source.any()))


def test_a_write_that_failed_is_told(device):
    """By its ticket, by flush if nobody waited for that, and by a warning at the end."""
    with BridgedStore(Refusing(), device, slot_nbytes=4096) as store:
        store.create("value", 10_000)
        store.write("value", cupy.zeros(10_000, np.uint8)).wait()
        bad = cupy.ones(10_000, np.uint8)
        with pytest.raises(ZeroDivisionError):
            store.write("value", bad).wait()
        store.flush()
        store.write("value", bad)
        store.read("value", bad).wait()
        with pytest.raises(ZeroDivisionError):
            store.flush()
        store.flush()
        store.write("value", cupy.ones(10_000, np.uint8))
        with pytest.warns(RuntimeWarning, match="1 writes failed and nobody waited"):
            store.close()


def test_slots_that_make_no_sense_are_refused(device, pinned):
    with MemoryStore() as inner:
        with pytest.raises(CallError, match="whole pages"):
            BridgedStore(inner, device, slot_nbytes=5000)
        with pytest.raises(CallError, match=r"6 slots of 4,096, got uint8\[9000\]"):
            BridgedStore(inner, device, slot_nbytes=4096, pinned=pinned.empty(9000, "uint8"))
