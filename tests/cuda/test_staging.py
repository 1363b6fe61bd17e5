"""Arrays on their way between the host and the GPU, with computing in between."""

import contextlib
import gc
import mmap
import threading

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import hardware  # noqa: E402
from arrays import put  # noqa: E402

from zerort import native  # noqa: E402
from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.pinned import PinnedMemory  # noqa: E402
from zerort.errors import CallError, ClosedError  # noqa: E402
from zerort.native.dtypes import numpy_dtype  # noqa: E402
from zerort.optim.kernels import kernels_for  # noqa: E402
from zerort.streaming.staging import Staging  # noqa: E402
from zerort.streaming.transfers import ArrayTransfer, slot_nbytes_of  # noqa: E402

SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
PLACES = ["device", "host"]


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


@pytest.fixture
def pinned(device):
    with PinnedMemory(np.frombuffer(mmap.mmap(-1, 4 * 1024**2), np.uint8), chunk_nbytes=1024**2) as memory:
        yield memory


@pytest.fixture
def elsewhere():
    """A caller that works on a stream of its own."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def tell(*arrays, write):
    """Tell the race check what the host does with pinned memory."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            (hardware.host_writes if write else hardware.host_reads)(array)


def told(compute):
    """Return ``compute`` with what it does to arrays of the host told."""

    def telling(number, *arrays):
        tell(*arrays, write=True)
        compute(number, *arrays)

    return telling


def in_chunks(transfers, size):
    numel = transfers[0].array.size
    return [
        [ArrayTransfer(one.array[first : first + size], read=one.read, write=one.write) for one in transfers]
        for first in range(0, numel, size)
    ]


def of_host(pinned, values):
    array = pinned.empty(values.size, values.dtype)
    tell(array, write=True)
    array[:] = values
    return array


@pytest.fixture
def seeded():
    """Set a seed of random delays; afterwards there are none."""
    if not hardware.EMULATED:
        pytest.skip("only on the emulated GPU: real ones have no seeds")
    yield hardware.reseed
    hardware.reseed(0)


def check_adamw(device, pinned, *, on, depth):
    """Parameters and gradients on the GPU, moments on the host: the host's bits, wherever it is computed."""
    numel, half = 10_007, numpy_dtype("bfloat16")
    lot = np.random.default_rng(7)
    param, *grads = (lot.standard_normal(numel).astype(np.float32) for _ in range(4))
    expected = [param.copy(), np.zeros_like(param), np.zeros_like(param), np.zeros(numel, half)]
    moments = [of_host(pinned, expected[1]), of_host(pinned, expected[2])]
    there, gradient, copy = put(param), cupy.empty(numel, np.float32), put(expected[3])
    transfers = [
        ArrayTransfer(there),
        ArrayTransfer(gradient, write=False),
        *map(ArrayTransfer, moments),
        ArrayTransfer(copy, read=False),
    ]
    chunks = in_chunks(transfers, 1500)
    slots = pinned.empty(depth * 32 * 1024, "uint8")
    with Staging(device, slot_nbytes=slot_nbytes_of(chunks, on=on), depth=depth, pinned=slots) as staging:
        for step, grad in enumerate(grads, 1):

            def update(number, param, grad, first, second, copy, step=step):
                kernels_for(param).adamw_(param, grad, first, second, step=step, copy_out=copy, **SETTINGS)

            gradient.set(grad)  # on the caller's own stream
            staging.run(chunks, told(update), on=on)
            gradient.fill(0)  # at once: the run was before it
            native.adamw_(expected[0], grad, *expected[1:3], step=step, copy_out=expected[3], **SETTINGS)
        found = [there.get(), *moments, copy.view(np.uint16).get().view(half)]  # of the GPU without a word
        staging.finish()
        tell(*moments, write=False)
    assert [(one == other).all() for one, other in zip(found, expected, strict=True)] == [True] * 4


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("on", PLACES)
def test_adamw_over_state_on_the_host(device, pinned, elsewhere, on, depth):
    check_adamw(device, pinned, on=on, depth=depth)


