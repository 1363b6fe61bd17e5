"""`SectionGradients`: where a section's gradients are collected and summed, and where their sum rests.

    its own unit's     a GradientBucket over the section's layout
    a tied unit's      a GradientBucket over one tensor, whose sum goes into that tensor's range of the other's
    the sum            in the bucket, in memory of this rank's own, or offloaded: what `_make_sink` chooses

Parameters and optimizer state are in `section.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from zerort.buffer import (
    CodedReduce,
    FoldedShard,
    GradientBucket,
    GradientSink,
    ReduceInto,
    Residual,
    Routes,
    TiedRange,
    TiedSums,
    sent_nbytes,
)
from zerort.comm.agreed import raise_together
from zerort.config import Tier
from zerort.engine.context import Context
from zerort.engine.model.slot_set import summed_slots
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.folded import OffloadedFold, TiedTrees
from zerort.engine.residence.gradients import Copies, OffloadedGradient
from zerort.engine.rows.bucket import RowBucket
from zerort.errors import DeviceMemoryError, StorageError
from zerort.layout import FlatLayout, Partition, Placement, itemsize
from zerort.layout.dtypes import gradient_dtype
from zerort.native.dtypes import numpy_dtype
from zerort.optim.kernels import bucket_kernels_for
from zerort.typing import Array

__all__ = ["SectionGradients"]


class SectionGradients:
    """The gradients of a section; none where its tensors are frozen. Every rank makes it at once.

    Args:
        name: Unit and dtype, for errors and traces.
        layout: Where each tensor lies.
        partition: Which rank holds which range.
        tiers: Where its parts rest.
        context: What the runtime's parts share.
    """

    def __init__(
        self, name: str, layout: FlatLayout, partition: Partition, *, tiers: SectionResidence, context: Context
    ) -> None:
        self.name = name
        self.layout, self.partition = layout, partition
        self.tiers = tiers
        self._context = context
        self._group = context.mesh.shard
        self._device = context.mesh.shard.device
        self._cuts = 0  # how often it was cut anew: values of two cuts are in the store side by side
        self.residual: Residual | None = None
        """What coding has lost of the gradients that this rank codes; None: it is not kept."""
        self.bucket: GradientBucket | RowBucket | None = None
        """Where this unit's gradients are collected; None if its tensors are frozen."""
        self.tied_buckets: list[GradientBucket] = []
        """Where other units' gradients of its tensors are collected, each reduced into the sum by itself."""
        self._gradient: ChunkedArray | None = None  # where it rests, if that is not in memory
        self._nodes: Sequence[ChunkedArray] = ()  # the same of a fixed tree's other nodes
        self._sink: OffloadedGradient | None = None  # what puts it there
        self._fold: FoldedShard | None = None  # what sums it in a fixed tree, in memory
        self._tied_sums: list[tuple[slice, Callable[[], Array]]] = []  # other units' trees, and where they belong
        self._tied_trees: list[tuple[slice, Callable[[], ReduceInto]]] = []  # the same of those that are offloaded
        self._tied_folds: list[OffloadedFold] = []  # what sums those
        self._tied_arrays: list[Sequence[ChunkedArray]] = []  # what these rest in, for each of `tied_buckets`
        self.gradient_dtypes: tuple[np.dtype[Any], ...] = (numpy_dtype(layout.dtype),)

    # -- what it takes ---------------------------------------------------------------------------------------------

    @property
    def _stored_as(self) -> str:
        """What its values are called in a store."""
        return f"{self.name}, cut {self._cuts}" if self._cuts else self.name

    @property
    def _summed_in(self) -> str:
        """What gradients are collected and summed in."""
        return gradient_dtype(
            self.layout.dtype, self._context.options.gradient_dtype, over_nccl=self._group.kind == "nccl"
        )

    @property
    def _reduce_codec(self) -> CodedReduce | None:
        """How its gradients travel as codes, if they do."""
        context = self._context
        format = None if context.coding is None else context.coding.reduce_format(self._summed_in)
        if format is None:
            return None
        assert context.senders is not None
        return CodedReduce(format, context.slots.sent, context.senders.within, self.residual, context.ledger.uncoded)

    def _make_residual(self) -> Residual | None:
        """Return what keeps what coding loses of its gradients, if anything does."""
        coding, senders = self._context.coding, self._context.senders
        dtype = None if coding is None else coding.residual_dtype(self._summed_in)
        if coding is None or senders is None or dtype is None:
            return None
        stretch = senders.within.stretches(self.layout.numel)[self._group.rank]
        made: Residual | None = None
        error: DeviceMemoryError | None = None
        try:
            made = Residual(dtype, senders.numbers, stretch, device=self._device, restores=coding.may_skip)
        except DeviceMemoryError as caught:
            error = caught
        if not self._device.in_host_memory:  # one rank's GPU may have less left than another's
            raise_together(self._group, error, name="register")
        return made

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the codes of its gradients that this rank sends and gets; 0 if they travel as they are.

        On GPUs those of the rank that has most: all of them have memory for it, or none has.
        """
        codec = None if self.bucket is None else self._reduce_codec
        if codec is None:
            return 0
        routes = Routes(codec.senders, self.partition)
        ranks = (self._group.rank,) if self._device.in_host_memory else range(self._group.size)
        return max(sent_nbytes(codec.format, routes, rank, width=itemsize(self._summed_in)) for rank in ranks)

    def _is_beyond_reach(self, tier: Tier) -> bool:
        """Say whether what rests in a tier is elsewhere than in the memory that computing happens in."""
        return tier not in self._context.backings.reach

    def _offloaded_nodes(self, kind: str, partition: Partition) -> list[ChunkedArray]:
        """Return arrays for a sum that is not where computing happens: one, or one for each node of a fixed tree."""
        backings, leaves = self._context.backings, self._context.leaves
        cuts = backings.cuts_of(partition.counts[self._group.rank], self.tiers)
        return [
            backings.offloaded(f"{self._stored_as}/{kind}{at or ''}", cuts, self._summed_in, tier=self.tiers.gradient)
            for at in range(1 if leaves is None else leaves.held)
        ]

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that a reduction takes until it is folded or put away; on GPUs on the rank that takes most. None: 0."""
        sink = self._sink or self._fold
        if sink is None:
            return None
        if self._device.in_host_memory:
            return sink.room_nbytes
        return max(map(sink.room_for, self.partition.counts))

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of gradients that this rank holds in memory at rest, where computing happens or on its host."""
        held = sum(bucket.nbytes for bucket in self.buckets)
        return held if self._gradient is None else held + sum(one.memory.nbytes for one in self.offloaded_gradient)

    @property
    def offloaded_gradient(self) -> list[ChunkedArray]:
        """Where its gradient rests, if that is elsewhere than where computing happens."""
        return [] if self._gradient is None else [self._gradient, *self._nodes, *chain(*self._tied_arrays)]

    def _make_offloaded_gradient(self) -> None:
        """Make the arrays that the sum rests in, if it is not where computing happens."""
        if self._is_beyond_reach(self.tiers.gradient):
            self._gradient, *self._nodes = self._offloaded_nodes("gradient", self.partition)
            self._tied_arrays = [
                self.tied_arrays(extent.name, number=number)
                for number, bucket in enumerate(self.tied_buckets)
                for extent in bucket.layout.extents
            ]

    def tied_arrays(self, full: str, *, number: int) -> list[ChunkedArray]:
        """Return what another unit's fixed tree of a tensor is to rest in; nothing if trees are in memory, or none is.

        Every rank calls this. A store's values are not made yet.

        Args:
            full: The tensor.
            number: How many other units' gradients of its tensors there are before.
        """
        if self._gradient is None or self._context.leaves is None:
            return []
        layout = self._tied_layout(full)
        partition, _ = self._tied_range(self.layout.of(full).offset, layout.numel)
        return self._offloaded_nodes(f"tied{number}/gradient", partition)

    def _recut_buckets(self) -> None:
        """Give the buckets the section's new partition: they have no gradients now. Every rank calls this."""
        if not isinstance(self.bucket, GradientBucket):
            return
        self.bucket.recut(self.partition, sink=self._make_sink())
        self._tied_sums.clear()
        self._tied_trees.clear()
        self._tied_folds.clear()
        arrays = self._tied_arrays or [()] * len(self.tied_buckets)
        for tied, nodes in zip(self.tied_buckets, arrays, strict=True):
            (extent,) = tied.layout.extents
            partition, within = self._tied_range(self.layout.of(extent.name).offset, tied.layout.numel)
            tied.recut(partition, sink=self._tied_sink(within, nodes))
            self._note_tied_sum(tied, within)

    @property
    def buckets(self) -> list[GradientBucket | RowBucket]:
        """All places where gradients of its tensors are collected, by whichever unit."""
        return [] if self.bucket is None else [self.bucket, *self.tied_buckets]

    def _make_bucket(self) -> None:
        """Make the place where gradients are collected. Every rank calls this."""
        context = self._context
        self.residual = self._make_residual()
        self.gradient_dtypes = (numpy_dtype(self.layout.dtype), numpy_dtype(self._summed_in))
        self.bucket = GradientBucket(
            replace(self.layout, dtype=self._summed_in),
            self.partition,
            group=self._group,
            placement=context.plan.gradient.placement,
            needed=context.plan.state.placement,
            slots=context.slots.buckets,
            sink=self._make_sink(),
            micro_steps=context.micro_steps,
            tree=context.leaves,
            whole=context.keeps_whole_gradients,
            name=self.name,
            traffic=context.ledger.moved,
            kernels=bucket_kernels_for(self._device),
            replicas=context.mesh.replicate,
            codec=self._reduce_codec,
        )

    def reserve_for_ties(self) -> None:
        """See to it that another unit's gradients find room to be added to the sum. Every rank calls this."""
        if self.room_nbytes is not None:
            count = summed_slots(buckets=self._context.options.buckets, is_tied=True)
            self._context.slots.summed.reserve(self.room_nbytes, count=count)

    def add_tied_bucket(self, full: str, arrays: Sequence[ChunkedArray] = ()) -> GradientBucket:
        """Return a place for another unit's gradients of one tensor: only its range travels. No communication.

        `reserve_for_ties` comes first.

        Args:
            full: The tensor.
            arrays: What `tied_arrays` has returned for it, made.
        """
        assert self.bucket is not None
        layout = self._tied_layout(full)
        partition, within = self._tied_range(self.layout.of(full).offset, layout.numel)
        made = GradientBucket(
            layout,
            partition,
            group=self._group,
            placement=Placement.SHARDED,
            needed=Placement.SHARDED,
            slots=self._context.slots.buckets,
            sink=self._tied_sink(within, arrays),
            tree=self._context.leaves,
            name=self.name,
            traffic=self._context.ledger.moved,
            kernels=bucket_kernels_for(self._device),
            replicas=None if self._context.leaves is None else self._context.mesh.replicate,
        )
        self._note_tied_sum(made, within)
        self.tied_buckets.append(made)
        if arrays:
            self._tied_arrays.append(arrays)
        return made

    def _tied_layout(self, full: str) -> FlatLayout:
        """Return where another unit's gradients of a tensor lie."""
        return FlatLayout.build({full: self.layout.of(full).shape}, dtype=self._summed_in)

    def _note_tied_sum(self, tied: GradientBucket, within: slice) -> None:
        """Have the root of another unit's tree added to the sum, if it has one of its own."""
        sink = tied.sink
        if isinstance(sink, OffloadedFold):
            self._tied_trees.append((within, partial(_completed, tied, sink)))
            self._tied_folds.append(sink)
        elif self._context.leaves is not None:
            self._tied_sums.append((within, tied.finish_reduce))

    def _tied_range(self, first: int, numel: int) -> tuple[Partition, slice]:
        """Return who holds which part of a stretch, and which elements of this rank's range are of it."""
        own = self.partition.of(self._group.rank)
        begin = min(max(first, own.first), own.stop) - own.first
        partition = self.partition.within(first, first + numel)
        return partition, slice(begin, begin + partition.counts[self._group.rank])

    def _tied_sink(self, within: slice, arrays: Sequence[ChunkedArray]) -> GradientSink:
        """Return what sums another unit's gradients of some elements: in their place, or in a tree of their own."""
        assert isinstance(self.bucket, GradientBucket)
        if self._context.leaves is None:
            return TiedRange(self.bucket, within)
        if arrays:
            return self._make_offloaded_fold(arrays)
        return self._make_fold(within.stop - within.start)

    def _make_fold(self, numel: int, *, tied: TiedSums = ()) -> FoldedShard:
        """Return what sums some elements of this rank's in a fixed tree, in memory."""
        context = self._context
        assert context.leaves is not None
        return FoldedShard(
            context.leaves,
            numel=numel,
            dtype=numpy_dtype(self._summed_in),
            device=self._device,
            slots=context.slots.summed,
            kernels=bucket_kernels_for(self._device),
            replicas=context.mesh.replicate,
            tied=tied,
        )

    def _make_sink(self) -> GradientSink | None:
        """Return what keeps this rank's range of the sum; None: the bucket does, or has the whole."""
        context = self._context
        self._sink, self._fold = None, None
        if context.keeps_whole_gradients:
            return None
        if self._gradient is not None:
            self._sink = self._make_offloaded_sink()
        elif context.leaves is not None:
            self._fold = self._make_fold(self.partition.counts[self._group.rank], tied=self._tied_sums)
        return self._sink or self._fold

    def _make_offloaded_sink(self) -> OffloadedGradient:
        """Return what puts this rank's range of the sum away."""
        context = self._context
        assert self._gradient is not None
        if context.leaves is not None:
            return self._make_offloaded_fold([self._gradient, *self._nodes], tied=self._tied_trees)
        return OffloadedGradient(
            self._gradient,
            block=context.norm_block,
            slots=context.slots.summed,
            stream=context.backings.gradient_stream,
            most_read=context.backings.chunk_numel if context.micro_steps > 1 else 0,
            copies=self._copies(),
        )

    def _make_offloaded_fold(self, nodes: Sequence[ChunkedArray], *, tied: TiedTrees = ()) -> OffloadedFold:
        """Return what sums elements in a fixed tree whose nodes are not where computing happens."""
        context = self._context
        assert context.leaves is not None
        return OffloadedFold(
            nodes,
            context.leaves,
            block=context.norm_block,
            slots=context.slots.summed,
            stream=context.backings.gradient_stream,
            most_read=context.backings.chunk_numel,
            tied=tied,
            copies=self._copies(),
        )

    def _copies(self) -> Copies | None:
        """Return the copies of the model that have sums of this rank's range, if there are several."""
        group = self._context.mesh.replicate
        if group is None:
            return None
        own = self.partition.of(self._group.rank)
        return Copies(group, self._context.ledger.moved, max(min(own.stop, self.layout.end) - own.first, 0))

    @property
    def storage_error(self) -> StorageError | None:
        """What a disk had against this step's gradients, on this rank alone."""
        return next((one.error for one in (self._sink, *self._tied_folds) if one is not None and one.error), None)

    @property
    def completes_sum_on_disk(self) -> bool:
        """Whether `finish_reduce` still reads and writes a disk, which may fail; the same on every rank."""
        is_open = bool(self._tied_trees) or self._context.mesh.replicate is not None
        return self._sink is not None and is_open and self.tiers.gradient is Tier.NVME


def _completed(tied: GradientBucket, sink: OffloadedFold) -> ReduceInto:
    """Complete the sum of another unit's gradients, and return what reads it."""
    tied.finish_reduce()
    return sink.read_into
