"""`RangeGather`: how the ranks' ranges of an array become the whole on every rank.

    PlainGather    all_gather                                                 nothing moves where ranks share memory
    CodedGather    encode my range ── all_gather of codes ──> decode them all    every rank has the same bits, mine too

What a range travels as is a `RangeCodec` (`coded/ranges.py`): blocks of codes, of values or of differences, what has
changed since the whole was last made, or what is not zero. How long the last two are, ranks tell each other first. On
GPUs kernels code and decode, each on a stream of its own (decisions 0175, 0188).

[Note: Added once] Ranks that share memory share the whole. What is decoded as values, each of them writes, the same
bytes. What is added to the whole of before, one of them adds, range by range in turn; then they meet a second time, in
the order of the group's calls, because nobody may look at the whole before all have added (decision 0196).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from zerort.buffer.coded.ranges import RangeCodec, room_nbytes, sent_nbytes_of
from zerort.buffer.redistribute import redistribute
from zerort.comm import Group
from zerort.device import Done, Ticket, joined
from zerort.device.slots import Slots
from zerort.layout import Partition, Placement
from zerort.typing import Array

__all__ = ["PLAIN", "CodedGather", "PlainGather", "RangeGather", "tell_sizes"]


class RangeGather(Protocol):
    """How ranges become the whole."""

    @property
    def needs_base(self) -> bool:
        """Whether ``out`` has to hold the whole of before, the same on every rank: zeros at first."""

    @property
    def adds(self) -> bool:
        """Whether it adds to the whole of before: that is then a part of what a run has computed."""

    def room_nbytes(self, partition: Partition) -> int:
        """Return the bytes of memory that it takes besides the whole."""

    def moves(self, group: Group) -> bool:
        """Say whether ranges that ranks have written to one memory have to move all the same."""

    def measure(self, mine: Array, before: Array) -> int | None:
        """Return how many bytes this rank is going to send of its range; None: the others know without being told.

        Args:
            mine: Its range.
            before: The same of the whole of before.
        """

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
        """Bring all ranks' ranges to ``out``; every rank calls this.

        Args:
            group: The ranks.
            mine: This rank's range; it may be its place in ``out``.
            out: Where the whole goes: 1-D.
            partition: Which rank holds which range.
            name: What to call it in errors and traces.
            padding: Elements at the end of the whole that are not counted.
            traffic: Where moved bytes are counted, by collective.
            told: What every rank had `measure`d, if they have told each other.
            brought: What brings ``mine`` from the host of a GPU; None: it is there.
        """


class PlainGather:
    """Ranges travel as they are."""

    needs_base = False
    adds = False

    def room_nbytes(self, partition: Partition) -> int:
        """Return 0: they go where they belong."""
        return 0

    def moves(self, group: Group) -> bool:
        """Say whether ranks do not share memory."""
        return not group.one_memory

    def measure(self, mine: Array, before: Array) -> int | None:
        """Return None: that depends on the partition alone."""
        return None

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
        """Bring all ranks' ranges to ``out``."""
        if brought is not None:
            group.after(brought)  # gpu-wait: no_order_of_streams_changes_a_walk
        return redistribute(
            group,
            mine,
            placement=Placement.SHARDED,
            to=Placement.REPLICATED,
            partition=partition,
            out=out,
            name=name,
            padding=padding,
            traffic=traffic,
        )


PLAIN: Final = PlainGather()
_NO_ROOM: Final[Array] = np.empty(0, np.uint8)


def tell_sizes(group: Group, sizes: Sequence[int], *, name: str, traffic: Counter[str] | None) -> list[list[int]]:
    """Tell all ranks how many bytes this one is going to send of each of several arrays. Every rank calls this.

    Returns:
        For each array, what every rank sends.
    """
    if traffic is not None and group.size > 1:
        traffic["all_gather"] += 8 * len(sizes) * group.size
    # not-gpu: sizes are numbers of the host
    told = group.all_gather(np.array(sizes, np.int64), name=name).wait()
    found: list[list[int]] = told.reshape(group.size, -1).T.tolist()
    return found


