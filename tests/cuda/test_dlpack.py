"""Tensors of other frameworks and their streams: the same memory, in the right order, and found out when it is not."""

import gc
import threading
import weakref

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import hardware  # noqa: E402
from arrays import put  # noqa: E402
from foreign import Framework, Stream  # noqa: E402

from zerort.device.cuda.device import CudaDevice  # noqa: E402
from zerort.native.dtypes import numpy_dtype  # noqa: E402

NUMEL = 50_000


@pytest.fixture
def device():
    with CudaDevice(min(1, hardware.count() - 1)) as device:  # another than the current one, if there are two
        yield device
    cupy.cuda.Device(0).use()


@pytest.fixture
def framework(device):
    return Framework(device)


@pytest.fixture
def races():
    """Return a function that gives the races found so far and forgets them; where none can be seen, the test ends."""
    if not hardware.EMULATED:
        pytest.skip("only on the emulated GPU: a real one tells of no race")

    def found():
        cupy.cuda.runtime.deviceSynchronize()
        lines = hardware.findings()
        hardware.clear()
        return [line for line in lines if line.startswith("race")]

    return found


def slowly(array):
    """Return an array of fours, after some kernels."""
    for _ in range(4):
        array = array + 1
    return array


def zeros():
    return cupy.zeros(NUMEL, np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(6, dtype=np.float16),
        np.arange(6, dtype=np.int64),
        np.array([True, False]),
        np.array(2.5, np.float32),
        np.empty((0, 3), np.float32),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_a_tensor_comes_and_goes_without_a_copy(device, framework, array):
    tensor = framework.compute(lambda: cupy.asarray(array))
    here = device.from_dlpack(tensor)
    assert device.owns(here)
    assert (here.data.ptr, here.shape, here.dtype) == (tensor.address, array.shape, array.dtype)
    np.testing.assert_array_equal(here.get(), array)
    again = framework.from_dlpack(here)
    assert again.address == tensor.address
    np.testing.assert_array_equal(again.numpy(), array)


def test_bfloat16_crosses_as_int16(device, framework):
    bfloat16 = numpy_dtype("bfloat16")
    values = np.arange(6, dtype=np.float32).astype(bfloat16)
    with device.cupy_device:
        array = put(values)
    tensor = framework.from_dlpack(array.view(np.int16))
    back = device.from_dlpack(tensor).view(bfloat16)
    assert (back.dtype, back.data.ptr) == (bfloat16, array.data.ptr)
    assert (device.fetch(back) == values).all()


def test_an_array_keeps_its_tensor(device, framework):
    tensor = framework.compute(zeros)
    alive = weakref.ref(tensor.array)
    here = device.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del here
    assert alive() is None


def test_an_import_names_the_stream_that_will_use_it(device, framework, races):
    mine = cupy.cuda.Stream(non_blocking=True)
    with device.cupy_device, mine:
        tensor = framework.compute(lambda: slowly(zeros()))
        assert (slowly(device.from_dlpack(tensor)).get() == 8).all()
        assert framework.asked == [mine.ptr]
        assert races() == []
        tensor = framework.compute(lambda: slowly(zeros()))
        slowly(cupy.from_dlpack(tensor.__dlpack__(stream=-1)))  # which says: do not wait
        assert races()
    device.from_dlpack(tensor)
    assert framework.asked[-1] == 1  # what the default stream is called


def test_an_export_waits_for_whoever_wrote_it(device, framework, races):
    with device.cupy_device, cupy.cuda.Stream(non_blocking=True):
        tensor = framework.from_dlpack(slowly(zeros()))
    assert (framework.compute(slowly, tensor).numpy() == 8).all()
    assert races() == []


def test_the_frameworks_stream_is_the_callers(device, framework):
    with device.cupy_device:
        before = cupy.cuda.get_current_stream()
    with device.on_stream(framework.stream):
        assert cupy.cuda.get_current_stream().ptr == framework.stream.cuda.ptr
        told = device.empty(1, "float32").__cuda_array_interface__["stream"]  # where torch's optimizers look it up
        assert told == framework.stream.cuda.ptr
        with device.on_stream(framework.stream):
            assert cupy.cuda.Device().id == device.ordinal
        assert cupy.cuda.get_current_stream().ptr == framework.stream.cuda.ptr
    with pytest.raises(KeyError), device.on_stream(framework.stream):
        raise KeyError
    with device.cupy_device:
        assert cupy.cuda.get_current_stream() is before


class OlderStream:
    """A stream as torch before 2.10 has it."""

    def __init__(self, cuda):
        self.cuda_stream = cuda.ptr


def test_a_stream_without_the_protocol_is_known_by_its_handle(device, framework):
    with device.on_stream(OlderStream(framework.stream.cuda)):
        assert cupy.cuda.get_current_stream().ptr == framework.stream.cuda.ptr
        array = cupy.zeros(NUMEL, np.float32)
    with framework.working():
        assert (slowly(array).get() == 4).all()


def test_the_frameworks_stream_is_one_threads(device, framework):
    """Autograd calls back on threads of its own, on which neither a device nor a stream was ever chosen."""
    seen = []

    def hook():
        seen.append(cupy.cuda.Device().id)
        with device.on_stream(framework.stream):
            seen.extend([cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr])
        seen.append(cupy.cuda.Device().id)

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    assert seen == [0, device.ordinal, framework.stream.cuda.ptr, 0]


def use(device, tensor, framework):
    """Read and write a tensor on a stream of the device's, between kernels of the framework's; return what it had."""
    there, lane = device.from_dlpack(tensor), device.named_stream("compute")
    seen = device.empty(NUMEL, "float32")
    device.copy(there, out=seen, stream=lane)
    filled = lane.submit(lambda: there.fill(10), keep=(there,))
    device.order_after(filled)
    framework.compute(slowly, tensor)
    return seen


@pytest.mark.parametrize("stream", [None, Stream(cupy.cuda.Stream.null)], ids=["of its own", "the default"])
def test_work_has_its_place_on_the_frameworks_stream(device, stream, races):
    framework = Framework(device, stream)
    tensor = framework.compute(lambda: slowly(zeros()))
    with device.on_stream(framework.stream):
        seen = use(device, tensor, framework)
        assert (device.fetch(seen) == 4).all()
    assert races() == []


def test_work_without_it_is_a_race(device, framework, races):
    tensor = framework.compute(lambda: slowly(zeros()))
    with device.cupy_device, cupy.cuda.Stream(non_blocking=True):
        use(device, tensor, framework)
    assert races()


def test_blocks_on_different_streams_follow_each_other(device, races):
    """A gradient is packed on one stream, the next on another, which then fires the reduction of both."""
    with device.cupy_device:
        first, second = Stream(), Stream()
    bucket, sums = device.empty(NUMEL, "float32"), device.empty(NUMEL, "float32")
    for stream, half in ((first, slice(0, NUMEL // 2)), (second, slice(NUMEL // 2, NUMEL))):
        with device.on_stream(stream):
            bucket[half] = slowly(cupy.zeros(NUMEL // 2, np.float32))
    with device.on_stream(second):
        device.order_after(device.copy(bucket, out=sums))
    with device.on_stream(first):
        assert (device.fetch(sums) == 4).all()
    assert races() == []


def test_a_torch_without_gpus_is_refused():
    pytest.importorskip("torch.cuda")  # not torch alone: that is found here without it, tests/torch
    import torch

    if torch.cuda.is_available():
        pytest.skip("this torch has GPUs")
    import zerort as zr
    import zerort_torch as zt
    from zerort.errors import CallError

    with zr.open_group(kind="nccl") as group, zr.open(group=group) as rt:
        with pytest.raises(CallError, match=r"Expected a torch that can use GPUs, as the runtime is on cuda:0, got 2"):
            zt.shard(torch.nn.Linear(2, 2), rt)
        with pytest.raises(AssertionError, match="not compiled with CUDA"):
            torch.from_dlpack(rt.device.zeros(3, "float32"))  # it has no stream to hand over
