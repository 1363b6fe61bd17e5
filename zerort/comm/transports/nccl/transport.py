"""GPUs that talk over NCCL, on ranks that first agree over the host.

    call over CuPy arrays ── meet on the host: compared, or the same error everywhere ──> NCCL, on the group's stream
    call over NumPy arrays ── all of it on the host

[Note: the host] (decision 0039)
Every NCCL group stands on a host transport of the same ranks, which opened it. There the ranks compare their calls
before any of them enters NCCL, which would hang otherwise; there they hear of each other's failures; and there small
things travel that are on the host anyway, such as agreements and traces.

[Note: order]
One thread of a group enters NCCL, in the order of the calls, and the groups of a GPU take turns in the order of the
program (`device.cuda.order`). A call that waits for its turn is watched like one that is on the GPU: another group's
may never end. A call is over for the host when it is queued; its Ticket is done when the GPU is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from zerort import trace
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import shortened, why_failed
from zerort.comm.transport import Transport
from zerort.comm.transports.nccl.moves import NcclMoves
from zerort.comm.transports.nccl.watch import NcclWatch
from zerort.device.cuda.device import CudaDevice
from zerort.device.cuda.library import cupy
from zerort.device.cuda.order import order_of_nccl
from zerort.device.cuda.stream import CudaStream
from zerort.errors import BootstrapError, CallError, CollectiveError, DeviceError, DeviceMemoryError

__all__ = ["CudaArrays", "NcclTransport"]

T = TypeVar("T")

_CLOSED_WITHIN = 1.0
"""Seconds that the other ranks of a node get to close a group, too; then this one ends its side by an abort."""


class CudaArrays:
    """CuPy arrays on one GPU, as a group knows them.

    Args:
        device: The GPU.
    """

    mark = "gpu:"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.title = f"cupy.ndarray on GPU {device.ordinal}"

    def owns(self, array: Any) -> bool:
        """Say whether ``array`` is CuPy's and lies on this GPU."""
        return self._device.owns(array)

    def empty(self, numel: int, dtype: np.dtype[Any]) -> Any:
        """Return a new array from CuPy's pool: results come and go, and cudaMalloc would stop the GPU each time."""
        return self._device.allocate(numel * dtype.itemsize, lambda: cupy.empty(numel, dtype))


