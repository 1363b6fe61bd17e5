"""`FlatBuffer`: one 1-D array under a layout and a placement, and its gathered form.

    placement    at rest                                        gathered
    REPLICATED   the whole, on every rank                       the same memory; after a change all ranges travel once
    SHARDED      my range, beside the others' in one window     that window: nothing moves          (ranks share memory)
    SHARDED      my range                                       wherever the caller says            (ranks do not)

A gather of shared shards meets nobody (decision 0018). Padding stays zero: it belongs to no tensor and never leaves the
buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from zerort.buffer.gatherable import Gatherable
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.errors import CallError, PlanError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["FlatBuffer"]


class FlatBuffer(Gatherable):
    """One 1-D array that the ranks hold together. Every rank makes it at once.

    Args:
        layout: Where each tensor lies.
        partition: Which rank holds which range; of the layout's numel.
        group: The ranks.
        placement: REPLICATED or SHARDED.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
    """

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        group: Group,
        placement: Placement,
        name: str = "",
        traffic: Counter[str] | None = None,
    ) -> None:
        if partition.numel != layout.numel or partition.size != group.size:
            raise CallError(
                f"Expected a partition of {layout.numel} elements over {group.size} ranks, got one of "
                f"{partition.numel} over {partition.size}."
            )
        if placement is Placement.PARTIAL:
            raise PlanError("Expected a buffer of values, REPLICATED or SHARDED; got PARTIAL. Sums grow in buckets.")
        super().__init__(layout, partition, group=group, name=name, traffic=traffic)
        self.placement = placement
        own = partition.of(group.rank).slice
        self._resting: Array | None  # the whole, where it is always there
        if placement is Placement.REPLICATED:
            self._resting = group.empty(layout.numel, self.dtype, name=name)
            self.mine = self._resting[own]
        elif group.one_memory:
            self._resting, self.mine = group.empty_shared(partition.counts, self.dtype, name=name)
        else:
            self._resting, self.mine = None, group.empty(partition.counts[group.rank], self.dtype, name=name)
        self._place = self._resting
        self._whole: Ticket[Array] | None = None if self._resting is None else Done(self._resting)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds at rest: its own range of a window that ranks share, not all of it."""
        return self.layout.nbytes if self.placement is Placement.REPLICATED else self.mine.nbytes

    @property
    def needs_room(self) -> bool:
        """Whether `restore` needs memory to put the whole into."""
        return self._resting is None

    def pack(self, values: Mapping[str, Array]) -> None:
        """Write tensors into this rank's part of the buffer. No communication: call `changed` on all ranks after it.

        Args:
            values: Tensors by name, whole, in the layout's shapes and dtype; others stay as they are.
        """
        first = self.partition.of(self._group.rank).first
        for name, value in values.items():
            extent = self.layout.of(name)
            if tuple(value.shape) != extent.shape or numpy_dtype(value.dtype) != self.dtype:
                raise CallError(
                    f"Expected {name!r} as {self.dtype}{list(extent.shape)}, got {value.dtype}{list(value.shape)}."
                )
            flat = np.ascontiguousarray(value).reshape(-1)  # of the host: values come from there
            begin, end = max(extent.offset, first), min(extent.last, first + self.mine.size)
            if begin < end:
                source = flat[begin - extent.offset : end - extent.offset]
                self._group.device.put(source, out=self.mine[begin - first : end - first])

    def changed(self) -> None:
        """Say that ranks have written to their ranges: copies of the whole elsewhere are out of date.

        Every rank says so. Where ranks share memory, the caller sees to it that all have written before any reads.
        """
        if self.placement is Placement.REPLICATED and self._group.size > 1:
            self._whole = None

    def restore(self, *, out: Array | None = None) -> Ticket[Array]:
        """Return the Ticket of the whole, gathered if it is not there. Every rank calls this.

        Args:
            out: Where the whole goes if the buffer `needs_room`: 1-D, of the layout's numel and dtype.
        """
        if self._whole is None:
            whole = self._place = out if self._resting is None else self._resting
            assert whole is not None, "a buffer that needs room was given none"
            self._whole = self._gather(self.mine, out=whole)
        return self._whole

    def wait(self) -> None:
        """Wait for a gather that is under way: until then other ranks may read this rank's range."""
        if self._whole is not None:
            self._whole.wait()  # gpu-wait: values_are_assigned_behind_a_gather

    def release(self) -> None:
        """Let the gathered form go, if it has memory of its own. Views of it must not be used any more."""
        if self._resting is None:
            self._whole = self._place = None

    def close(self) -> None:
        """Give the memory back."""
        self.release()
        self._group.release_local(self.mine if self._resting is None else self._resting)

    def __repr__(self) -> str:
        return f"FlatBuffer({self.name!r}, {self.placement}, {self.layout.numel} x {self.layout.dtype})"
