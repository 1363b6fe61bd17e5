"""The watch over a communicator: who is inside NCCL when it ends."""

import inspect
import threading
import time

import hardware
import pytest

cupy = pytest.importorskip("cupy")

from zerort.comm import open_group  # noqa: E402
from zerort.config import GroupOptions  # noqa: E402
from zerort.errors import CollectiveError, CollectiveTimeoutError  # noqa: E402


@pytest.fixture
def group(tmp_path):
    with open_group(kind="nccl", options=GroupOptions(timeout=3.0, flight_dir=str(tmp_path))) as group:
        yield group


@pytest.fixture
def inside(group):
    """Start a thread that is inside NCCL until it may go; what is appended to ``left`` says that it is out."""
    go, left, entered = threading.Event(), [], threading.Event()

    def stay(seconds):
        with group._transport.device.cupy_device, group._transport._watch.entry("#7 all_reduce"):
            entered.set()
            go.wait(seconds)
            left.append(True)

    threads = []

    def start(seconds):
        threads.append(threading.Thread(target=stay, args=(seconds,)))
        threads[0].start()
        assert entered.wait(60)
        return left

    yield start
    go.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


def until_broken(group):
    """Wait until the watch has broken the group; give up if it does not."""
    until = time.monotonic() + 60
    while group._transport.broken is None and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("verb", ["abort", "close", "end"])
def test_the_end_waits_until_nobody_is_inside(group, inside, verb):
    watch, left = group._transport._watch, inside(0.3)
    getattr(watch, verb)()
    assert left
    with pytest.raises(CollectiveError, match="open for #8 all_gather, got it ended"), watch.entry("#8 all_gather"):
        pytest.fail("someone came in")


def test_a_call_that_does_not_end_on_the_gpu_breaks_the_group(group):
    """It is queued, and whoever queued it has left NCCL: only the event behind it tells."""
    gate, ones = threading.Event(), cupy.ones(1000)
    with cupy.cuda.Stream(non_blocking=True) as busy:
        cupy.cuda.Stream.null.synchronize()
        busy.launch_host_func(lambda _: gate.wait(120), None)
        ticket = group.all_reduce(ones)
    until_broken(group)
    gate.set()  # NCCL's abort waits for what is on the GPU before it
    with pytest.raises(CollectiveTimeoutError, match=r"finish #0 all_reduce\(gpu:float64\[1000\], sum\)"):
        ticket.wait()


def test_closing_closes_everything_whatever_one_part_says(group):
    """A call failed that nobody waited for, on the group and on its part, and warnings are errors here."""
    part, transport = group.split(0), group._transport
    for one in (part, group):
        one.all_reduce([1.0])
    with pytest.raises(RuntimeWarning, match="nobody waited"):
        group.close()
    assert (group.closed, part.closed) == (True, True)
    assert "closed" in repr(transport.device)
    for one in (part._transport, transport):
        with pytest.raises(CollectiveError, match="got it ended"), one._watch.entry("#9"):
            pytest.fail("someone came in")
    group.close()


def test_an_entry_that_does_not_return_breaks_the_group(group, inside):
    """NCCL may block whoever enters it, to connect to a rank that is gone, say."""
    left = inside(120)
    until_broken(group)
    assert isinstance(group._transport.broken, CollectiveTimeoutError)
    assert "finish #7 all_reduce within 3.0 s" in str(group._transport.broken)
    assert not left


def test_a_call_does_not_wait_for_ever_for_its_turn(group):
    """The thread of another group of this GPU does not come back from NCCL."""
    part, gate = group.split(0), threading.Event()
    stream = part._transport._stream
    stuck = stream.submit(lambda: (stream.take_turn(), gate.wait(60)))
    try:
        with pytest.raises(CollectiveTimeoutError, match=r"finish #\d all_reduce\(.*'loss'.* another group, before it"):
            group.all_reduce(cupy.ones(10), name="loss").wait()
        with pytest.raises(CollectiveError, match="is broken since"):
            group.all_reduce(cupy.ones(10))
    finally:
        gate.set()
    stuck.wait()


def test_whoever_the_end_throws_out_of_nccl_hears_why(group):
    """What NCCL says to a thread under which the communicator goes names neither the call nor the reason."""
    watch = group._transport._watch

    def be_thrown_out():
        with watch.entry("#7 all_reduce"):
            until_broken(group)
            raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR")

    with pytest.raises(CollectiveTimeoutError, match=r"finish #7 all_reduce within 3\.0 s"):
        be_thrown_out()
    with pytest.raises(CollectiveTimeoutError, match="finish #7 all_reduce"), watch.entry("#8 all_gather"):
        pytest.fail("someone came in")


@hardware.only_emulated("how long an abort takes is up to NCCL")
def test_an_abort_that_does_not_come_to_its_end_is_told(group, monkeypatch):
    """NCCL waits for what is on the GPU before its calls, and that may be for ever."""
    watch = group._transport._watch
    monkeypatch.setattr(inspect.getmodule(type(watch)), "_DEADLINE", 0.1)
    gate, ones = threading.Event(), cupy.ones(1000)
    with cupy.cuda.Stream(non_blocking=True) as busy:
        cupy.cuda.Stream.null.synchronize()
        busy.launch_host_func(lambda _: gate.wait(120), None)
        group.all_reduce(ones)
    group.barrier().wait()  # the hosts': it comes when the call before it is in NCCL
    try:
        with pytest.warns(RuntimeWarning, match=r"NCCL to abort group 'world' .* The GPU stays busy"):
            watch.abort()
    finally:
        gate.set()


def test_a_process_whose_gpu_had_a_fault_ends_all_the_same(job):
    """Whether calls are under way can no longer be asked: an abort waits for none."""
    result = job(
        1,
        """
        import cupy
        write = cupy.RawKernel('extern "C" __global__ void write() { *(volatile char *)64 = 1; }', "write")
        watch = open_group()._transport._watch
        with watch.entry("#7 all_reduce"):
            write((1,), (1,), ())
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            say("rank", rank, "faulted", "IllegalAddress" in str(error))
        watch.end()
        try:
            with watch.entry("#8 all_gather"):
                say("someone came in")
        except CollectiveError:
            say("rank", rank, "ended")
        os._exit(0)
        """,
    )
    assert "rank 0 faulted True" in result.output, result.output
    assert "rank 0 ended" in result.output, result.output