@pytest.mark.parametrize("seed", range(1, 6))
def test_no_order_of_streams_changes_a_bit(device, pinned, elsewhere, seeded, seed):
    seeded(seed)
    check_adamw(device, pinned, on=PLACES[seed % 2], depth=1 + seed % 3)


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("second", PLACES)
def test_a_run_sees_what_the_one_before_did(device, pinned, first, second):
    """Arrays on either side, without a wait between the runs; the ticket says when the host may look."""
    here, there = of_host(pinned, np.ones(6000, np.float32)), cupy.ones(6000, np.float32)
    chunks = in_chunks([ArrayTransfer(here), ArrayTransfer(there)], 1000)

    def double(number, here, there):
        here += there
        there += here

    with Staging(device, slot_nbytes=4096, pinned=pinned.empty(3 * 4096, "uint8")) as staging:
        staging.run(chunks, told(double), on=first)
        ticket = staging.run(chunks, told(double), on=second)
        assert (there.get() == 8).all()
        ticket.wait()
        tell(here, write=False)
        assert (here == 5).all()


@pytest.mark.parametrize("on", PLACES)
def test_what_is_only_written_and_what_is_only_read(device, pinned, elsewhere, on):
    """Nothing is copied for nothing, and each waits for its slot and its caller all the same."""
    source, made = of_host(pinned, np.arange(8000, dtype=np.float32)), of_host(pinned, np.zeros(8000, np.float32))
    there, made_there = put(source), cupy.zeros(8000, np.float32)
    there += 1
    made_there.fill(77)
    transfers = [
        ArrayTransfer(source, write=False),
        ArrayTransfer(made, read=False),
        ArrayTransfer(there, write=False),
        ArrayTransfer(made_there, read=False),
    ]

    def swap(number, source, made, there, made_there):
        made[:] = there
        made_there[:] = source

    def checked(number, *arrays):
        for array, write in zip(arrays, (False, True, False, True), strict=True):
            tell(array, write=write)
        swap(number, *arrays)

    with Staging(device, slot_nbytes=2 * 4096, depth=2, pinned=pinned.empty(2 * 2 * 4096, "uint8")) as staging:
        staging.run(in_chunks(transfers, 1000), checked, on=on)
        there.fill(5)
        assert (made_there.get() == source).all()
        staging.finish()
    tell(made, write=False)
    assert (made == np.arange(8000) + 1).all()
    assert (there.get() == 5).all()


@pytest.mark.parametrize("on", PLACES)
def test_nothing_comes_and_something_goes_back(device, pinned, elsewhere, on):
    """Slots that nothing is copied into wait for their turn, and for the caller, all the same."""
    at_rest = {"device": of_host(pinned, np.zeros(8000, np.float32)), "host": cupy.zeros(8000, np.float32)}[on]

    def fill(number, array):
        tell(array, write=True)
        array.fill(number + 1)

    with Staging(device, slot_nbytes=4096, depth=2, pinned=pinned.empty(2 * 4096, "uint8")) as staging:
        staging.run(in_chunks([ArrayTransfer(at_rest, read=False)], 1000), fill, on=on).wait()
        if on == "host":
            at_rest.fill(9)  # before the next run, on the caller's stream
        staging.run(in_chunks([ArrayTransfer(at_rest, read=False)], 1000), fill, on=on)
        if on == "host":
            at_rest += 0  # after it
        staging.finish()
    tell(at_rest, write=False)
    assert at_rest.tolist() == [number for number in range(1, 9) for _ in range(1000)]


def test_with_nothing_to_copy_in_the_caller_still_comes_first(device, pinned, elsewhere):
    """Gradients of the caller's, made just now, and something on the host that is made of them."""
    there, made = cupy.zeros(100_000, np.float32), of_host(pinned, np.zeros(100_000, np.float32))

    def copy(number, there, made):
        made[:] = there

    with Staging(device, slot_nbytes=400_000) as staging:
        chunks = [[ArrayTransfer(there, write=False), ArrayTransfer(made, read=False)]]
        staging.run(chunks, copy, on="device").wait()
        there.fill(3)
        staging.run(chunks, copy, on="device").wait()
    tell(made, write=False)
    assert (made == 3).all()


@pytest.mark.parametrize("on", PLACES)
def test_something_comes_and_nothing_goes_back(device, pinned, elsewhere, on):
    """A slot out of which nothing is copied is still in use until it is computed with."""
    values = np.arange(8000, dtype=np.float32)
    come, found = of_host(pinned, values), cupy.zeros(8000, np.float32)
    if on == "host":
        come, found = put(values), of_host(pinned, np.zeros(8000, np.float32))

    with Staging(device, slot_nbytes=4096, depth=2, pinned=pinned.empty(2 * 4096, "uint8")) as staging:
        staging.run(in_chunks([ArrayTransfer(found), ArrayTransfer(come, write=False)], 1000), add, on=on).wait()
    tell(found, write=False)
    assert found.tolist() == values.tolist()


