"""A GPU as a device: flat buffers owned once, and the streams that work on them.

    lane        reason
    compute     optimizer kernels and casts, in the order of the step
    gather      parameters on their way here, ahead of the computing that needs them
    encode      what travels as codes: ahead of the collective that carries them
    decode      what has come as codes: behind its arrival, beside the computing that is under way
    reduce      gradients on their way out, behind the computing that made them
    copy in     host to device: the bus runs both ways at once, so each way has a stream
    copy out    device to host

Memory that lasts comes straight from cudaMalloc, to the byte: a flat buffer is made once and lives as long as the run,
and CuPy's pool would round it up. What comes and goes with a step (`scratch`) is the pool's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerort.device.cuda.library import count_gpus, cupy, foreign_stream, is_out_of_memory, stream_handle
from zerort.device.cuda.pinned import seams
from zerort.device.cuda.stream import CudaStream, order
from zerort.device.ticket import Ticket
from zerort.errors import CallError, ClosedError, DeviceError, DeviceMemoryError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, DtypeLike, Stream

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LANES", "CudaDevice"]

T = TypeVar("T")

LANES = {"compute": 0, "gather": -1, "encode": -1, "decode": -1, "reduce": -1, "copy in": 0, "copy out": 0}
"""The streams that a device has of its own, and their priority. A lower number goes first: other ranks wait for it."""

_CUDA_ALIGNMENT = 256
"""Bytes to which every allocation of CUDA's is aligned."""


