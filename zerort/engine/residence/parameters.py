"""`Parameters`: one flat buffer of parameters, from each rank's range to the whole and back.

    start(out=…)     begin to bring ranges to where the whole will be    may run ahead, in the same order on every rank
    local_error()    a read error of this rank's disk                    all ranks compare theirs before they go on
    finish()         the Ticket of the whole                             every rank calls this
    release()        let the whole go

    placement    at rest, on each rank                     what makes the whole of it
    REPLICATED   the whole                                 nothing; after a change all ranges travel (replicated.py)
    SHARDED      its range, in a window of all ranks       nothing: the window is the whole (sharded.py, decision 0018)
    SHARDED      its range, where computing happens        an all_gather to ``out``
    SHARDED      its range, and the whole on each host     nothing; after a change all ranges travel once (copied.py)
    SHARDED      its range, on the host of a GPU           a copy to its place in ``out``, then an all_gather in place
    SHARDED      its range, on a disk                      a read to its place in ``out``; once no rank has an error,
                                                           an all_gather in place, unless ranks share ``out``
    either       blocks of codes, if it is frozen          decoded to ``out``: `coded_parameters.py`

An all_gather moves ranges as they are, or as codes (`RangeGather`); a coded one has no window: the whole is decoded.

Decisions 0028 and 0093 say why reads are apart from the gather. `backings.py` makes parameters; their contract is
`zerort.testing.contracts.residence`. Padding stays zero and never leaves here. Next in reading order: `model/unit.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from zerort.buffer import PLAIN, RangeGather
from zerort.codec import BlockRows
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.decoded_array import DecodedArray
from zerort.errors import CallError, StorageError, UnitStateError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["Parameters"]


class Parameters(ABC):
    """One 1-D array that the ranks hold together. Every rank makes it at once.

    Args:
        layout: Where each tensor lies.
        partition: Which rank holds which range; of the layout's numel.
        array: What this rank holds of it.
        group: The ranks.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
        gather: How ranges become the whole.
    """

    placement: Placement
    rows: BlockRows | None = None
    """The blocks that it rests in; None: elements as they are computed with."""
    writes_alone = False
    """Whether `start` writes into its room before it has met the other ranks; the same on every rank."""
    is_gathered_apart = False
    """Whether its room is this rank's own, where ranks share memory, too."""
    is_copied_out = False
    """Whether who asks for the whole gets a copy of it, where it is at rest, too (`ShardedParameters.hold`)."""

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        array: ChunkedArray,
        group: Group,
        name: str = "",
        traffic: Counter[str] | None = None,
        gather: RangeGather = PLAIN,
    ) -> None:
        if partition.numel != layout.numel or partition.size != group.size:
            raise CallError(
                f"Expected a partition of {layout.numel} elements over {group.size} ranks, got one of "
                f"{partition.numel} over {partition.size}."
            )
        self.layout, self.partition = layout, partition
        self.array = array
        """What this rank holds: the whole, or its range."""
        self.stored_layout, self.stored_partition = layout, partition
        """The same in what `array` consists of: elements, or bytes of blocks."""
        self.name = name
        self.dtype = numpy_dtype(layout.dtype)
        self._group = group
        self._own = partition.of(group.rank)
        self._traffic = traffic
        self._gathers = gather
        self._place: Array | None = None  # of the whole
        self._whole: Ticket[Array] | None = None  # once its gather has begun

    @property
    @abstractmethod
    def shard(self) -> ChunkedArray:
        """This rank's range."""

    @property
    @abstractmethod
    def needs_room(self) -> bool:
        """Whether `start` needs memory to put the whole into; the same on every rank."""

    @property
    def is_resident(self) -> bool:
        """Whether the whole is always there, at one address: no gather of it begins when somebody asks for it."""
        return not (self.needs_room or self.is_copied_out)

    @property
    def host_copy(self) -> Array | None:
        """A copy of the whole that stays on this host, beside what this rank holds at rest; None: there is none."""
        return None

    @property
    def base(self) -> Array | None:
        """The copy, if it is part of the state of a run: what gathers add differences to. None: any copy would do."""
        return None

    @property
    def is_copy_current(self) -> bool:
        """Whether the copy holds what ranges are, as far as gathers tell it."""
        return False

    def take_current(self) -> None:  # noqa: B027 (most have no copy)
        """Say that the copy is what ranges have to bring there. Every rank says so."""

    @property
    @abstractmethod
    def can_fail(self) -> bool:
        """Whether ranks compare `local_error` before `finish`: they read from disks. The same on every rank."""

    @property
    def can_gather_apart(self) -> bool:
        """Whether any rank can gather it at any time, beside `start` (`model/apart.py`); the same on every rank."""
        return False

    @property
    @abstractmethod
    def at_rest(self) -> Array | None:
        """All that the ranks hold, as it rests, if this rank reaches it: by itself, or in memory that they share."""

    @property
    def width(self) -> Fraction:
        """Bytes per element at rest."""
        return Fraction(self.dtype.itemsize) if self.rows is None else self.rows.width

    @property
    def room_nbytes(self) -> int:
        """Bytes of memory that `start` needs, if it needs some."""
        return self.layout.nbytes

    @property
    def elements(self) -> ChunkedArray | DecodedArray:
        """This rank's range as elements, to be read between steps."""
        return self.shard

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds in memory at rest: its own range of a window that ranks share, not all of it."""
        return int(self.array.memory.nbytes)

    @property
    def host_copy_nbytes(self) -> int:
        """Bytes of the copy, which ranks of a host may share."""
        return 0 if self.host_copy is None else int(self.host_copy.nbytes)

    # -- the whole -------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, out: Array | None = None) -> Ticket[Any]:
        """Begin to make the whole, unless it is there or begun; done when what this rank has begun so far is.

        It may run ahead of its use. Every rank calls this, in the same order: it may begin a collective. It never waits
        for a disk.

        Args:
            out: Where the whole goes if it `needs_room`: 1-D, contiguous, `room_nbytes` bytes of any dtype.
        """

    def local_error(self) -> StorageError | None:
        """Wait for what `start` reads from a disk, and return what went wrong, on this rank alone."""
        return None

    @abstractmethod
    def finish(self) -> Ticket[Array]:
        """Return the Ticket of the whole, after `start`. Every rank calls this, once no rank has a `local_error`."""

    @property
    def whole(self) -> Array:
        """Where the whole is, or will be when it is gathered: 1-D."""
        if self._place is None:
            raise UnitStateError(f"Expected {self.name!r} to be gathered before it is looked at. Start it first.")
        return self._place

    def view(self, name: str) -> Array:
        """Return one tensor of the whole in place; its values come with the gather. NumPy's are read-only."""
        extent = self.layout.of(name)
        found = self.whole[extent.slice].reshape(extent.shape)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    def wait(self) -> None:
        """Wait for a gather that is under way: until then other ranks may read this rank's range."""
        if self._whole is not None:
            self._whole.wait()  # gpu-wait: values_are_assigned_behind_a_gather

    @abstractmethod
    def release(self) -> None:
        """Let the whole go, if it is apart from what rests. Views of it must not be used any more."""

    def _gather(
        self,
        mine: Array,
        *,
        out: Array,
        told: Sequence[int] | None = None,
        brought: Ticket[Any] | None = None,
    ) -> Ticket[Array]:
        """Bring all ranks' ranges to ``out``; every rank calls this. The others: see `RangeGather.start`."""
        return self._gathers.start(
            self._group,
            mine,
            out=out,
            partition=self.partition,
            name=self.name,
            padding=self.layout.numel - self.layout.end,
            traffic=self._traffic,
            told=told,
            brought=brought,
        )

    # -- new values ------------------------------------------------------------------------------------------------

    @abstractmethod
    def assign(self, values: Mapping[str, Array]) -> None:
        """Write tensors of the host into what this rank holds, while no gather is under way. No communication.

        Args:
            values: Tensors by name, whole, in the layout's shapes and dtype; others stay as they are.

        Raises:
            StorageError: The file system refused; on this rank alone.
        """

    def _flat(self, name: str, value: Array) -> Array:
        """Return a tensor as 1-D, if it is as the layout says."""
        extent = self.layout.of(name)
        if tuple(value.shape) != extent.shape or numpy_dtype(value.dtype) != self.dtype:
            raise CallError(
                f"Expected {name!r} as {self.dtype}{list(extent.shape)}, got {value.dtype}{list(value.shape)}."
            )
        return np.ascontiguousarray(value).reshape(-1)  # of the host: values come from there

    @abstractmethod
    def changed(self) -> None:
        """Say that ranks have written to their ranges: copies of the whole elsewhere are out of date.

        Every rank says so. Where ranks share memory, the caller sees to it that all have written before any reads.
        """

    def refresh(self) -> Ticket[Any]:
        """Bring ranges that ranks have written since `changed` to all who hold the whole. Every rank calls this."""
        return Done(None) if self.at_rest is None else self.start()

    def measure(self) -> int | None:
        """Return the bytes that this rank is going to send of what has changed; None: nobody has to be told."""
        return None

    def expect(self, told: Sequence[int]) -> None:  # noqa: B027 (most have nobody to tell)
        """Note what all ranks have measured."""

    @abstractmethod
    def updated(self, written: Sequence[Ticket[Any]]) -> None:
        """Order the next gather after ``written``: the copies of updated chunks back to the tier that they rest in."""

    def close(self) -> None:
        """Give the memory back that came from the group; that of a host or a store is closed by its owner."""
        self.release()

    def close_range(self) -> None:
        """Give back what another cut of the same values does not share with this one, whose whole is not at rest."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.layout.numel} x {self.layout.dtype})"
