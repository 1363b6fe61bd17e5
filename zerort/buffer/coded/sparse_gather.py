"""`SparseGather`: the ranks' ranges become the whole by those of their elements that are not zero.

    measure    how many bytes a rank is going to send        told to all after an update, or before the first gather
    start      encode my range ── all_gather of these bytes ──> every rank decodes them all

For parameters that `zr.Sparsity` prunes, between ranks that share no memory. Lossless. A range travels as it is if that
is as short: before anything is pruned, each gather moves as much as a plain one (decision 0178). Host arrays only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zerort.buffer.coded.delta_gather import tell_sizes
from zerort.codec import decode_sparse, encode_sparse, sparse_nbytes
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["SparseGather", "sparse_room_nbytes"]

_ALIGNMENT: Final = 8
"""Bytes that each rank's payload begins at a multiple of."""


def sparse_room_nbytes(counts: Sequence[int], *, width: int) -> int:
    """Return the bytes of all ranks' payloads at their most.

    Args:
        counts: How many elements each rank has.
        width: Bytes of an element.
    """
    return sum(_padded(numel * width) for numel in counts)


@dataclass(frozen=True, slots=True)
class SparseGather:
    """Elements that are not zero travel, and a bitmap of where they are."""

    width: int
    """Bytes of an element."""
    slots: Slots
    """Memory of this rank's own for all ranks' payloads."""
    uncoded: Counter[str]
    """Where bytes are counted that would have moved without it, by collective."""
    needs_base = False

    def room_nbytes(self, partition: Partition) -> int:
        """Return the bytes of all ranks' payloads at their most."""
        return sparse_room_nbytes(partition.counts, width=self.width)

    def moves(self, group: Group) -> bool:
        """Say whether ranks do not share memory."""
        return not group.one_memory

    def measure(self, mine: Array, before: Array) -> int:
        """Return the bytes that this rank will send: those of its range, or fewer."""
        return min(sparse_nbytes(mine), int(mine.nbytes))

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
        """Bring all ranks' ranges to ``out``.

        ``mine`` is only read, and not after this returns. Where ranks share ``out``, all of them write the same there.
        """
        if told is None:
            sizes = [self.measure(mine, mine)]
            (told,) = tell_sizes(group, sizes, name=f"sizes of {name}"[:60], traffic=traffic)
        counts = [_padded(nbytes) for nbytes in told]
        if traffic is not None and group.size > 1:
            traffic["all_gather"] += sum(counts)
            self.uncoded["all_gather"] += (partition.numel - padding) * mine.itemsize
        slot = self.slots.lease(sum(counts))
        payloads, first = [], 0
        for nbytes, count in zip(told, counts, strict=True):
            payloads.append(slot.memory[first : first + nbytes])
            first += count
        begin = sum(counts[: group.rank])
        own = slot.memory[begin : begin + counts[group.rank]]
        sparse = encode_sparse(mine) if told[group.rank] < mine.nbytes else None
        payloads[group.rank][:] = mine.view(np.uint8) if sparse is None else sparse
        arrival = group.all_gather(own, out=slot.memory[:first], counts=counts, name=name, eager=False)

        def decode() -> Array:
            arrival.wait()  # not-gpu: sparsity is refused on GPUs
            for rank, payload in enumerate(payloads):
                place = out[partition.of(rank).slice]
                if payload.size < place.nbytes:
                    decode_sparse(place, payload)
                else:
                    place[:] = payload.view(place.dtype)
            return out

        stream = group.device.named_stream("decode")
        ticket: Ticket[Array] = stream.submit(decode, name=f"decode {name}", eager=arrival.done())
        slot.release(after=ticket)  # not-gpu: sparsity is refused on GPUs
        return ticket


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
