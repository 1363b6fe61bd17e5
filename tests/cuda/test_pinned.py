"""Host memory registered with CUDA."""

import mmap

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.device.cuda.pinned import PinnedMemory  # noqa: E402
from zerort.errors import CallError, ClosedError, DeviceMemoryError  # noqa: E402

PAGE = mmap.PAGESIZE


def host_memory(nbytes):
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def is_pinned(array):
    return cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == cupy.cuda.runtime.memoryTypeHost


@pytest.fixture
def device():
    with CudaDevice(0) as device:
        yield device


def test_arrays_are_cut_to_the_byte(device):
    with PinnedMemory(host_memory(10 * PAGE), chunk_nbytes=3 * PAGE) as pinned:
        assert pinned.pinned
        first, second = pinned.empty(1001, "uint8"), pinned.empty(3, "float32", alignment=512)
        assert (first.nbytes, second.ctypes.data % 512, pinned.taken) == (1001, 0, 1024 + 12)
        assert is_pinned(first)
        assert is_pinned(second)
        assert "pinned" in repr(pinned)
        with pytest.raises(DeviceMemoryError, match=r"40,000 bytes of pinned memory, got 39,\d\d\d left of 40,960"):
            pinned.empty(10_000, "float32")
        with pytest.raises(CallError, match="power of two"):
            pinned.empty(1, "uint8", alignment=3)
    assert not is_pinned(first)
    first[:] = 1  # still memory
    pinned.close()
    with pytest.raises(ClosedError):
        pinned.empty(1, "uint8")


def test_copies_go_both_ways(device):
    with PinnedMemory(host_memory(64 * PAGE), chunk_nbytes=7 * PAGE) as pinned:
        source, back = pinned.empty(25_000, "float32"), pinned.empty(25_000, "float32")
        source[:] = np.arange(25_000)
        on_gpu = device.empty(25_000, "float32")
        device.copy(source, out=on_gpu).on(device.named_stream("copy out"))
        device.copy(on_gpu, out=back).wait()
        assert (back == source).all()


def test_what_cannot_be_pinned_leaves_nothing_registered(device):
    """The last chunk is registered by someone else already."""
    memory = host_memory(8 * PAGE)
    with PinnedMemory(memory[6 * PAGE :]):
        with pytest.raises(DeviceMemoryError, match=r"Expected to pin 32,768 bytes.*at chunk 4\. Ask for less"):
            PinnedMemory(memory, chunk_nbytes=2 * PAGE)
        assert not is_pinned(memory)
    with PinnedMemory(memory, chunk_nbytes=2 * PAGE) as whole:
        assert whole.pinned


def test_closing_unregisters_what_it_can(device):
    """Someone has unregistered a chunk already: CUDA says so, and the others go all the same."""
    memory = host_memory(6 * PAGE)
    pinned = PinnedMemory(memory, chunk_nbytes=2 * PAGE)
    cupy.cuda.runtime.hostUnregister(memory.ctypes.data + 2 * PAGE)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="NotRegistered"):
        pinned.close()
    assert not any(is_pinned(memory[first:]) for first in range(0, 6 * PAGE, 2 * PAGE))
    assert not pinned.pinned
    pinned.close()


def test_the_slow_form_is_the_same_without_cuda(device):
    with PinnedMemory(host_memory(PAGE), pin=False) as pageable:
        assert not pageable.pinned
        assert not is_pinned(pageable.empty(10, "uint8"))
        assert "pageable" in repr(pageable)