@dataclass(frozen=True, slots=True)
class CodedGather:
    """Codes of the ranges travel, and every rank decodes all of them, its own, too."""

    codec: RangeCodec
    """What they travel as."""
    slots: Slots
    """Memory of this rank's own for the codes of the whole."""
    uncoded: Counter[str]
    """Where bytes are counted that would have moved without it, by collective."""

    @property
    def needs_base(self) -> bool:
        """Whether ``out`` has to hold the whole of before."""
        return self.codec.needs_base

    @property
    def adds(self) -> bool:
        """Whether it adds to the whole of before."""
        return self.codec.adds

    def room_nbytes(self, partition: Partition) -> int:
        """Return the bytes of all ranks' codes at their most."""
        return room_nbytes(self.codec, partition.counts, on_gpus=not self.slots.device.in_host_memory)

    def moves(self, group: Group) -> bool:
        """Say whether they move: lossless ones only if ranks do not share memory, unless they need a base."""
        return self.codec.decodes_apart or not group.one_memory

    def measure(self, mine: Array, before: Array) -> int | None:
        """Return how many bytes this rank will send, if that depends on its values."""
        if not self.codec.is_measured:
            return None
        beside = self._beside_nbytes([mine.size])
        if not beside:
            return self.codec.measure(mine, before, room=_NO_ROOM)
        with self.slots.lease(beside).returned_on_error() as slot:
            nbytes = self.codec.measure(mine, before, room=slot.memory)
            slot.release()  # the host has waited for it
        return nbytes

    def _beside_nbytes(self, counts: Sequence[int]) -> int:
        """Return the bytes that kernels need beside payloads: on the host, none."""
        return 0 if self.slots.device.in_host_memory else self.codec.beside_nbytes(max(counts))

    def _meets_again(self, group: Group) -> bool:
        """Say whether ranks wait for each other's decoding: some share memory, and each of them adds a part."""
        return self.codec.adds and len(set(group.hosts)) < group.size

    def _decoded_by(self, group: Group) -> range:
        """Return the ranks whose ranges this one decodes: all, or in turn with those that share its memory."""
        if not self._meets_again(group):
            return range(group.size)
        sharing = [rank for rank, host in enumerate(group.hosts) if host == group.hosts[group.rank]]
        return range(sharing.index(group.rank), group.size, len(sharing))

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
        """Bring what is decoded of all ranks' ranges to ``out``.

        ``mine`` is only read; on the host, not after this returns. Where ranks share ``out``, all of them write the
        same there, once each has encoded its range, or each adds a part ([Note: Added once]). On GPUs the host waits
        for nothing, once sizes are told.
        """
        codec, rank = self.codec, group.rank
        before = out[partition.of(rank).slice]
        if not codec.is_measured:
            told = [codec.most_nbytes(numel) for numel in partition.counts]
        elif told is None:
            called = f"{codec.words.sizes} of {name}"[:60]
            (told,) = tell_sizes(group, [self.measure(mine, before) or 0], name=called, traffic=traffic)
        counts = [sent_nbytes_of(codec, nbytes) for nbytes in told]
        if traffic is not None and group.size > 1:
            traffic["all_gather"] += sum(counts) - (0 if codec.is_measured else codec.most_nbytes(padding))
            self.uncoded["all_gather"] += (partition.numel - padding) * mine.itemsize
        if not any(told):
            return Done(out)
        with self.slots.lease(sum(counts) + self._beside_nbytes(partition.counts)).returned_on_error() as slot:
            payloads, sent, first = [], [], 0
            for nbytes, count in zip(told, counts, strict=True):
                payloads.append(slot.memory[first : first + nbytes])
                sent.append(slot.memory[first : first + count])
                first += count
            room = slot.memory[first:]

            def encode() -> None:
                if brought is not None:
                    group.device.order_after(brought)  # gpu-wait: gathered_codes_come_from_where_the_plan_says
                codec.encode(payloads[rank], mine, before, start=partition.offsets[rank], room=room)

            if group.device.in_host_memory:
                encode()
            else:
                slot.busy = encoded = group.device.named_stream("encode").submit(
                    encode, name=f"encode {name}", eager=brought is None
                )
                group.after(encoded)  # gpu-wait: gathered_codes_come_from_where_the_plan_says
            slot.busy = arrival = group.all_gather(
                sent[rank], out=slot.memory[:first], counts=counts, name=name, eager=False
            )

            here = self._decoded_by(group)

            def decode() -> Array:
                group.device.order_after(arrival)  # gpu-wait: gathered_codes_come_from_where_the_plan_says
                for one in here:
                    codec.decode(out[partition.of(one).slice], payloads[one], room=room)
                return out

            stream = group.device.named_stream("decode")
            ticket: Ticket[Array] = stream.submit(decode, name=f"{codec.words.decode} {name}", eager=arrival.done())
            slot.release(after=ticket)  # gpu-wait: gathered_codes_come_from_where_the_plan_says
        if not self._meets_again(group):
            return ticket
        # not-gpu: GPUs share no memory
        met = group.barrier(name=f"{codec.words.decode} {name}"[:60], after=ticket, follows=arrival)
        return joined([ticket, met], result=out)
