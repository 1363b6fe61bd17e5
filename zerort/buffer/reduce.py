"""`CodedReduce`: sums over ranks of what travels as codes.

    encode each rank's range ── all_to_all of codes ──> decode what came from every sender, sum it in rank order

Codes are not added on the way: each summand is rounded once, by its sender, and the sum is made in float32, also of
gradients of 16 bits. NaN and infinity are decoded as such, in their places (decision 0127).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerort.codec import Format
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["CodedReduce", "sent_nbytes"]


def sent_nbytes(format: Format, counts: Sequence[int], rank: int) -> int:
    """Return the bytes of the codes that a rank sends and gets, given the elements of each rank's range."""
    return sum(map(format.nbytes, counts)) + len(counts) * format.nbytes(counts[rank])


@dataclass(frozen=True, slots=True)
class CodedReduce:
    """A reduce_scatter whose summands travel as codes."""

    format: Format
    """What they travel as."""
    slots: Slots
    """Memory of this rank's own for the codes that it sends and gets."""
    residual: Array | None
    """What coding has lost of gradients so far, which is added to the next: the whole, bfloat16; None: it is not."""
    uncoded: Counter[str]
    """Where bytes are counted that would have moved without it, by collective."""
    unfed: tuple[slice, ...] = ()
    """Stretches of the whole without a gradient: their residual is not sent, and stays for the next."""

    def start(
        self,
        group: Group,
        source: Array,
        *,
        out: Array,
        partition: Partition,
        name: str,
        padding: int,
        traffic: Counter[str] | None,
    ) -> Ticket[Array]:
        """Give each rank its range of the sum of all ranks' ``source``; every rank calls this.

        ``source`` is only read, and not after this returns.

        Args:
            group: The ranks.
            source: The whole: 1-D.
            out: This rank's range of the sum; it may be its place in ``source``.
            partition: Which rank holds which range.
            name: What to call it in errors and traces.
            padding: Elements at the end of the whole that are not counted.
            traffic: Where moved bytes are counted, by collective.
        """
        nbytes = [self.format.nbytes(numel) for numel in partition.counts]
        if traffic is not None and group.size > 1:
            traffic["reduce_scatter"] += sum(nbytes) - self.format.nbytes(padding)
            self.uncoded["reduce_scatter"] += (partition.numel - padding) * source.itemsize
        slot = self.slots.lease(sent_nbytes(self.format, partition.counts, group.rank))
        mine, first = nbytes[group.rank], 0
        for rank, count in enumerate(nbytes):
            own, payload = partition.of(rank).slice, slot.memory[first : first + count]
            if self.residual is None:
                self.format.encode(payload, source[own], start=own.start)
            else:
                self._encode_with_feedback(payload, source, own, self.residual)
            first += count
        arrived = slot.memory[first : first + group.size * mine]
        exchange = group.all_to_all(
            slot.memory[:first], out=arrived, counts=[nbytes] * group.size, name=name, eager=False
        )

        def decode() -> Array:
            exchange.wait()  # not-gpu: codes are refused on GPUs
            self.format.decode_sum(out, list(arrived.reshape(group.size, mine)))
            return out

        stream = group.device.named_stream("decode")
        ticket: Ticket[Array] = stream.submit(decode, name=f"decode {name}", eager=exchange.done())
        slot.release(after=ticket)  # not-gpu: codes are refused on GPUs
        return ticket

    def _encode_with_feedback(self, payload: Array, source: Array, own: slice, residual: Array) -> None:
        """Encode one rank's range of ``source``, and keep what that loses."""
        unfed = [slice(max(one.start, own.start), min(one.stop, own.stop)) for one in self.unfed]
        aside = [(one, residual[one].copy()) for one in unfed if one.start < one.stop]
        for one, _ in aside:
            residual[one].view(np.uint16).fill(0)
        self.format.encode_with_feedback(payload, source[own], residual[own], start=own.start)
        for one, kept in aside:
            residual[one] = kept
