"""`CodedReduce`: sums over ranks of what travels as codes.

    each rank          encode my gradients ─────────────────────────── all_to_all of codes ──> decode what came from
    ranks of a host    all_to_all of slices, sum them in rank order, encode ─┘                 every sender, and sum it

Codes are not added on the way: each summand is rounded once, by its sender, and sums are made in float32, also of
gradients of 16 bits, in the order of the senders. NaN and infinity are decoded as such, in their places (decisions
0127, 0145). With virtual shards what was decoded is not summed but put side by side, for a fixed tree (decision 0146).
On GPUs each rank sends for itself, and kernels code, keep what is lost, and sum (decision 0176).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from zerort.buffer.coded.residual import Residual
from zerort.buffer.coded.senders import Routes, Senders, overlap
from zerort.codec import Coded, SummandFormat
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.native import add_into, cast_into
from zerort.typing import Array

__all__ = ["CodedReduce", "sent_nbytes"]

_CACHE_LINE: Final = 64  # bytes: what lies behind codes begins at one


def sent_nbytes(format: SummandFormat, routes: Routes, rank: int, *, width: int) -> int:
    """Return the bytes that a rank needs to send and get codes, and to sum slices of its host's ranks before.

    Args:
        format: The codes'.
        routes: Who codes what for whom.
        rank: Whose bytes.
        width: Bytes of a gradient's element.
    """
    return _codes_nbytes(format, routes, rank) + sum(_summing_nbytes(routes, rank, width=width))


def _codes_nbytes(format: SummandFormat, routes: Routes, rank: int) -> int:
    nbytes = routes.nbytes(format, rank)
    return nbytes if not routes.slices(rank) else -(-nbytes // _CACHE_LINE) * _CACHE_LINE


def _summing_nbytes(routes: Routes, rank: int, *, width: int) -> tuple[int, int]:
    """Return the bytes of the slices that a rank sums, and of their sum; that goes over the first if it may."""
    slices = routes.slices(rank)
    stretch = routes.stretch(rank)
    return slices * width, (stretch.stop - stretch.start) * 4 if slices and width != 4 else 0


@dataclass(frozen=True, slots=True)
class CodedReduce:
    """A reduce_scatter whose summands travel as codes."""

    format: SummandFormat
    """What they travel as."""
    slots: Slots
    """Memory of this rank's own for the codes that it sends and gets."""
    senders: Senders
    """Who sends, and which rank codes what."""
    residual: Residual | None
    """What coding has lost of gradients so far, which is added to the next; None: it is not."""
    uncoded: Counter[str]
    """Where bytes are counted that would have moved without it, by collective."""
    unfed: tuple[slice, ...] = ()
    """Stretches of the whole in which this rank has no gradient: what was lost there waits for the next."""
    sends_leaf: int | None = None
    """Which of this rank's virtual shards it sends: what is decoded is then put side by side. None: it is summed."""

    def of_leaves(self, count: int, *, at: int) -> CodedReduce:
        """Return the same for a micro-step in which the first ``count`` ranks send a virtual shard, their ``at``th."""
        few = Senders.of_ranks(count, size=self.senders.size, alignment=self.senders.alignment)
        return replace(self, senders=few, sends_leaf=at)

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

        ``source`` is only read, and not after what this returns is done.

        Args:
            group: The ranks.
            source: The whole: 1-D.
            out: This rank's range of the sum, which may be its place in ``source``; or of each sender, side by side.
            partition: Which rank holds which range.
            name: What to call it in errors and traces.
            padding: Elements at the end of the whole that are not counted.
            traffic: Where moved bytes are counted, by collective.
        """
        routes, rank = Routes(self.senders, partition), group.rank
        counts, stretch = routes.counts(self.format), routes.stretch(rank)
        if traffic is not None and group.size > 1:
            self._count(traffic, routes, source, rank=rank, padding=padding)
        nbytes = sent_nbytes(self.format, routes, rank, width=source.itemsize)
        with self.slots.lease(nbytes).returned_on_error() as slot:
            sent, got = sum(counts[rank]), [row[rank] for row in counts]
            codes, arrived = slot.memory[:sent], slot.memory[sent : sent + sum(got)]
            residual = None
            if self.residual is not None and stretch.start < stretch.stop:
                residual = self.residual.begin(self.sends_leaf or 0)
            encoded: Ticket[None] | None = None
            if self.senders.sum_first:
                beside = slot.memory[_codes_nbytes(self.format, routes, rank) :]
                slot.busy = encoded = self._sum_and_encode(group, source, routes, beside, codes, residual, name=name)
            elif group.device.in_host_memory:
                self._encode(codes, source[stretch], routes, rank, residual, unfed=self.unfed)
            else:
                slot.busy = encoded = group.device.named_stream("encode").submit(
                    lambda: self._encode(codes, source[stretch], routes, rank, residual, unfed=self.unfed),
                    name=f"encode {name}",
                    eager=True,
                )
            # gpu-wait: gradients_are_summed_as_the_host_sums_codes [, after=encoded -> ]
            slot.busy = exchange = group.all_to_all(
                codes, out=arrived, counts=counts, name=name, eager=False, after=encoded
            )

            def decode() -> Array:
                if encoded is not None:
                    group.device.order_after(encoded)  # not-gpu: for its error; the exchange is done after it
                group.device.order_after(exchange)  # gpu-wait: gradients_are_summed_as_the_host_sums_codes
                self._decode(out, arrived, got, routes, rank)
                return out

            stream = group.device.named_stream("decode")
            ticket: Ticket[Array] = stream.submit(decode, name=f"decode {name}", eager=exchange.done())
            slot.release(after=ticket)  # gpu-wait: gradients_are_summed_as_the_host_sums_codes
        return ticket

    def _count(self, traffic: Counter[str], routes: Routes, source: Array, *, rank: int, padding: int) -> None:
        """Count what this rank moves: its codes, and what its host's ranks give each other."""
        end = routes.partition.numel - padding
        parts = [overlap(routes.part(rank, owner), slice(0, end)) for owner in range(routes.senders.size)]
        counts = [part.stop - part.start for part in parts]
        traffic["reduce_scatter"] += sum(map(self.format.nbytes, counts))
        self.uncoded["reduce_scatter"] += sum(counts) * source.itemsize
        if routes.slices(rank):
            traffic["all_to_all"] += end * source.itemsize

    def _sum_and_encode(
        self,
        group: Group,
        source: Array,
        routes: Routes,
        room: Array,
        codes: Array,
        residual: Array | None,
        *,
        name: str,
    ) -> Ticket[None]:
        """Start to sum this rank's stretch over the ranks of its host, and to encode the sum."""
        rank, stretch = group.rank, routes.stretch(group.rank)
        slices_nbytes, sum_nbytes = _summing_nbytes(routes, rank, width=source.itemsize)
        slices = room[:slices_nbytes].view(source.dtype)
        counts = routes.slice_counts()
        arrival = group.all_to_all(source[: sum(counts[rank])], out=slices, counts=counts, name=name, eager=False)

        def encode() -> None:
            arrival.wait()  # not-gpu: each GPU sends for itself
            values, unfed = source[stretch], list(self.unfed)
            if slices.size:
                summands = slices.reshape(-1, stretch.stop - stretch.start)
                values = summands[0]
                if sum_nbytes:
                    values = room[slices_nbytes : slices_nbytes + sum_nbytes].view(np.float32)
                    cast_into(values, summands[0])
                for one in summands[1:]:
                    add_into(values, one)
                unfed = _without_values(values, stretch, unfed)
            self._encode(codes, values, routes, rank, residual, unfed=unfed)

        stream = group.device.named_stream("encode")
        ticket: Ticket[None] = stream.submit(encode, name=f"encode {name}", eager=arrival.done())
        return ticket

    def _encode(
        self,
        codes: Array,
        values: Array,
        routes: Routes,
        rank: int,
        residual: Array | None,
        *,
        unfed: Sequence[slice],
    ) -> None:
        """Encode this rank's stretch, for one owner after the other, and keep what that loses."""
        stretch = routes.stretch(rank)
        aside = []
        if residual is not None:
            waiting = [_from(overlap(one, stretch), stretch.start) for one in unfed]
            # As bytes: CuPy 13 copies no bfloat16.
            places = [residual[one].view(np.uint8) for one in waiting if one.start < one.stop]
            aside = [(place, place.copy()) for place in places]
            for place in places:
                place.fill(0)
        first = 0
        for owner, count in enumerate(routes.counts(self.format)[rank]):
            part = routes.part(rank, owner)
            own, payload = _from(part, stretch.start), codes[first : first + count]
            if residual is None:
                self.format.encode(payload, values[own], start=part.start)
            else:
                self.format.encode_with_feedback(payload, values[own], residual[own], start=part.start)
            first += count
        for place, kept in aside:
            place[...] = kept

    def _decode(self, out: Array, arrived: Array, got: Sequence[int], routes: Routes, rank: int) -> None:
        """Sum what arrived from all senders, or put it side by side."""
        payloads, first = [], 0
        for sender, count in enumerate(got):
            part = routes.part(sender, rank)
            payloads.append(Coded(part.stop - part.start, arrived[first : first + count]))
            first += count
        summands = [[payloads[one] for one in ranks] for ranks in self.senders.members]
        if self.sends_leaf is None:
            self.format.decode_sum(out, summands)
            return
        for piece, summand in zip(out.reshape(len(summands), -1), summands, strict=True):
            self.format.decode_sum(piece, [summand])


def _from(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)


def _without_values(values: Array, stretch: slice, unfed: Sequence[slice]) -> list[slice]:
    """Return what of some stretches no rank of a host had a gradient of: their sum is zero there."""
    parts = [overlap(one, stretch) for one in unfed]
    return [one for one in parts if not values[_from(one, stretch.start)].any()]