class CudaDevice:
    """One GPU of this process. Opening it makes it the calling thread's current device.

    Args:
        ordinal: Which of the GPUs that this process sees.

    Raises:
        DeviceError: There is no such GPU.
    """

    in_host_memory = False

    def __init__(self, ordinal: int = 0) -> None:
        count = count_gpus()
        if not 0 <= ordinal < count:
            raise DeviceError(
                f"Expected the number of one of {count} GPUs, got {ordinal}. Start no more ranks on a host than it has "
                "GPUs, and look at CUDA_VISIBLE_DEVICES."
            )
        self.name = f"cuda:{ordinal}"
        self.ordinal = ordinal
        self.arrays = f"a CuPy array on GPU {ordinal}"
        self.cupy_device = cupy.cuda.Device(ordinal)
        self.cupy_device.use()
        self._streams: list[CudaStream] = []
        self._lanes: dict[str, CudaStream] = {}
        self._making = threading.Lock()
        self._foreign: dict[int, Any] = {}  # streams of other frameworks, by their handles
        self._left = cupy.cuda.Event(disable_timing=True)  # behind the last block on one of them
        self._caches: list[Callable[[], object]] = []  # of other frameworks: what makes them give memory back
        self._closed = False

    # -- memory ----------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: DtypeLike, *, alignment: int = _CUDA_ALIGNMENT) -> Any:
        """Return a 1-D CuPy array of ``numel`` elements whose first byte stands at a multiple of ``alignment`` bytes.

        Raises:
            DeviceMemoryError: The GPU has not that much left.
        """
        self._check_open()
        if numel < 0:
            raise CallError(f"Expected numel ≥ 0, got {numel}.")
        if alignment < 1 or alignment & (alignment - 1):
            raise CallError(f"Expected an alignment that is a power of two, got {alignment}.")
        kind = numpy_dtype(dtype)
        nbytes = numel * kind.itemsize
        room = nbytes + (alignment if alignment > _CUDA_ALIGNMENT else 0)
        memory = self.allocate(room, lambda: cupy.cuda.Memory(room))
        with self.cupy_device:
            return cupy.ndarray((numel,), kind, memptr=cupy.cuda.MemoryPointer(memory, -memory.ptr % alignment))

    def scratch(self, numel: int, dtype: DtypeLike) -> Any:
        """Return a 1-D array from CuPy's pool: cudaMalloc and cudaFree would stop the GPU in every step."""
        self._check_open()
        kind = numpy_dtype(dtype)
        return self.allocate(numel * kind.itemsize, lambda: cupy.empty(numel * kind.itemsize, np.uint8).view(kind))

    def zeros(self, numel: int, dtype: DtypeLike) -> Any:
        """Return a 1-D array of zeros."""
        made = self.empty(numel, dtype)
        with self.cupy_device:
            made.view(np.uint8).fill(0)
        return made

    def reserve(self, numel: int, dtype: DtypeLike) -> None:
        """Return None: memory of a GPU stands behind all addresses that it has."""

    def owns(self, array: Any) -> bool:
        """Say whether ``array`` is CuPy's and lies on this GPU."""
        return isinstance(array, cupy.ndarray) and array.device.id == self.ordinal

    def flat(self, array: Any) -> Any:
        """Return a CuPy array as 1-D and contiguous."""
        with self.cupy_device:
            return cupy.ascontiguousarray(array).reshape(-1)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the GPU."""
        with self.cupy_device:
            free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, nbytes: int, make: Callable[[], T]) -> T:
        """Return what ``make`` allocates; if the GPU has not enough left, make room and try once more.

        Raises:
            DeviceMemoryError: There are no ``nbytes``, with the numbers.
        """
        with self.cupy_device:
            try:
                return make()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # What finished work still holds, and what frameworks and CuPy's pool keep for later, is memory too.
            for stream in list(self._streams):
                stream.sweep()
            for empty_cache in self._caches:
                empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()
            try:
                return make()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise self._memory_error(nbytes) from error

    def share_with(self, empty_cache: Callable[[], object]) -> None:
        """Let another framework that allocates on this GPU say how it gives back what it keeps for later.

        Called once before the GPU is found to be out of memory; registering it twice is fine.
        """
        if empty_cache not in self._caches:
            self._caches.append(empty_cache)

    def _memory_error(self, nbytes: int) -> DeviceMemoryError:
        free, total = self.memory()
        return DeviceMemoryError(
            f"Expected {nbytes:,} bytes on GPU {self.ordinal}, got {free:,} free of {total:,}. Shard more (a higher "
            "ZeRO stage, more ranks), keep state on the host or on NVMe, or use a smaller batch."
        )

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy(
        self,
        source: Any,
        *,
        out: Any,
        stream: Stream | None = None,
        after: Sequence[Ticket[Any]] | None = None,
        eager: bool = True,
    ) -> Ticket[Any]:
        """Copy ``source`` into ``out``, each on the GPU (CuPy) or on the host (NumPy), and return the Ticket.

        A copy from or to the host runs beside the GPU's work only if that memory is pinned; see `PinnedMemory`.

        Args:
            source: A contiguous array.
            out: One of the same shape and dtype.
            stream: A stream of this device; the lane for this direction if None.
            after: As in `CudaStream.submit`.
            eager: Queue it on the GPU here and now; False for a copy that comes after something of the host's.
        """
        self._check_open()
        if source.shape != out.shape or source.dtype != out.dtype:
            raise CallError(
                f"Expected out like source ({source.dtype}{list(source.shape)}), got {out.dtype}{list(out.shape)}. "
                "Copy moves bytes; zerort.optim.kernels_cuda.cast_into changes the dtype."
            )
        if not (source.flags.c_contiguous and out.flags.c_contiguous):
            raise CallError("Expected contiguous arrays to copy, got strides. Copy one row at a time, or the whole.")
        runtime = cupy.cuda.runtime
        lane, kind = {
            (True, False): ("copy in", runtime.memcpyHostToDevice),
            (False, True): ("copy out", runtime.memcpyDeviceToHost),
            (False, False): ("compute", runtime.memcpyDeviceToDevice),
            (True, True): ("copy out", runtime.memcpyHostToHost),
        }[isinstance(source, np.ndarray), isinstance(out, np.ndarray)]
        on: Any = self.named_stream(lane) if stream is None else stream

        there, here, nbytes = _address(source), _address(out), source.nbytes
        cuts = sorted({0, *seams(there, nbytes), *seams(here, nbytes), nbytes})

        def work() -> Any:
            current = cupy.cuda.get_current_stream().ptr
            for first, end in itertools.pairwise(cuts):
                runtime.memcpyAsync(here + first, there + first, end - first, kind, current)
            return out

        # gpu-wait: a_copy_waits_for_what_the_caller_computed
        ticket: Ticket[Any] = on.submit(work, name=lane, keep=(source, out), eager=eager, after=after)
        return ticket

    def put(self, source: Any, *, out: Any) -> None:
        """Copy ``source``, of the host or of this GPU, into ``out``; what the caller launches next comes after it."""
        if isinstance(source, np.ndarray):
            # gpu-wait: what_is_put_is_there_for_what_comes_next
            self.copy(source, out=out).wait()  # it may be pageable: then it is the caller's again only now
        else:
            self.order_after(self.copy(source, out=out))  # gpu-wait: what_is_put_is_there_for_what_comes_next

    def fetch(self, array: Any) -> Array:
        """Return a copy of a CuPy array on the host, once what the caller has launched so far is done."""
        if isinstance(array, np.ndarray):
            return array
        copy: Array = np.empty(array.shape, array.dtype)
        self.copy(self.flat(array), out=copy.reshape(-1)).wait()  # gpu-wait: what_is_fetched_is_what_was_computed
        return copy

    def order_after(self, ticket: Ticket[T]) -> T:
        """Make what the caller launches next wait for a Ticket, on the GPU; the host waits only for what is its own."""
        with self.cupy_device:
            # gpu-wait: what_arrives_is_ordered_before_what_comes_next
            return order(ticket, before=cupy.cuda.get_current_stream(self.ordinal))

    # -- other frameworks ------------------------------------------------------------------------------------------

    def from_dlpack(self, tensor: Any) -> Any:
        """Return a tensor of another framework that lies on this GPU as a CuPy array over the same memory.

        As DLPack says, what the framework has queued so far comes before what the caller puts onto CuPy's current
        stream. The tensor lives as long as the array.
        """
        with self.cupy_device:
            return cupy.from_dlpack(tensor)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Take another framework's stream as the caller's, on this thread, for the length of a ``with`` block.

        What the runtime does in it comes after what the framework has queued there, and before what it queues next.
        Blocks on different streams come one after the other on the GPU, too: what one has begun, another may go on
        with.

        Args:
            stream: A stream of this GPU that has ``__cuda_stream__``, or ``cuda_stream`` as torch's before 2.10.
        """
        handle = stream_handle(stream)
        with self.cupy_device:
            if handle not in self._foreign:
                self._foreign[handle] = foreign_stream(handle)
            current = self._foreign[handle]
            current.wait_event(self._left)  # gpu-wait: blocks_on_different_streams_follow_each_other
            with current:
                try:
                    yield
                finally:  # not when the next block begins: by then the stream may be gone
                    self._left.record(current)  # gpu-wait: blocks_on_different_streams_follow_each_other

    def synchronize(self) -> None:
        """Wait until what the caller has launched on its current stream is done."""
        # gpu-wait: a_checkpoint_is_of_what_was_written
        self.named_stream("compute").submit(lambda: None, name="synchronize", eager=True).wait()

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, name: str, **options: Any) -> CudaStream:
        """Return a new stream of this device; ``options`` are `CudaStream`'s."""
        self._check_open()
        made = CudaStream(name, self.cupy_device, **{"priority": LANES.get(name, 0), **options})
        self._streams.append(made)
        return made

    def drop(self, stream: CudaStream) -> None:
        """Close a stream of this device, and forget it."""
        if stream in self._streams:
            self._streams.remove(stream)
        stream.close()

    def named_stream(self, name: str) -> CudaStream:
        """Return the device's own stream for one of `LANES`, made when it is first asked for."""
        if name not in LANES:
            raise CallError(f"Expected one of the lanes {', '.join(LANES)}, got {name!r}.")
        with self._making:  # threads that write a checkpoint ask at once
            if name not in self._lanes:
                self._lanes[name] = self.stream(name)
            return self._lanes[name]

    def close(self) -> None:
        """Close every stream of this device, whatever one of them raises. Closing twice is fine.

        Arrays keep their memory.
        """
        self._closed = True
        with contextlib.ExitStack() as last_first:
            for stream in self._streams:
                last_first.callback(self.drop, stream)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"Device {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CudaDevice({self.ordinal}, {'closed' if self._closed else f'{len(self._streams)} streams'})"


def _address(array: Any) -> int:
    address: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return address
