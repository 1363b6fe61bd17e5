"""`CodedParameters`: frozen parameters that rest as blocks of codes, and are decoded whenever they are gathered.

    at rest, on each rank                what makes the whole of it
    all codes, or in a window            each rank decodes its range into ``out``, which they share, then they meet;
                                         where they do not share it, all of them
    its range, where computing happens   an all_gather of codes behind the whole, then all are decoded
    its range, on the host of a GPU      a copy to its place among these, then the same
    its range, on a disk                 a read of codes to their place there; once no rank has an error, as above

Codes are those of whole tensors, whoever holds which part of them: every rank computes with the same values, on any
number of ranks (decision 0150). On GPUs they are decoded by a kernel, on a stream of its own (decision 0175).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from zerort.buffer import PLAIN
from zerort.codec import BlockRows
from zerort.device import Done, Ticket, joined
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.decoded_array import DecodedArray
from zerort.engine.residence.parameters import Parameters
from zerort.errors import StorageError
from zerort.layout import Placement, Range
from zerort.layout.blocks import layout_of_blocks
from zerort.typing import Array

__all__ = ["CodedParameters"]

_TOGETHER: Final = 1 << 20
"""Elements that are encoded before they are written, a multiple of every block."""


class CodedParameters(Parameters):
    """Parameters that rest as blocks. ``array`` is the bytes of this rank's range, or all; others as in `Parameters`.

    Args:
        rows: The blocks.
        placement: REPLICATED or SHARDED.
        window: All ranks' bytes, if they are in one memory.
        uncoded: Where bytes are counted that would have moved as elements, by collective.
    """

    needs_room = True

    def __init__(
        self,
        *args: Any,
        rows: BlockRows,
        placement: Placement,
        window: Array | None = None,
        uncoded: Counter[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rows: BlockRows = rows
        self.placement = placement
        self.stored_layout, self.stored_partition = layout_of_blocks(self.layout, self.partition, rows)
        self._codes: Array | None = self.array.memory if placement is Placement.REPLICATED else window
        self.writes_alone = self._codes is not None
        self._uncoded = uncoded
        self._begun: Ticket[Any] | None = None
        self._arriving: Array | None = None  # codes that are brought here
        self._is_stale = False

    @property
    def shard(self) -> ChunkedArray:
        """The bytes of this rank's range."""
        if self.placement is Placement.SHARDED:
            return self.array
        own = self.stored_partition.of(self._group.rank)
        return self.array.resident_range(own.first, own.stop)

    @property
    def elements(self) -> DecodedArray:
        """This rank's range, decoded as it is read."""
        return DecodedArray(self.shard, self.rows, dtype=self.dtype, size=self._own.numel)

    @property
    def at_rest(self) -> Array | None:
        """All ranks' codes."""
        return self._codes

    @property
    def can_fail(self) -> bool:
        """Whether codes are read from a disk."""
        return self.array.is_stored

    @property
    def room_nbytes(self) -> int:
        """Bytes of the whole, and of the codes that are brought here to be decoded."""
        return self.layout.nbytes + (self.stored_layout.numel if self._codes is None else 0)

    # -- the whole -------------------------------------------------------------------------------------------------

    def start(self, out: Array | None = None) -> Ticket[Any]:
        """Begin to decode what is in reach, to gather codes that are not, or to read this rank's from a disk."""
        if self._begun is not None:
            return self._begun
        assert out is not None, "parameters that are decoded were given no room"
        octets = out.view(np.uint8)
        self._place = octets[: self.layout.nbytes].view(self.dtype)
        if self._codes is not None:
            self._begun = self._whole = self._decode(self._codes)
            return self._begun
        self._arriving = octets[self.layout.nbytes : self.room_nbytes]
        mine = self._arriving[self._own_bytes]
        if self.can_fail:
            self._begun = self.array.read(0, mine)
        elif self.array.in_reach:
            self._begun = self._whole = self._decode(self._arriving, arrival=self._gather_codes(self.array.memory))
        else:
            self._group.after(self.array.read(0, mine))  # gpu-wait: frozen_codes_rest_where_the_plan_says
            self._begun = self._whole = self._decode(self._arriving, arrival=self._gather_codes(mine))
        return self._begun

    def local_error(self) -> StorageError | None:
        """Wait for codes that are read from a disk, and return what went wrong."""
        if self.can_fail and self._begun is not None:
            try:
                self._begun.wait()  # gpu-wait: frozen_codes_rest_where_the_plan_says
            except StorageError as error:
                return error
        return None

    def finish(self) -> Ticket[Array]:
        """Return the Ticket of the whole: codes that all have read are gathered, unless ranks decode their own."""
        if self._whole is None:
            assert self._arriving is not None, "finished before it was started"
            arrival = None if self._group.one_memory else self._gather_codes(self._arriving[self._own_bytes])
            self._whole = self._decode(self._arriving, arrival=arrival)
        return self._whole

    @property
    def _own_bytes(self) -> slice:
        return self.stored_partition.of(self._group.rank).slice

    def _gather_codes(self, mine: Array) -> Ticket[Array]:
        """Bring all ranks' codes behind the whole; every rank calls this."""
        assert self._arriving is not None
        if self._uncoded is not None and self._group.size > 1:
            self._uncoded["all_gather"] += self.layout.end * self.dtype.itemsize
        return self._gather_stored(mine, out=self._arriving)

    def _gather_stored(self, mine: Array, *, out: Array) -> Ticket[Array]:
        return PLAIN.start(
            self._group,
            mine,
            out=out,
            partition=self.stored_partition,
            name=self.name,
            padding=self.stored_layout.numel - self.rows.nbytes_of(self.layout.end),
            traffic=self._traffic,
        )

    def _decode(self, codes: Array, *, arrival: Ticket[Any] | None = None) -> Ticket[Array]:
        """Decode all ranks' codes, or this rank's where the others decode theirs into the same memory."""
        group, whole = self._group, self._place
        assert whole is not None
        part = self._own if group.one_memory else Range(0, self.layout.numel)

        def decode() -> Array:
            if arrival is not None:
                group.device.order_after(arrival)  # gpu-wait: frozen_codes_rest_where_the_plan_says
            self.rows.decode(whole[part.slice], codes[self.rows.bytes_of(part.slice)])
            return whole

        is_ready = arrival is None or arrival.done()
        stream = group.device.named_stream("decode")
        ticket: Ticket[Array] = stream.submit(decode, name=f"decode {self.name}", eager=is_ready)
        if group.size == 1 or not group.one_memory:
            return ticket
        group.after(ticket)  # not-gpu: GPUs share no memory
        return joined([ticket, group.barrier(name=f"decode {self.name}"[:60])], result=whole)

    def release(self) -> None:
        """Let the decoded whole go."""
        self._place = self._arriving = None
        self._begun = self._whole = None

    # -- new values ------------------------------------------------------------------------------------------------

    def assign(self, values: Mapping[str, Array]) -> None:
        """Encode tensors, as far as this rank holds them: all of each, or what lies in its range."""
        held = self._own if self.placement is Placement.SHARDED else Range(0, self.layout.numel)
        for name, value in values.items():
            extent, flat = self.layout.of(name), self._flat(name, value)
            begin, end = max(extent.offset, held.first), min(extent.stop, held.stop)
            for first in range(begin, end, _TOGETHER):
                last = min(first + _TOGETHER, end)
                rows = np.empty(self.rows.nbytes_of(last - first), np.uint8)
                self.rows.encode(rows, flat[first - extent.offset : last - extent.offset])
                self.array.put(self.rows.nbytes_of(first - held.first), rows)

    def changed(self) -> None:
        """Say that ranks have written to their ranges: `refresh` lets them travel, if all hold all of them."""
        self._is_stale = self.placement is Placement.REPLICATED and self._group.size > 1

    def refresh(self) -> Ticket[Any]:
        """Bring codes that ranks have written to all who hold all of them."""
        if not self._is_stale:
            return Done(None)
        self._is_stale = False
        return self._gather_stored(self.shard.memory, out=self.array.memory)

    def updated(self, written: Sequence[Ticket[Any]]) -> None:
        """Note nothing: no update changes what is frozen."""

    def close(self) -> None:
        """Give the memory back that came from the group."""
        self.release()
        if self.array.in_reach:
            self._group.release_local(self.array.memory if self._codes is None else self._codes)
