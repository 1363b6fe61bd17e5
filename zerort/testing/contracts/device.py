"""`DeviceContract`: what every device holds: aligned memory, streams that keep order, tickets that tell the truth.

class TestMine(DeviceContract):
@pytest.fixture
def device(self):
with HostDevice() as device:
yield device
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import numpy as np
import pytest

from zerort.device import joined
from zerort.errors import CallError, ClosedError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Device

__all__ = ["DeviceContract"]


class DeviceContract:
    """What every device holds. Subclasses provide the fixture ``device``."""

    @pytest.mark.parametrize("alignment", [64, 512, 4096])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
    @pytest.mark.parametrize("numel", [0, 1, 1000])
    def test_memory_is_aligned_and_exact(self, device: Device, numel: int, dtype: str, alignment: int) -> None:
        """An array has the elements asked for and starts where asked."""
        array = device.empty(numel, dtype, alignment=alignment)
        assert array.shape == (numel,)
        assert array.dtype.name == dtype
        assert array.nbytes == numel * array.dtype.itemsize
        assert numel == 0 or self.address(array) % alignment == 0

    def address(self, array: Any) -> int:
        """Return where an array begins; overridden by devices whose arrays are not NumPy's."""
        found: int = array.ctypes.data
        return found

    @pytest.mark.parametrize(("numel", "alignment"), [(-1, 64), (10, 0), (10, 48)])
    def test_wrong_memory_is_refused(self, device: Device, numel: int, alignment: int) -> None:
        """Negative sizes and alignments that are no power of two raise."""
        with pytest.raises(CallError, match="Expected"):
            device.empty(numel, "float32", alignment=alignment)

    def test_a_copy_has_happened_when_its_ticket_says_so(self, device: Device) -> None:
        """Copy returns a ticket; its result is the target, with the source's bytes."""
        source, out = device.empty(100_000, "int32"), device.empty(100_000, "int32")
        source[:] = 7
        out[:] = 0
        ticket = device.copy(source, out=out)
        assert ticket.wait() is out
        assert ticket.done()
        assert bool((out == source).all())

    def test_memory_of_a_step_and_zeros(self, device: Device) -> None:
        """Scratch is as `empty` is; zeros are zeros; both are the device's own."""
        for dtype in ("float32", "bfloat16"):
            scratch, zeros = device.scratch(1000, dtype), device.zeros(1000, dtype)
            assert scratch.shape == zeros.shape == (1000,)
            assert scratch.dtype.name == zeros.dtype.name == dtype
            assert device.owns(scratch)
            assert device.owns(zeros)
            assert not device.fetch(zeros).view(np.uint8).any()
        assert device.scratch(0, "float32").size == device.zeros(0, "float32").size == 0
        assert not device.owns([1.0])
        assert device.arrays

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_values_go_there_and_back(self, device: Device, dtype: str) -> None:
        """Put copies from the host or from the device, fetch brings a copy, or the array itself, to the host."""
        values = np.arange(3000).astype(numpy_dtype(dtype))
        there, other = device.empty(3000, dtype), device.empty(3000, dtype)
        device.put(values, out=there)
        device.put(there, out=other)
        found = device.fetch(other.reshape(60, 50))
        assert found.shape == (60, 50)
        assert found.dtype == values.dtype
        assert (found.reshape(-1) == values).all()
        assert device.fetch(values) is values

    def test_flat_arrays_are_the_same_memory_or_a_copy(self, device: Device) -> None:
        """What is contiguous stays where it is; what is not is copied."""
        array = device.zeros(12, "float32")
        assert self.address(device.flat(array.reshape(3, 4))) == self.address(array)
        copy = device.flat(array.reshape(3, 4).T)
        assert copy.shape == (12,)
        assert self.address(copy) != self.address(array)

    def test_what_arrives_can_be_used_next(self, device: Device) -> None:
        """Arrive returns a ticket's result, also of several; what raised on the host raises."""
        source, out = device.zeros(100_000, "int32"), device.zeros(100_000, "int32")
        source.fill(7)
        assert device.order_after(device.copy(source, out=out)) is out
        assert int(device.fetch(out).sum()) == 700_000
        tickets = [device.copy(source[at : at + 10], out=out[at : at + 10]) for at in range(0, 100, 10)]
        assert device.order_after(joined(tickets, result="all")) == "all"
        failed = device.stream("failing").submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            device.order_after(failed)

    def test_a_lane_is_always_the_same_stream(self, device: Device) -> None:
        """Lanes are the device's own streams."""
        assert device.named_stream("copy in") is device.named_stream("copy in")
        assert device.named_stream("copy in") is not device.named_stream("copy out")
        assert device.named_stream("copy in").submit(lambda: 3).wait() == 3

    def test_a_copy_does_not_cast(self, device: Device) -> None:
        """Copies move bytes: other dtypes and shapes raise."""
        with pytest.raises(CallError, match="cast_into"):
            device.copy(device.empty(4, "float32"), out=device.empty(4, "float64"))
        with pytest.raises(CallError, match="Expected"):
            device.copy(device.empty(4, "float32"), out=device.empty(5, "float32"))

    def test_a_stream_keeps_order(self, device: Device) -> None:
        """Work happens in the order of submission, whoever waits for which part of it."""
        done: list[int] = []
        stream = device.stream("order")
        tickets = [stream.submit(functools.partial(done.append, k), eager=k % 3 == 0) for k in range(200)]
        tickets[100].wait()
        assert done[:101] == list(range(101))
        stream.synchronize()
        assert done == list(range(200))

    def test_work_happens_without_a_waiter(self, device: Device) -> None:
        """Nobody need wait for work to be done."""
        happened = threading.Event()
        device.stream("lonely").submit(happened.set)
        assert happened.wait(10)

    def test_results_and_errors_reach_the_waiter(self, device: Device) -> None:
        """A ticket gives what the work returned, or raises what it raised; the stream goes on."""
        stream = device.stream("results")

        def fail() -> None:
            raise ZeroDivisionError("on purpose")

        failing = stream.submit(fail)
        assert stream.submit(lambda: 42).wait() == 42
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                failing.wait()
        assert failing.done()

    def test_a_wait_can_time_out_and_be_repeated(self, device: Device) -> None:
        """A timeout leaves the work alone."""
        gate = threading.Event()
        ticket = device.stream("slow").submit(lambda: gate.wait(10))
        with pytest.raises(TimeoutError):
            ticket.wait(timeout=0.05)
        assert not ticket.done()
        gate.set()
        assert ticket.wait() is True

    def test_one_stream_waits_for_another(self, device: Device) -> None:
        """``ticket.on(stream)`` holds back what is submitted to the stream afterwards."""
        gate, order = threading.Event(), []
        first, second = device.stream("first"), device.stream("second")

        def slow() -> None:
            gate.wait(10)
            order.append("first")

        first.submit(slow).on(second)
        last = second.submit(lambda: order.append("second"))
        time.sleep(0.05)
        assert order == []
        gate.set()
        last.wait()
        assert order == ["first", "second"]

    def test_a_ticket_keeps_its_arrays_alive(self, device: Device) -> None:
        """What is handed over with ``keep`` lives until the work is done, and no longer than the ticket."""
        stream, gate = device.stream("keep"), threading.Event()
        died: list[str] = []

        class Owned:
            def __del__(self) -> None:
                died.append("kept")

        kept = Owned()
        ticket = stream.submit(lambda: gate.wait(10), keep=(kept,))
        del kept
        time.sleep(0.02)
        assert died == []
        gate.set()
        ticket.wait()
        assert died == ["kept"]

    def test_many_threads_may_wait_for_one_ticket(self, device: Device) -> None:
        """Every waiter gets the result, and the work is done once."""
        stream, calls, results = device.stream("shared"), [], []

        def work() -> int:
            time.sleep(0.02)
            calls.append(1)
            return 5

        ticket = stream.submit(work)
        threads = [threading.Thread(target=lambda: results.append(ticket.wait())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert results == [5] * 8
        assert calls == [1]

    def test_closing_finishes_and_then_refuses(self, device: Device) -> None:
        """Close waits for what was submitted; afterwards every verb raises; closing twice is fine."""
        stream = device.stream("closing")
        done: list[int] = []
        for k in range(20):
            stream.submit(functools.partial(done.append, k))
        stream.close()
        stream.close()
        assert done == list(range(20))
        assert "closed" in repr(stream)
        with pytest.raises(ClosedError):
            stream.submit(lambda: None)

    def test_a_closed_device_refuses(self, device: Device) -> None:
        """The device closes its streams with itself."""
        stream = device.stream("child")
        device.close()
        device.close()
        for verb in (lambda: stream.submit(lambda: None), lambda: device.empty(1, "uint8"), lambda: device.stream("x")):
            with pytest.raises(ClosedError):
                verb()
