"""A framework beside CuPy, as far as its neighbours can tell: a current stream of its own, and tensors over DLPack.

It stands for torch on a GPU, which a torch without CUDA cannot show. Both sides of the protocol are CuPy's own code,
each with its side's stream current. Tensors come from a pool that gives what is freed to the next of the same stream,
as torch's allocator does: the emulated device reports who still reads one then.
"""

from __future__ import annotations

import contextlib

import cupy


class Stream:
    """A stream that others know by ``__cuda_stream__`` alone."""

    def __init__(self, cuda=None):
        self.cuda = cuda or cupy.cuda.Stream(non_blocking=True)

    def __cuda_stream__(self):
        return 0, self.cuda.ptr


class Tensor:
    """Memory of the framework's. Those who import it say on which stream they will use it."""

    def __init__(self, framework, array):
        self.framework = framework
        self.array = array

    @property
    def address(self):
        return self.array.data.ptr

    def numpy(self):
        """Return a copy on the host, once it is computed."""
        with self.framework.working():
            return self.array.get()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        self.framework.asked.append(stream)
        with self.framework.working():
            return self.array.__dlpack__(stream=stream, **options)


class Framework:
    """Computes on its current stream, whatever CuPy's is."""

    def __init__(self, device, stream=None):
        self.device = device
        with device.cupy_device:
            self.stream = stream or Stream()
        self.asked = []  # streams that importers named

    @contextlib.contextmanager
    def working(self):
        """Run a block as code of the framework's, on its stream."""
        with self.device.cupy_device, self.stream.cuda:
            yield

    def compute(self, function, *tensors):
        """Return what a function of arrays makes of tensors."""
        with self.working():
            return Tensor(self, function(*(tensor.array for tensor in tensors)))

    def from_dlpack(self, array):
        """Return another's array as a tensor, once what its owner has queued so far is ordered before."""
        capsule = array.__dlpack__(stream=self.stream.cuda.ptr)
        with self.device.cupy_device:
            return Tensor(self, cupy.from_dlpack(capsule))
