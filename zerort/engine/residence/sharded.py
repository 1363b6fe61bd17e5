"""`ShardedParameters`: each rank's range, in its memory, on the host of its GPU or on a disk; the whole is gathered.

The table in `parameters.py` says what makes the whole of each. Reads of a disk are apart from the gather (decisions
0028, 0093), so that no rank gathers what another could not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerort.buffer import PLAIN
from zerort.device import Done, Ticket, joined
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.parameters import Parameters
from zerort.errors import StorageError
from zerort.layout import Placement
from zerort.typing import Array

__all__ = ["ShardedParameters"]


class ShardedParameters(Parameters):
    """Each rank's range, wherever it rests. ``array`` is that range; the other arguments are those of `Parameters`.

    Args:
        window: All ranks' ranges, if they are in one memory: the whole, without a gather.
    """

    placement = Placement.SHARDED

    def __init__(self, *args: Any, window: Array | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window = window
        self._begun: Ticket[Any] | None = None
        self._told: Sequence[int] | None = None  # what each rank sends of its range, if that depends on its values
        self._written: Ticket[None] = Done(None)  # the last update is in the host's memory
        self.release()

    @property
    def shard(self) -> ChunkedArray:
        """This rank's range."""
        return self.array

    @property
    def at_rest(self) -> Array | None:
        """The window."""
        return self._window

    @property
    def needs_room(self) -> bool:
        """Whether the whole is not there at rest."""
        return self._window is None

    @property
    def can_fail(self) -> bool:
        """Whether it is read from a disk."""
        return self.array.is_stored

    @property
    def can_gather_apart(self) -> bool:
        """Whether ranges of the host, or of its disk, travel as they are."""
        return self.needs_room and self._gathers is PLAIN and self._group.device.in_host_memory

    def start(self, out: Array | None = None) -> Ticket[Any]:
        """Begin to gather what is in memory; begin to read this rank's range of what is on a disk."""
        if self._begun is not None:
            return self._begun
        assert out is not None, "parameters that need room were given none"
        self._place = out = out.view(self.dtype)
        if self.array.in_reach:
            self._begun = self._whole = self._gather(self.array.memory, out=out, told=self._told)
        elif self.can_fail:
            self._begun = self.array.read(0, out[self._own.slice])
        else:
            self._begun = self._whole = self._gather_from_host(out)
        return self._begun

    def _gather_from_host(self, out: Array) -> Ticket[Array]:
        """Copy this rank's range to its place and gather there. The host waits for neither."""
        mine = out[self._own.slice]
        if not self._written.done():
            # gpu-wait: an_update_is_the_same_on_either_side
            self._written.on(self._group.device.named_stream("copy in"))
        here = self.array.read(0, mine)
        return joined([here, self._gather(mine, out=out, brought=here)], result=out)

    def hold(self, whole: Array) -> None:
        """Have a whole that was gathered by other means, until `release`: 1-D."""
        self._place = whole
        self._begun = self._whole = Done(whole)

    def local_error(self) -> StorageError | None:
        """Wait for this rank's range, if it is read from a disk, and return what went wrong."""
        if self.can_fail and self._begun is not None:
            try:
                self._begun.wait()  # gpu-wait: no_order_of_streams_changes_a_walk
            except StorageError as error:
                return error
        return None

    def finish(self) -> Ticket[Array]:
        """Return the Ticket of the whole: what all have read is gathered, unless they have read it into one memory."""
        if self._whole is None:
            assert self._begun is not None, "finished before it was started"
            if self.is_gathered_apart or self._gathers.moves(self._group):
                self._whole = self._gather(self.whole[self._own.slice], out=self.whole)
            else:
                self._whole = Done(self.whole)
        return self._whole

    def release(self) -> None:
        """Let the whole go, unless it is the window."""
        self._place = self._window
        self._begun = self._whole = None if self._window is None else Done(self._window)

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write tensors, as far as they are in this rank's range."""
        self._told = None
        for name, value in values.items():
            extent, flat = self.layout.of(name), self._flat(name, value)
            begin, end = max(extent.offset, self._own.first), min(extent.stop, self._own.stop)
            if begin < end:
                self.array.put(begin - self._own.first, flat[begin - extent.offset : end - extent.offset])

    def changed(self) -> None:
        """Forget what was told of them: no copy of the whole outlives its release, and a window is the ranges."""
        self._told = None

    def measure(self) -> int | None:
        """Return how many bytes this rank is going to send, if the others have to be told."""
        return self._gathers.measure(self.array.memory, self.array.memory)

    def expect(self, told: Sequence[int]) -> None:
        """Note what every rank is going to send."""
        self._told = told

    def updated(self, written: Sequence[Ticket[Any]]) -> None:
        """Note when an update is back in the memory of a GPU's host: the next gather waits for that and no more."""
        if not (self.array.in_reach or self.array.is_stored):
            self._written = joined(written, result=None)  # gpu-wait: an_update_is_the_same_on_either_side

    def close(self) -> None:
        """Give the memory back that came from the group."""
        self.release()
        if self.array.in_reach:
            self._group.release_local(self.array.memory if self._window is None else self._window)
