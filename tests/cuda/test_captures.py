"""Graphs: the runtime works on while another thread, or the same, captures a stream, and breaks no capture."""

import contextlib
import threading

import hardware
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from zerort.comm import open_group  # noqa: E402
from zerort.config import GroupOptions  # noqa: E402
from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.library import has_passed  # noqa: E402

runtime = cupy.cuda.runtime


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


@contextlib.contextmanager
def capturing():
    """Capture a stream as torch.cuda.graph does by default; fails if someone broke the capture meanwhile."""
    stream = cupy.cuda.Stream(non_blocking=True)
    runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeGlobal)
    try:
        yield stream
    finally:
        graph = runtime.streamEndCapture(stream.ptr)
    runtime.graphDestroy(graph)


@contextlib.contextmanager
def held_up(stream):
    """What is put onto a stream within the block waits for its end."""
    gate = threading.Event()
    cupy.cuda.Stream.null.synchronize()
    stream.launch_host_func(lambda _: gate.wait(60), None)
    try:
        yield
    finally:
        gate.set()


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


def test_whoever_asks_for_work_breaks_no_capture(device):
    stream = device.stream("busy")
    with held_up(stream.cuda):
        ticket = stream.submit(lambda: None, after=())
        ticket.ready._issued.wait()
        with capturing():
            assert not ticket.done()
            assert not in_a_thread(ticket.done)
    ticket.wait()


def test_an_event_of_a_capture_has_not_passed_and_drops_no_array(device):
    """CUDA answers with an error of the capture's, which is no fault of the GPU."""
    stream, array = device.stream("captured"), cupy.ones(10)
    event = cupy.cuda.Event(disable_timing=True)
    with capturing() as captured:
        runtime.eventRecord(event.ptr, captured.ptr)
        stream._held.append((event, (array,)))
        stream.sweep()
        assert len(stream._held) == 1
        assert not has_passed(event)
    stream.close()  # which does not wait for it
    assert len(stream._held) == 1


def test_the_watch_over_a_group_breaks_no_capture(tmp_path):
    """It asks for the call that is under way ten times a second, on a thread of its own."""
    with open_group(kind="nccl", options=GroupOptions(timeout=60.0, flight_dir=str(tmp_path))) as group:
        watch, looks = group._transport._watch, threading.Semaphore(0)
        trouble = watch._trouble
        watch._trouble = lambda: (looks.release(), trouble())[1]
        ones = cupy.ones(1000, np.float32)
        with cupy.cuda.Stream(non_blocking=True) as busy, held_up(busy):
            ticket = group.all_reduce(ones)
            with capturing():
                for _ in range(3):
                    assert looks.acquire(timeout=60)
        assert (ticket.wait().get() == 1).all()
        assert group._transport.broken is None


def test_threads_of_streams_may_allocate_during_a_capture(device):
    """Work on a stream's own thread takes memory from CuPy's pool, which may have to ask CUDA for more."""
    stream = device.stream("allocating", helping=False)
    with capturing():
        ticket = stream.submit(lambda: device.empty(3 * 1024**2, "uint8"), after=())
        assert ticket.ready._issued.wait(60) is None
    assert ticket.wait().nbytes == 3 * 1024**2


@hardware.only_emulated("a real GPU refuses it, and the capture is lost: that is what the others are for")
def test_without_the_mode_a_question_breaks_the_capture(device):
    event = cupy.cuda.Event()
    with pytest.raises(runtime.CUDARuntimeError, match="CaptureInvalidated"), capturing():
        assert in_a_thread(lambda: runtime.eventQuery(event.ptr)) == 900
