"""`DeltaGather`: the ranks' ranges become the whole by what has changed of them since it was last made.

    measure    how many bytes a rank is going to send        told to all before anything is sent
    start      encode what differs from the whole ── all_gather of these bytes ──> apply them all to the whole

The whole of before is the base, the same bits on every rank, and values are absolute: whatever ranges hold now, the
result is what they hold. So nothing makes a base invalid: not an assignment, a load or another cut (decision 0140).
Host arrays only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zerort.codec import DeltaSize, apply_delta, delta_nbytes, encode_delta, measure_delta
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["DeltaGather", "delta_room_nbytes", "tell_sizes"]

_WIDTH: Final = 2
"""Bytes of an element: parameters of 16 bits."""
_ALIGNMENT: Final = 8
"""Bytes that each rank's delta begins at a multiple of."""


def delta_room_nbytes(counts: Sequence[int]) -> int:
    """Return the bytes of all ranks' deltas at their most, given how many elements each rank has."""
    return sum(_padded(delta_nbytes(numel, _WIDTH)) for numel in counts if numel)


def tell_sizes(group: Group, sizes: Sequence[int], *, name: str, traffic: Counter[str] | None) -> list[list[int]]:
    """Tell all ranks how many bytes this one is going to send of each of several arrays. Every rank calls this.

    Returns:
        For each array, what every rank sends.
    """
    if traffic is not None and group.size > 1:
        traffic["all_gather"] += 8 * len(sizes) * group.size
    # not-gpu: deltas are refused on GPUs
    told = group.all_gather(np.array(sizes, np.int64), name=name).wait()
    found: list[list[int]] = told.reshape(group.size, -1).T.tolist()
    return found


@dataclass(slots=True)
class DeltaGather:
    """What has changed of the ranges travels. One for each array: it notes what was measured of it."""

    slots: Slots
    """Memory of this rank's own for all ranks' deltas."""
    uncoded: Counter[str]
    """Where bytes are counted that would have moved without it, by collective."""
    _size: DeltaSize | None = None
    needs_base = True

    def room_nbytes(self, partition: Partition) -> int:
        """Return the bytes of all ranks' deltas at their most."""
        return delta_room_nbytes(partition.counts)

    def moves(self, group: Group) -> bool:
        """Say that they move: the whole is apart from ranges, which are compared with it."""
        return True

    def measure(self, mine: Array, before: Array) -> int:
        """Return the bytes that this rank will send; 0: nothing has changed."""
        self._size = measure_delta(before, mine)
        return self._size.nbytes if self._size.changed else 0

    def start(
        self,
        group: Group,
        mine: Array,
        *,
        out: Array,
        partition: Partition,
        name: str,
        padding: int,
        traffic: Counter[str] | None,
        told: Sequence[int] | None = None,
        brought: Ticket[Any] | None = None,
    ) -> Ticket[Array]:
        """Make ``out``, which holds the whole of before, what all ranks' ranges are now.

        ``mine`` is only read, and not after this returns. Where ranks share ``out``, all of them write the same there,
        once each has compared its range with it.
        """
        before = out[partition.of(group.rank).slice]
        if told is None:
            (told,) = tell_sizes(group, [self.measure(mine, before)], name=f"changes of {name}"[:60], traffic=traffic)
        counts = [_padded(nbytes) for nbytes in told]
        if traffic is not None and group.size > 1:
            traffic["all_gather"] += sum(counts)
            self.uncoded["all_gather"] += (partition.numel - padding) * mine.itemsize
        if not any(told):
            return Done(out)
        with self.slots.lease(sum(counts)).returned_on_error() as slot:
            payloads, first = [], 0
            for count in counts:
                payloads.append(slot.memory[first : first + count])
                first += count
            own = payloads[group.rank]
            if own.size:
                encode_delta(before, mine, size=self._size, out=own[: told[group.rank]])
            slot.busy = arrival = group.all_gather(own, out=slot.memory[:first], counts=counts, name=name, eager=False)

            def apply() -> Array:
                arrival.wait()  # not-gpu: deltas are refused on GPUs
                for rank, payload in enumerate(payloads):
                    if payload.size:
                        apply_delta(out[partition.of(rank).slice], payload[: told[rank]])
                return out

            stream = group.device.named_stream("decode")
            ticket: Ticket[Array] = stream.submit(apply, name=f"apply changes of {name}", eager=arrival.done())
            slot.release(after=ticket)  # not-gpu: deltas are refused on GPUs
        return ticket


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
