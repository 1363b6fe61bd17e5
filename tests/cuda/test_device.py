"""The GPU as a device."""

import functools
import gc
import threading
import time

import hardware
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from gpu_jobs import ranks_that  # noqa: E402

from zerort.device.cuda.device import LANES, CudaDevice  # noqa: E402
from zerort.device.cuda.order import CudaOrder  # noqa: E402
from zerort.device.host.stream import HostStream  # noqa: E402
from zerort.errors import CallError, ClosedError, DeviceError, DeviceMemoryError  # noqa: E402
from zerort.testing.contracts.device import DeviceContract  # noqa: E402


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


class TestCudaDevice(DeviceContract):
    def address(self, array):
        return array.data.ptr


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match="no more ranks on a host than it has GPUs"):
        CudaDevice(99)


def test_lanes_are_made_once(device):
    assert [device.named_stream(name) is device.named_stream(name) for name in LANES] == [True] * 7
    with pytest.raises(CallError, match="lanes compute"):
        device.named_stream("copy sideways")


def test_copies_go_all_four_ways(device):
    source = np.arange(10_000, dtype=np.int32)
    there, back, again = device.empty(10_000, "int32"), np.zeros(10_000, np.int32), device.empty(10_000, "int32")
    arrived = device.copy(source, out=there)
    arrived.on(device.named_stream("compute"))
    moved = device.copy(there, out=again)
    moved.on(device.named_stream("copy out"))
    device.copy(again, out=back).wait()
    assert (back == source).all()
    assert (device.copy(source, out=np.empty_like(source)).wait() == source).all()


def test_a_copy_waits_for_what_the_caller_computed(device):
    """The caller's own stream comes first, whichever that is."""
    here, out = cupy.cuda.Stream(non_blocking=True), np.zeros(100_000, np.float32)
    with here:
        values = cupy.zeros(100_000, np.float32)
        for _ in range(20):
            values += 1
        device.copy(values, out=out).wait()
    assert (out == 20).all()


def test_work_can_come_after_tickets_alone(device):
    """With ``after`` the caller's stream does not matter; the tickets do."""
    compute, copies = device.named_stream("compute"), device.named_stream("copy out")
    values, out = device.empty(50_000, "float32"), np.zeros(50_000, np.float32)
    filled = compute.submit(lambda: values.fill(3))
    copied = copies.submit(
        lambda: cupy.cuda.runtime.memcpyAsync(out.ctypes.data, values.data.ptr, out.nbytes, 2, copies.cuda.ptr),
        after=[filled],
    )
    copied.wait()
    assert (out == 3).all()


@pytest.fixture
def hold_up(device):
    """Hold a lane up on the GPU for a moment; the event that is returned tells that it is over."""

    def hold(lane):
        over = threading.Event()

        def slow(_):
            time.sleep(0.3)
            over.set()

        device.named_stream(lane).submit(lambda: cupy.cuda.get_current_stream().launch_host_func(slow, None))
        return over

    return hold


@pytest.mark.parametrize("pageable", [True, False], ids=["of-the-host", "of-the-gpu"])
def test_what_is_put_is_there_for_what_comes_next(device, hold_up, pageable):
    """On the caller's stream; and memory of the host may be written to again at once."""
    values, seen = np.arange(50_000, dtype=np.float32), device.empty(50_000, "float32")
    out, source = device.empty(50_000, "float32"), values if pageable else cupy.asarray(values)
    with cupy.cuda.Stream(non_blocking=True) as mine:
        mine.wait_event(cupy.cuda.Stream.null.record())
        over = hold_up("copy in" if pageable else "compute")
        device.put(source, out=out)
        assert over.is_set() or not pageable
        cupy.multiply(out, 2, out=seen)
        mine.synchronize()
    assert (seen.get() == values * 2).all()


def test_what_is_fetched_is_what_was_computed(device, hold_up):
    with cupy.cuda.Stream(non_blocking=True):
        values = cupy.zeros((100, 500), np.float32)
        for _ in range(10):
            values += 1
        over = hold_up("copy out")
        fetched = device.fetch(values)
        assert over.is_set()
    assert (fetched == 10).all()
    assert device.fetch(fetched) is fetched


def test_what_arrives_is_ordered_before_what_comes_next(device):
    values, seen = device.empty(50_000, "float32"), device.empty(50_000, "float32")
    with cupy.cuda.Stream(non_blocking=True) as mine:
        filled = device.named_stream("compute").submit(lambda: values.fill(3) or "filled")
        assert device.order_after(filled) == "filled"
        cupy.multiply(values, 2, out=seen)
        mine.synchronize()
    assert (seen.get() == 6).all()


