"""`RestingParameters`: parameters that rest on a disk, each rank's range in its own store, and are read to be gathered.

    restore(out=…)   start to read this rank's range into its place in the slot     ahead of time; no rank meets another
    spread()         after all ranks have read theirs                               an all_gather, unless they share it

A gather after an update reads what the update writes, in that order: the store keeps the order of reads and writes of
one value, so a gather waits for the write-back of its own section and for no other. It stands in the place of a
`FlatBuffer`, with the same verbs. May import: buffer, comm, device, layout, engine.column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from zerort.buffer import Gatherable
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.engine.column import Column
from zerort.layout import FlatLayout, Partition, Placement
from zerort.typing import Array

__all__ = ["RestingParameters"]


class RestingParameters(Gatherable):
    """One flat buffer of parameters that rests on the ranks' disks.

    Args:
        layout: Where each tensor lies.
        partition: Which rank holds which range.
        column: This rank's range.
        group: The ranks.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
    """

    placement = Placement.SHARDED
    needs_room = True
    nbytes = 0
    """Bytes that this rank holds in memory at rest."""

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        column: Column,
        group: Group,
        name: str,
        traffic: Counter[str] | None = None,
    ) -> None:
        super().__init__(layout, partition, group=group, name=name, traffic=traffic)
        self.column = column
        self._own = partition.of(group.rank)
        self._spread: Ticket[Array] | None = None

    def pack(self, values: Mapping[str, Array]) -> None:
        """Write tensors into this rank's range; see `FlatBuffer.pack`.

        Raises:
            StorageError: The file system refused; on this rank alone.
        """
        for name, value in values.items():
            extent = self.layout.of(name)
            flat = np.ascontiguousarray(value).reshape(-1)
            begin, end = max(extent.offset, self._own.first), min(extent.last, self._own.last)
            if begin < end:
                source = flat[begin - extent.offset : end - extent.offset]
                self.column.write(begin - self._own.first, source).wait()

    def changed(self) -> None:
        """Say that ranks have written to their ranges: nothing is kept that could be out of date."""

    def restore(self, *, out: Array | None = None) -> Ticket[Array]:
        """Start to read this rank's range into its place in ``out``; the Ticket is done when it is there.

        The whole is there when all ranks' ranges are: they meet, and then call `spread`.

        Args:
            out: Where the whole goes: 1-D, of the layout's numel and dtype.
        """
        assert out is not None, "what rests on a disk needs room"
        self._place = out
        return self.column.read(0, out[self._own.slice])

    def spread(self) -> Ticket[Array]:
        """Bring the other ranks' ranges here, which they have read; every rank calls this."""
        if self._group.one_memory:
            self._spread = Done(self.whole)
        else:
            self._spread = self._gather(self.whole[self._own.slice], out=self.whole)
        return self._spread

    def wait(self) -> None:
        """Wait for a gather that is under way."""
        if self._spread is not None:
            self._spread.wait()

    def release(self) -> None:
        """Let the gathered form go. Views of it must not be used any more."""
        self._place = self._spread = None

    def close(self) -> None:
        """Let go; the store's owner closes the store."""
        self.release()

    def __repr__(self) -> str:
        return f"RestingParameters({self.name!r}, {self.layout.numel} x {self.layout.dtype})"
