"""`HostParameters`: parameters that rest in pinned host memory, each rank's range, and are gathered on GPUs.

    restore(out=…)   this rank's range to its place in the slot ── by event ──> an all_gather in place

The host waits for neither. It stands in the place of a `FlatBuffer`, with the same verbs. May import: buffer, comm,
device, layout, engine.column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from zerort.buffer import Gatherable
from zerort.comm import Group
from zerort.device import Done, Ticket, joined
from zerort.engine.column import Column
from zerort.layout import FlatLayout, Partition, Placement
from zerort.typing import Array

__all__ = ["HostParameters"]


class HostParameters(Gatherable):
    """One flat buffer of parameters that rests on the host while computing happens on GPUs.

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
        self.written: Ticket[None] = Done(None)
        """Done when the last update is in the host's memory."""
        self._own = partition.of(group.rank)
        self._whole: Ticket[Array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds at rest, on the host."""
        return self.column.memory.nbytes

    def pack(self, values: Mapping[str, Array]) -> None:
        """Write tensors into this rank's range, once the last update is there; see `FlatBuffer.pack`."""
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
        """Return the Ticket of the whole. Every rank calls this.

        Args:
            out: Where it goes: 1-D, on the GPU, of the layout's numel and dtype.
        """
        if self._whole is None:
            assert out is not None, "what rests on the host needs room"
            self._place = out
            mine = out[self._own.slice]
            if not self.written.done():
                self.written.on(self._group.device.lane("copy in"))
            here = self.column.read(0, mine)
            self._group.after(here)
            self._whole = joined([here, self._gather(mine, out=out)], result=out)
        return self._whole

    def wait(self) -> None:
        """Wait for a gather that is under way."""
        if self._whole is not None:
            self._whole.wait()

    def release(self) -> None:
        """Let the gathered form go. Views of it must not be used any more."""
        self._whole = self._place = None

    def close(self) -> None:
        """Let go; the host memory's owner closes that, once no copy is under way."""
        self.release()

    def __repr__(self) -> str:
        return f"HostParameters({self.name!r}, {self.layout.numel} x {self.layout.dtype})"