@pytest.mark.parametrize("on_gpu", [True, False], ids=["of-a-gpu", "of-the-host"])
def test_work_comes_after_tickets_that_the_host_has_not_come_to(device, on_gpu):
    """Behind work that its own stream has queued, but not begun: there is no event yet that the GPU could wait for."""
    gate = threading.Event()
    with HostStream("before") as on_host:
        before = (device.stream("before") if on_gpu else on_host).submit(lambda: gate.wait(20))
        after = device.stream("after").submit(lambda: "done", after=[before])
        with pytest.raises(TimeoutError):
            after.wait(timeout=0.2)
        gate.set()
        assert after.wait() == "done"
        before.wait()


def test_synchronize_waits_for_the_gpu(device):
    """For what was queued before, by whoever."""
    ended = []
    stream = device.stream("slow")

    def slow(_):
        time.sleep(0.3)
        ended.append(True)

    stream.submit(lambda: cupy.cuda.get_current_stream().launch_host_func(slow, None))
    stream.synchronize()
    assert ended


def test_a_wait_for_the_gpu_can_time_out(device):
    gate = threading.Event()
    stream = device.stream("blocked")
    ticket = stream.submit(lambda: cupy.cuda.get_current_stream().launch_host_func(lambda _: gate.wait(20), None))
    with pytest.raises(TimeoutError, match=r"'blocked' is not done after 0\.2 s"):
        ticket.wait(timeout=0.2)
    assert not ticket.done()
    gate.set()
    ticket.wait()


def test_a_stream_closes_behind_its_work(device):
    done = []

    def slow(_):
        time.sleep(0.2)
        done.append("on the GPU")

    with device.stream("short") as stream:
        stream.submit(lambda: cupy.cuda.get_current_stream().launch_host_func(slow, None))
    assert done == ["on the GPU"]


def test_arrays_live_until_the_gpu_is_done(device):
    """A ticket that is dropped does not free what the GPU still reads."""
    stream = device.stream("dropped")
    out = device.empty(20_000, "float32")  # a copy to the host would wait for the GPU
    for step in range(20):
        source = cupy.full(20_000, float(step), np.float32)
        device.copy(source, out=out, stream=stream)
        del source
        cupy.full(20_000, -1.0, np.float32)  # would take the place of what was freed too early
    stream.synchronize()
    assert (out == 19).all()
    assert not stream._held


def test_only_a_lack_of_memory_is_told_as_one(device):
    """Whatever else keeps an array from being made is raised as it is: at once, and after room was made."""
    asked = []

    def fail_without_room():
        asked.append(len(asked))
        if len(asked) == 2:
            raise cupy.cuda.memory.OutOfMemoryError(8, 0, 0)
        raise ZeroDivisionError

    for times in (1, 3):
        with pytest.raises(ZeroDivisionError):
            device.allocate(8, fail_without_room)
        assert len(asked) == times


def test_memory_comes_back(device):
    gc.collect()
    before, _ = device.memory()
    arrays = [device.empty(1_000_003, "uint8") for _ in range(3)]
    held, _ = device.memory()
    assert 3_000_000 <= before - held < 3_500_000
    del arrays
    assert device.memory()[0] == before


def test_too_much_memory_is_a_named_error_with_numbers(device):
    free, total = device.memory()
    with pytest.raises(
        DeviceMemoryError, match=rf"Expected {2 * total:,} bytes on GPU 0, got [\d,]+ free of {total:,}"
    ):
        device.empty(2 * total, "uint8")
    assert device.memory()[0] >= free
    assert device.empty(10, "float32").size == 10