def test_a_caller_that_fills_pinned_memory_from_the_gpu_comes_first(device, pinned, elsewhere):
    """Its own copy to the host is under way when the run begins."""
    made, there = put(np.full(50_000, 4, np.float32)), put(np.zeros(50_000, np.float32))
    here = of_host(pinned, np.zeros(50_000, np.float32))

    def copy(number, here, there):
        there[:] = here

    with Staging(device, slot_nbytes=here.nbytes) as staging:
        chunks = [[ArrayTransfer(here, write=False), ArrayTransfer(there, read=False)]]
        staging.run(chunks, copy, on="device").wait()
        cupy.cuda.runtime.memcpyAsync(here.ctypes.data, made.data.ptr, here.nbytes, 2, elsewhere.ptr)
        staging.run(chunks, copy, on="device")
        assert (there.get() == 4).all()


def test_arrays_of_the_host_are_in_order_from_run_to_run(device, pinned):
    """Also if the second run needs nothing else of what the first still does."""
    here, other = of_host(pinned, np.ones(3000, np.float32)), of_host(pinned, np.ones(3000, np.float32))
    there = cupy.zeros(3000, np.float32)

    def double(number, values):
        tell(values, write=True)
        values += values

    with Staging(device, slot_nbytes=4096) as staging:
        chunks = in_chunks([ArrayTransfer(here)], 1000)[:2]
        gate, _ = stop(device, "copy out")
        staging.run(chunks, double, on="device")
        staging.run(chunks[::-1], double, on="device")  # a copy back, not begun yet, then the same bytes are copied in
        gate.set()
        staging.run(chunks, double, on="host")  # a copy back, then the host computes
        staging.run(in_chunks([ArrayTransfer(there), ArrayTransfer(other, write=False)], 1000), add, on="device")
        staging.run([[ArrayTransfer(other)]], double, on="host")  # a copy in, then the host computes
        assert (there.get() == 1).all()
    assert here.tolist() == [8] * 2000 + [1] * 1000
    assert (other == 2).all()


def stop(device, lane, *, at_most=20):
    """Return what lets a lane go on, and a list that is empty until it does; it goes on by itself after a while."""
    gate, gone_on = threading.Event(), []
    gc.collect()  # memory of other tests that is freed later would wait for the GPU, and so for the gate

    def wait():
        cupy.cuda.get_current_stream().launch_host_func(lambda _: gone_on.append(gate.wait(at_most)), None)

    device.named_stream(lane).submit(wait, after=())
    return gate, gone_on


@pytest.fixture
def gate(device):
    """Nothing is copied in until it is set."""
    gate, _ = stop(device, "copy in", at_most=200)
    yield gate
    gate.set()
    device.named_stream("copy in").synchronize()


def add(number, array, summand):
    tell(array, write=True)
    tell(summand, write=False)
    array += summand


def test_the_host_does_not_wait_for_the_gpu(device, pinned, gate):
    """A run on the device returns while the GPU has not begun."""
    here, there = of_host(pinned, np.zeros(4000, np.float32)), device.empty(4000, "float32")
    with Staging(device, slot_nbytes=4096, depth=2) as staging:
        there.fill(1)
        ticket = staging.run(
            in_chunks([ArrayTransfer(here), ArrayTransfer(there, write=False)], 1000), add, on="device"
        )
        assert not ticket.done()
        gate.set()
        ticket.wait()
    tell(here, write=False)
    assert (here == 1).all()


def test_runs_that_share_nothing_overlap(device, pinned):
    """Nothing is copied out, and the next run computes all the same."""
    first, second = (of_host(pinned, np.ones(1000, np.float32)) for _ in range(2))
    there = device.empty(1000, "float32")
    with Staging(device, slot_nbytes=4096) as staging:
        there.fill(1)
        staging.run([[ArrayTransfer(first), ArrayTransfer(there)]], add, on="device").wait()
        gate, gone_on = stop(device, "copy out")
        staging.run([[ArrayTransfer(first), ArrayTransfer(there)]], add, on="device")
        staging.run([[ArrayTransfer(there), ArrayTransfer(second)]], add, on="device")
        assert (there.get() == 2).all()
        assert not gone_on
        gate.set()
    assert (first == 3).all()
    assert (second == 1).all()