class NcclTransport(Transport):
    """One rank's side of a NCCL communicator.

    Args:
        host: The same ranks on the host; closed with this.
        device: This rank's GPU.
        communicator: CuPy's ``NcclCommunicator`` over the same ranks.
        owns_device: Whether to close the device with this.
        open_part: Opens NCCL among the ranks of a host transport, when this one is split.
    """

    kind = "nccl"
    prefers_equal_counts = True

    def __init__(
        self,
        host: Transport,
        device: CudaDevice,
        communicator: Any,
        *,
        owns_device: bool,
        open_part: Callable[..., Transport],
    ) -> None:
        super().__init__(host.rank, host.size, name=host.name, options=host.options)
        host.serves = self.kind
        self.host = host
        self.device: CudaDevice = device
        self.device_arrays = CudaArrays(device)
        self.flights = host.flights  # one record: the host's errors name it
        self.standing = host.standing
        self.runs_on = "caller" if host.runs_on == "caller" else "own thread"
        self._owns_device = owns_device
        self._open_part = open_part
        self._stream: CudaStream | None = None
        self._moves = NcclMoves(communicator, host.rank)
        self._watch = NcclWatch(
            communicator,
            device.cupy_device,
            title=self.title,
            rank=self.rank,
            timeout=self.options.timeout,
            trouble=host.peer_failure,
            on_break=self._break,
        )

    @property
    def one_host(self) -> bool:
        """Whether the ranks share their host's memory."""
        return self.host.one_memory

    def open_stream(self) -> CudaStream:
        """Return a stream of the GPU, ahead of others: what it carries, other ranks wait for."""
        self._stream = self.device.stream(
            f"comm {self.name}",
            priority=-1,
            helping=False,
            trouble=self._look,
            # gpu-wait: a_group_of_parts_works_beside_its_whole [order_of_nccl(self.device.ordinal) -> None]
            order=order_of_nccl(self.device.ordinal),
        )
        return self._stream

    # -- calls -----------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Do a call over CuPy arrays here, one over NumPy arrays on the host."""
        assert self._stream is not None
        with self._watch.line(call.locate()):
            self._stream.take_turn()  # gpu-wait: a_group_of_parts_works_beside_its_whole
        if call.where:
            super().run(call)
        else:
            self._on_host(lambda: self.host.run(call))

    def meet(self, call: Call) -> None:
        """Compare the calls on the host, which need not know where the arrays lie."""
        without_arrays = dataclasses.replace(call, source=None, out=None, result=None, geometry=None, places=None)
        self._on_host(lambda: self.host.meet(without_arrays))

    def move(self, call: Call) -> None:
        """Queue what the geometry says."""
        with self._entry(call):
            self._moves.move(call)

    def all_reduce(self, call: Call) -> None:
        """Queue an all-reduce."""
        with self._entry(call):
            self._moves.all_reduce(call)

    @contextlib.contextmanager
    def _entry(self, call: Call) -> Iterator[None]:
        with self._watch.entry(call.locate()):
            yield
        if trace.is_enabled():
            # So that its span is as long as the call, not as its queueing.
            cupy.cuda.get_current_stream().synchronize()  # gpu-wait: spans_are_as_long_as_their_calls

    def _on_host(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except CollectiveError:
            if self.host.broken is not None:
                self.broken = self.host.broken
                self._watch.abort()
            raise

    # -- failures --------------------------------------------------------------------------------------------------

    def fail(self, call: Call, error: BaseException) -> None:
        """Break the group because of an error that only this rank knows of, and free the GPU."""
        super().fail(call, error)
        self._watch.abort()

    def announce_failure(self, why: str) -> None:
        """Tell the others on the host."""
        self.host.announce_failure(why)

    def _look(self) -> CollectiveError | None:
        if self.host.runs_on == "caller":
            self.host.peer_failure()  # the watch's thread may not listen to MPI: it knows what the waiting one heard
        return self.broken if self.broken is not None else self._watch.look()

    def _break(self, error: CollectiveError) -> None:
        if self.broken is not None:
            return
        # Told before anyone here can see it and close the group: the others would only find this rank gone.
        self.announce_failure(why_failed(Call(op="watch", site="the GPU"), error))
        self.flights.dump(self.options.flight_dir, rank=self.rank, reason="a call did not end on the GPU")
        self.broken = error

    # -- the rest, which the host does ---------------------------------------------------------------------------------

    def exchange_texts(self, text: str) -> list[str]:
        """Exchange texts on the host."""
        return self._on_host(lambda: self.host.exchange_texts(text))

    def allocate(self, nbytes: int) -> Any:
        """Return memory of the GPU's, zeroed; if one rank's GPU has not enough, no rank gets any."""
        made, story = None, ""
        try:
            made = self.device.empty(nbytes, "uint8")
            made.fill(0)
        except DeviceMemoryError as error:
            story = f"{error} (rank {self.rank})"
        stories = [text for text in self.exchange_texts(story) if text]
        if stories:
            del made  # whoever looks at the error must not hold the memory
            raise DeviceMemoryError(stories[0])
        return made

    allocate_shared = allocate

    def window_of(self, array: Any) -> int:
        """Return 0: what lies on a GPU is in no window. Refuses what is not from here."""
        if not self.device_arrays or not self.device_arrays.owns(array):
            raise CallError("free: Expected an array from this group's zeros or zeros_shared, got one from elsewhere.")
        return 0

    def split(self, color: int | None, *, key: int, name: str) -> Transport | None:
        """Split the ranks on the host, and open NCCL anew among those of a color.

        Raises:
            BootstrapError: NCCL cannot be opened for one color; on every rank, whatever its color.
        """
        part = self._on_host(lambda: self.host.split(color, key=key, name=name))
        opened, story = None, ""
        if part is not None:
            try:
                opened = self._open_part(part, self.device, owns_device=False)
            except BaseException as error:
                part.close()
                if not isinstance(error, (BootstrapError, CollectiveError, DeviceError)):
                    raise
                story = f"{shortened(error)} of {name!r}"
        stories = [text for text in self.exchange_texts(story) if text]
        if stories:
            if opened is not None:
                opened.close()
            raise BootstrapError(
                f"Expected NCCL in every part that {self.title} is split into, got: {stories[0]}. "
                "The group itself is as it was."
            )
        return opened

    def share_standing(self, standing: Standing) -> None:
        """Have the host tell it."""
        super().share_standing(standing)
        self.host.share_standing(standing)

    def end(self) -> None:
        """Leave, because the process ends: NCCL must not outlive MPI, and cannot wait for anyone.

        The host's part first: a thread that waits there for others comes back, and finds the way into NCCL shut.
        """
        self.host.end()
        self._watch.end()

    def close(self) -> None:
        """End the communicator, then close the stream, the host's side, and the device if this group owns it.

        Each is closed, whatever those before it raise. NCCL destroys a communicator when all ranks of a node ask for
        it, and waits until then. So they meet on the host first, for a moment; an abort waits for nobody.
        """
        self.host.in_use = self.in_use
        with contextlib.ExitStack() as last_first:
            if self._owns_device:
                last_first.callback(self.device.close)
            last_first.callback(self.host.close)
            if self._stream is not None:
                last_first.callback(self.device.drop, self._stream)
            last_first.callback(self._end_communicator)

    def _end_communicator(self) -> None:
        # gpu-wait: a_rank_that_closes_alone [-> self.broken is None]
        if self.broken is None and self.host.all_leave(within=_CLOSED_WITHIN):
            self._watch.close()
        else:
            self._watch.abort()

    def details(self) -> str:
        """Say which GPU it is, and how the ranks agree."""
        return f"{self.device.name}; agreed over {self.host.kind}"