def test_the_pool_gives_way(device):
    """What CuPy's pool keeps for later is no reason to fail."""
    free, _ = device.memory()
    hoard = cupy.empty(free // 2, np.uint8)
    del hoard
    assert device.empty(free * 3 // 4, "uint8").nbytes == free * 3 // 4


def test_a_frameworks_cache_gives_way_once(device):
    """What torch's allocator keeps for later is no reason to fail, either; it is asked once, and before CuPy's pool."""
    free, _ = device.memory()
    hoard, asked = [device.empty(free // 2, "uint8")], []

    def empty_cache():
        asked.append(cupy.get_default_memory_pool().total_bytes())
        hoard.clear()

    keeps = cupy.empty(1000, np.uint8)
    del keeps
    device.share_with(empty_cache)
    device.share_with(empty_cache)
    assert device.empty(free * 3 // 4, "uint8").nbytes == free * 3 // 4
    assert len(asked) == 1
    assert asked[0] > 0
    with pytest.raises(DeviceMemoryError):
        device.empty(2 * free, "uint8")
    assert len(asked) == 2


def test_torch_gives_back_what_it_keeps(device):
    torch = pytest.importorskip("torch")
    memory = pytest.importorskip("zerort_torch.parameters.memory")
    memory.share_memory(device)
    memory.share_memory(device)
    assert device._caches == [torch.cuda.empty_cache]


def test_strides_are_refused(device):
    with pytest.raises(CallError, match="contiguous"):
        device.copy(device.empty(8, "uint8")[::2], out=device.empty(4, "uint8"))


def test_closing_closes_every_stream_whatever_one_of_them_says(device):
    """Work failed that nobody waited for, and warnings are errors here."""
    streams = [device.stream(name) for name in ("first", "second")]
    for stream in streams:
        stream.submit(lambda: 1 / 0)
    with pytest.raises(RuntimeWarning, match="ZeroDivisionError"):
        device.close()
    for stream in streams:
        with pytest.raises(ClosedError):
            stream.submit(lambda: None)
    assert "closed" in repr(device)
    device.close()


def test_streams_in_one_order_take_turns_on_the_host(device):
    """What was submitted first comes first, whichever stream's thread is ready."""
    order, gate, issued = CudaOrder(), threading.Event(), []
    first, second = (device.stream(name, order=order) for name in ("first", "second"))

    def slow():
        first.take_turn()
        gate.wait(20)
        issued.append("first")

    def quick():
        second.take_turn()
        issued.append("second")

    before, after = first.submit(slow), second.submit(quick)
    with pytest.raises(TimeoutError):
        after.wait(timeout=0.2)
    gate.set()
    after.wait()
    before.wait()
    assert issued == ["first", "second"]


def test_streams_in_one_order_take_turns_on_the_gpu(device):
    """An event that nobody asked for is between them: nothing else says that the second reads what the first wrote."""
    order = CudaOrder()
    streams = [device.stream(name, order=order) for name in ("first", "second", "third")]
    values = device.empty(50_000, "float32")

    def add_one(stream):
        stream.take_turn()
        cupy.add(values, 1, out=values)

    tickets = [streams[0].submit(lambda: values.fill(0), after=())]
    tickets += [stream.submit(functools.partial(add_one, stream), after=()) for stream in streams * 3]
    for ticket in tickets:
        ticket.wait()
    assert (values == 9).all()


def test_a_turn_passes_whatever_work_raises(device):
    order = CudaOrder()
    first, second = (device.stream(name, order=order) for name in ("first", "second"))
    failed = first.submit(lambda: (first.take_turn(), 1 / 0))
    second.submit(second.take_turn).wait(timeout=20)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    first.close()
    with pytest.raises(ClosedError):  # who is not let in takes no place
        first.submit(lambda: None)
    second.submit(second.take_turn).wait(timeout=20)


def test_who_gives_up_leaves_the_line_and_those_behind_still_wait(device):
    order, gate, trouble = CudaOrder(), threading.Event(), []
    first, third = (device.stream(name, order=order) for name in ("first", "third"))
    second = device.stream("second", order=order, trouble=lambda: next(iter(trouble), None))
    stuck = first.submit(lambda: (first.take_turn(), gate.wait(60)))
    given_up, behind = (stream.submit(stream.take_turn) for stream in (second, third))
    with pytest.raises(TimeoutError):
        given_up.wait(timeout=0.2)
    trouble.append(DeviceError("of no use"))
    with pytest.raises(DeviceError, match="of no use"):
        given_up.wait(timeout=20)
    with pytest.raises(TimeoutError):
        behind.wait(timeout=0.2)
    gate.set()
    behind.wait(timeout=20)
    stuck.wait()


def test_repr_tells(device):
    assert "0 streams" in repr(device)
    assert "GPU 0" in repr(device.named_stream("gather"))
    device.close()
    assert "closed" in repr(device)


def test_a_fault_of_the_gpu_is_an_error_and_nothing_hangs(job, tmp_path):
    """A kernel writes where nothing is: from then on CUDA answers everything with that error."""
    result = job(
        1,
        """
        import cupy, functools, gc, weakref
        from zerort.device.cuda.device import CudaDevice
        write = cupy.RawKernel('extern "C" __global__ void write(char *p) { *(volatile char *)64 = 1; }', "write")
        device = CudaDevice(0)
        stream, array = device.stream("faulty"), device.empty(100, "uint8")
        alive = weakref.ref(array)
        ticket = stream.submit(functools.partial(write, (1,), (1,), (array,)), keep=(array,))
        del array
        for ask in (lambda: ticket.wait(timeout=20), ticket.done):
            try:
                ask()
            except DeviceError as error:
                say("rank", rank, "raised", "cudaErrorIllegalAddress" in str(error), "end it" in str(error))
        stream.close()
        say("rank", rank, "holds", len(stream._held))
        del ticket
        gc.collect()
        say("rank", rank, "freed", alive() is None)
        os._exit(0)
        """,
        report=tmp_path,
    )
    assert ranks_that("raised True True", result.output) == ["0", "0"], result.output
    assert "rank 0 holds 0" in result.output, result.output
    assert "rank 0 freed True" in result.output, result.output
    if hardware.EMULATED:
        assert "touches 0x40" in hardware.findings_in(tmp_path)[0]