def test_the_callers_stream_waits_for_what_the_host_computed(device, pinned, gate):
    """A run on the host returns before its last copies have, and they come before what the caller does."""
    here, there = of_host(pinned, np.ones(2000, np.float32)), device.empty(2000, "float32")
    with Staging(device, slot_nbytes=4096, pinned=pinned.empty(3 * 4096, "uint8")) as staging:
        there.fill(1)
        ticket = staging.run(in_chunks([ArrayTransfer(there), ArrayTransfer(here, write=False)], 1000), add, on="host")
        there += there
        assert not ticket.done()
        gate.set()
        assert (there.get() == 4).all()


def test_the_host_computes_with_what_is_no_longer_read(device, pinned, gate):
    """A run on the device has still to copy in what the next one changes on the host."""
    here, there = of_host(pinned, np.ones(1000, np.float32)), device.empty(1000, "float32")
    with Staging(device, slot_nbytes=4096, pinned=pinned.empty(3 * 4096, "uint8")) as staging:
        there.fill(1)
        staging.run([[ArrayTransfer(there), ArrayTransfer(here, write=False)]], add, on="device")
        later = threading.Timer(0.05, gate.set)
        later.start()
        staging.run([[ArrayTransfer(here)]], lambda number, here: add(number, here, here), on="host")
        later.join()
        assert (there.get() == 2).all()
    assert (here == 2).all()


@pytest.mark.parametrize("on", PLACES)
def test_an_error_leaves_nothing_under_way(device, pinned, on):
    """Chunks before the one that failed are done, it and those behind it are as they were; the next run works."""
    here, there = of_host(pinned, np.zeros(8000, np.float32)), cupy.zeros(8000, np.float32)
    chunks = in_chunks([ArrayTransfer(here), ArrayTransfer(there, write=False)], 1000)
    calls = []

    def fail_at_4(number, here, there):
        calls.append(number)
        if number == 4:
            raise ZeroDivisionError("chunk 4")
        here += 1

    def add_one(number, here, there):
        here += 1

    gc.collect()
    before, _ = device.memory()
    with Staging(device, slot_nbytes=4096, pinned=pinned.empty(3 * 4096, "uint8")) as staging:
        with pytest.raises(ZeroDivisionError, match="chunk 4"):
            staging.run(chunks, told(fail_at_4), on=on)
        tell(here, write=False)
        assert here.tolist() == [1] * 4000 + [0] * 4000
        assert calls == [0, 1, 2, 3, 4]
        assert not staging._pending
        staging.run(chunks, told(add_one), on=on).wait()
        tell(here, write=False)
        assert here.tolist() == [2] * 4000 + [1] * 4000
        assert staging.nbytes == 3 * 4096
    gc.collect()
    device.named_stream("compute").sweep()
    assert device.memory()[0] >= before


def test_what_makes_no_sense_is_refused(device, pinned):
    here, there = np.zeros(100, np.float32), cupy.zeros(100, np.float32)
    cases = [
        ([[ArrayTransfer(here)]], "at most 256 bytes, a slot of staging 'staging', got one of 512"),
        (
            [[ArrayTransfer(here[:50])], [ArrayTransfer(here[40:60])]],
            "touch what others write, got 40 bytes of chunk 1",
        ),
        ([[ArrayTransfer(there[:50])], [ArrayTransfer(there[49:], write=False)]], "got 4 bytes of chunk 1"),
        ([[ArrayTransfer([1, 2])]], r"on the host \(NumPy\) or on cuda:0 \(CuPy\), got list"),
    ]
    with Staging(device, slot_nbytes=256) as staging:
        for chunks, message in cases:
            with pytest.raises(CallError, match=message):
                staging.run(chunks, lambda *_: None, on="device")
        staging.run([], lambda *_: None, on="host").wait()
        staging.run([[ArrayTransfer(there[:0]), ArrayTransfer(here[:0])]], lambda *_: None, on="device").wait()
        staging.run(
            [[ArrayTransfer(there, write=False)], [ArrayTransfer(here[:9], write=False)]], lambda *_: None, on="device"
        ).wait()
        assert "depth 3" in repr(staging)
    staging.close()
    with pytest.raises(ClosedError):
        staging.run([], lambda *_: None, on="device")
    assert "closed" in repr(staging)
    with pytest.raises(CallError, match="depth of at least 1, got 0"):
        Staging(device, slot_nbytes=1, depth=0)
    with contextlib.ExitStack() as stack, pytest.raises(CallError, match="3 slots of 512, got uint8"):
        stack.enter_context(Staging(device, slot_nbytes=512, pinned=np.zeros(1000, np.uint8)))
