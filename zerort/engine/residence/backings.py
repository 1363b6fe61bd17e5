"""`Backings`: what values of this rank are kept in, and the one place that chooses by tier and device.

    tier            on the host              on a GPU
    DEVICE          the group's memory       the GPU's
    HOST            the same                 pinned memory of the host
    NVME            chunks in a store        chunks in a store behind a bridge

What is chosen here, nobody asks for again: `ChunkedArray` and `Parameters` have the same verbs for all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from zerort.buffer import PLAIN, RangeGather
from zerort.codec import BlockRows
from zerort.comm import Group
from zerort.config import Tier
from zerort.engine.residence.choose import SectionResidence, reach_of
from zerort.engine.residence.chunked_array import ChunkedArray, cut_chunks
from zerort.engine.residence.coded_parameters import CodedParameters
from zerort.engine.residence.copied import CopiedParameters
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.parameters import Parameters
from zerort.engine.residence.replicated import ReplicatedParameters
from zerort.engine.residence.sharded import ShardedParameters
from zerort.errors import PlanError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.storage.session import StorageSession
from zerort.typing import Array, Stream

__all__ = ["Backings"]


class Backings:
    """What this rank's values are kept in. Every rank has the same.

    Args:
        group: The ranks that share a model; their device is where computing happens.
        host: Host memory for values that are offloaded from a GPU.
        storage: The store for those that are offloaded to a disk.
    """

    def __init__(self, group: Group, host: HostMemory, storage: StorageSession) -> None:
        self.group = group
        self.host = host
        self.storage = storage
        self.reach = reach_of(group.device)
        """The tiers that computing reaches."""
        self.chunk_numel = storage.options.chunk_numel
        """Elements of a chunk that streams, at most."""
        self._gradient_stream: Stream | None = None

    @property
    def gradient_stream(self) -> Stream:
        """Does what follows a reduction: offloads gradients."""
        if self._gradient_stream is None:
            self._gradient_stream = self.group.device.stream("offload gradients")
        return self._gradient_stream

    def close(self) -> None:
        """Wait for gradients that are being offloaded."""
        if self._gradient_stream is not None:
            self._gradient_stream.close()

    def cuts_of(self, numel: int, residence: SectionResidence) -> tuple[int, ...]:
        """Return where chunks of a section's values begin: one chunk, if nothing of the section is offloaded."""
        most = self.chunk_numel if residence.is_offloaded(self.reach) else max(numel, 1)
        return cut_chunks(numel, most=most)

    def offloaded(self, name: str, cuts: Sequence[int], dtype: str, *, tier: Tier) -> ChunkedArray:
        """Return an array that rests in a tier which computing does not reach. Every rank calls this.

        A store's values are made by `ChunkedArray.create`.
        """
        resident = 0 if tier is Tier.NVME else len(cuts) - 1
        memory = self.host.zeros(cuts[resident], dtype)
        return ChunkedArray(name, cuts, memory, resident=resident, storage=self.storage, device=self.group.device)

    def parameters(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        placement: Placement,
        residence: SectionResidence,
        name: str,
        traffic: Counter[str] | None = None,
        whole: Array | None = None,
        gather: RangeGather = PLAIN,
        rows: BlockRows | None = None,
        uncoded: Counter[str] | None = None,
        secondary: bool = False,
        copy: Array | None = None,
        is_current: bool = False,
    ) -> Parameters:
        """Return a section's parameters, zeros where they are in memory. Every rank calls this.

        Args:
            layout: Where each tensor lies.
            partition: Which rank holds which range.
            placement: REPLICATED or SHARDED.
            residence: In which tiers the section's parts rest.
            name: What to call it.
            traffic: Where moved bytes are counted, by collective.
            whole: Memory to use, if this rank can reach all of the parameters at rest: those of another partition.
            gather: How SHARDED ranges become the whole.
            rows: Blocks that they rest in, being frozen; None: as they are computed with.
            uncoded: Where bytes are counted that would have moved without these, by collective.
            secondary: Whether the whole stays on each host until ranges change, if it is not at rest there.
            copy: Memory for that, if there is some: of another partition.
            is_current: Whether that holds what ranges are, once they have moved.
        """
        group, dtype, window = self.group, numpy_dtype(layout.dtype), None
        cuts = self.cuts_of(partition.counts[group.rank], residence)
        if placement is Placement.PARTIAL:
            raise PlanError("Expected parameters to be REPLICATED or SHARDED, got PARTIAL. Sums grow in buckets.")
        if rows is not None:
            return self._coded_parameters(
                layout,
                partition,
                rows,
                placement=placement,
                residence=residence,
                name=name,
                traffic=traffic,
                whole=whole,
                uncoded=uncoded,
            )
        if placement is Placement.REPLICATED:
            memory = group.zeros(layout.numel, dtype, name=name) if whole is None else whole
            array = ChunkedArray(name, self.cuts_of(layout.numel, residence), memory, device=group.device)
            return ReplicatedParameters(
                layout, partition, array=array, cuts=cuts, group=group, name=name, traffic=traffic
            )
        keeps_copy = (secondary or gather.needs_base) and gather.moves(group)
        if keeps_copy and residence.parameter not in self.reach:
            raise PlanError(
                f"Expected parameters of which a copy stays on each host where computing happens, got them on "
                f"{residence.parameter.name}."
            )
        if residence.parameter not in self.reach:
            array = self.offloaded(f"{name}/parameter", cuts, layout.dtype, tier=residence.parameter)
        else:
            if whole is not None:
                window, memory = whole, whole[partition.of(group.rank).slice]
            elif not gather.moves(group):
                window, memory = group.zeros_shared(partition.counts, dtype, name=name)
            else:
                memory = group.zeros(partition.counts[group.rank], dtype, name=name)
            array = ChunkedArray(name, cuts, memory, device=group.device)
        if keeps_copy:
            rest = [0] * (group.size - 1)
            if copy is None:
                copy = group.zeros_shared([layout.numel, *rest], dtype, name=name).full
            return CopiedParameters(
                layout,
                partition,
                array=array,
                copy=copy,
                is_current=is_current,
                group=group,
                name=name,
                traffic=traffic,
                gather=gather,
            )
        return ShardedParameters(
            layout, partition, array=array, window=window, group=group, name=name, traffic=traffic, gather=gather
        )

    def _coded_parameters(
        self,
        layout: FlatLayout,
        partition: Partition,
        rows: BlockRows,
        *,
        placement: Placement,
        residence: SectionResidence,
        name: str,
        traffic: Counter[str] | None,
        whole: Array | None,
        uncoded: Counter[str] | None,
    ) -> CodedParameters:
        """Return parameters that rest as blocks; see `parameters`."""
        group, window = self.group, None
        counts = [rows.nbytes_of(count) for count in partition.counts]
        own = counts[group.rank]
        if placement is Placement.REPLICATED:
            memory = group.zeros(sum(counts), np.uint8, name=name) if whole is None else whole
            array = ChunkedArray(name, (0, sum(counts)), memory, device=group.device)
        elif residence.parameter not in self.reach:
            cuts = map(rows.nbytes_of, self.cuts_of(partition.counts[group.rank], residence))
            array = self.offloaded(f"{name}/parameter", tuple(cuts), "uint8", tier=residence.parameter)
        else:
            if whole is not None:
                first = sum(counts[: group.rank])
                window, memory = whole, whole[first : first + own]
            elif group.one_memory:
                window, memory = group.zeros_shared(counts, np.uint8, name=name)
            else:
                memory = group.zeros(own, np.uint8, name=name)
            array = ChunkedArray(name, (0, own), memory, device=group.device)
        return CodedParameters(
            layout,
            partition,
            array=array,
            rows=rows,
            placement=placement,
            window=window,
            group=group,
            name=name,
            traffic=traffic,
            uncoded=uncoded,
        )
