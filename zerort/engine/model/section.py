"""`Section`: the tensors of a unit that share a dtype and are all trainable, or all frozen.

    trainable    parameters (Parameters), gradients (GradientBucket), optimizer state
    frozen       parameters only: no gradient, no state, no reduction

A section is what a plan is applied to: each of the three parts lies as its residence says, and rests where its
`SectionResidence` say.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from zerort.buffer import (
    PLAIN,
    CodedGather,
    CodedReduce,
    FoldedShard,
    GradientBucket,
    GradientSink,
    RangeGather,
    TiedRange,
    TiedSums,
    sent_nbytes,
)
from zerort.comm.agreed import raise_together
from zerort.config import Tier
from zerort.engine.context import Context
from zerort.engine.model.division import Division
from zerort.engine.model.slot_set import summed_slots
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.folded import OffloadedFold
from zerort.engine.residence.gradients import OffloadedGradient, SummedGradient, SummedInMemory
from zerort.engine.residence.parameters import Parameters
from zerort.engine.step.state import OptimizerState
from zerort.engine.step.state_entry import Streaming
from zerort.errors import DeviceMemoryError, StorageError, ZerortError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.layout.dtypes import gradient_dtype
from zerort.native.dtypes import numpy_dtype
from zerort.optim import MasterForm, Optimizer, TensorOptimizer
from zerort.optim.kernels import bucket_kernels_for
from zerort.typing import Array

__all__ = ["Section"]


class Section:
    """Tensors of one dtype, all trainable or all frozen. Every rank makes it at once.

    Args:
        name: Unit and dtype, for errors and traces.
        part: Its tensors, in the order in which they should lie, their optimizers and the form of their state.
        context: What the runtime's parts share.
    """

    def __init__(
        self,
        name: str,
        part: Division,
        *,
        context: Context,
    ) -> None:
        group = context.mesh.shard
        dtype, optimizers = part.dtype, part.optimizers
        self.name = name
        shapes = {full: spec.shape for full, spec in part.tensors.items()}
        cut = part.cut(context.run.cut)
        self.granule = cut.granule
        """Elements: ranges of ranks begin at multiples of it."""
        self.layout, self.partition = cut.of(shapes, dtype=dtype)
        self._group = group
        self._device = group.device
        self._context = context
        self.needs_whole_tensors = any(isinstance(one, TensorOptimizer) for one in (optimizers or {}).values())
        """Whether an optimizer of its tensors looks at whole ones: then all of it is in memory."""
        self.tiers = self._allowed_tiers(context.tiers_of(name))
        self._cuts = 0  # how often it was cut anew: values of two cuts are in the store side by side
        self._optimizers, self._master = optimizers, part.master
        self.parameters: Parameters
        self.residual: Array | None = None
        """What coding has lost of this rank's gradients: whole, bfloat16; None: it is not kept."""
        self.state: OptimizerState | None = None
        self.bucket: GradientBucket | None = None
        """Where this unit's gradients are collected; None if its tensors are frozen."""
        self.tied_buckets: list[GradientBucket] = []
        """Where other units' gradients of its tensors are collected, each reduced into the sum by itself."""
        self._gradient: ChunkedArray | None = None  # where it rests, if that is not in memory
        self._nodes: tuple[ChunkedArray, ...] = ()  # the same of a fixed tree's other nodes
        self._sink: OffloadedGradient | None = None  # what puts it there
        self._fold: FoldedShard | None = None  # what sums it in a fixed tree, in memory
        self._tied_sums: list[tuple[slice, Callable[[], Array]]] = []  # other units' trees, and where they belong
        self.gradient_dtypes: tuple[np.dtype[Any], ...] = (numpy_dtype(dtype),)
        self._make_parts()
        if optimizers is not None:
            if context.coding is not None and context.coding.keeps_residual(self._summed_in):
                self.residual = self._device.zeros(self.layout.numel, "bfloat16")
            self._make_bucket()

    def _make_parts(self, before: Section | None = None) -> None:
        """Make what is cut over the ranks, as the partition says; what another section has of it whole is shared."""
        context = self._context
        self.parameters = context.backings.parameters(
            self.layout,
            self.partition,
            placement=context.plan.parameter.placement,
            residence=self.tiers,
            name=self._stored_as,
            traffic=context.ledger.moved,
            whole=None if before is None or before.parameters.needs_room else before.parameters.whole,
            gather=self._gather_of(self.layout.dtype),
        )
        if self._optimizers is None:
            return
        if before is None or context.plan.state.placement is Placement.SHARDED:
            self.state = self._make_state(self._optimizers, self._master)
        if self._is_offloaded(self.tiers.gradient):
            self._gradient, *nodes = (
                self._offloaded_array(f"gradient{at or ''}", self._summed_in, self.tiers.gradient)
                for at in range(1 if context.leaves is None else context.leaves.held)
            )
            self._nodes = tuple(nodes)

    @property
    def _stored_as(self) -> str:
        """What its values are called in a store."""
        return f"{self.name}, cut {self._cuts}" if self._cuts else self.name

    def recut(self, partition: Partition) -> Section:
        """Return the same section on another partition, without values and without a bucket. Every rank calls this.

        Parameters that this rank reaches as a whole, and state that it holds as a whole, belong to both.
        """
        made = copy.copy(self)
        made.partition, made.bucket, made._cuts = partition, None, self._cuts + 1
        made._make_parts(self)
        return made

    def swap_parts(self, other: Section) -> None:
        """Exchange what `recut` has made for what was there: the bucket stays, and has no gradients now."""
        for part in ("partition", "parameters", "state", "_gradient", "_nodes", "_cuts"):
            mine, theirs = getattr(self, part), getattr(other, part)
            setattr(self, part, theirs)
            setattr(other, part, mine)
        if self.bucket is None:
            return
        self.bucket.recut(self.partition, sink=self._make_sink())
        self._tied_sums.clear()
        for tied in self.tied_buckets:
            (extent,) = tied.layout.extents
            partition, within = self._tied_range(self.layout.of(extent.name).offset, tied.layout.numel)
            tied.recut(partition, sink=self._tied_sink(within))
            self._note_tied_sum(tied, within)

    @property
    def _summed_in(self) -> str:
        """What gradients are collected and summed in."""
        return gradient_dtype(
            self.layout.dtype, self._context.options.gradient_dtype, over_nccl=self._group.kind == "nccl"
        )

    def _gather_of(self, dtype: str) -> RangeGather:
        """Return how its ranges become the whole."""
        context = self._context
        format = None if context.coding is None else context.coding.gather_format(dtype)
        if format is None:
            return PLAIN
        return CodedGather(format, context.slots.codes, context.ledger.uncoded)

    @property
    def _reduce_codec(self) -> CodedReduce | None:
        """How its gradients travel as codes, if they do."""
        context = self._context
        format = None if context.coding is None else context.coding.reduce_format(self._summed_in)
        return (
            None if format is None else CodedReduce(format, context.slots.sent, self.residual, context.ledger.uncoded)
        )

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the codes of its gradients that this rank sends and gets; 0 if they travel as they are."""
        codec = None if self.bucket is None else self._reduce_codec
        return 0 if codec is None else sent_nbytes(codec.format, self.partition.counts, self._group.rank)

    @property
    def codes_nbytes(self) -> int:
        """Bytes of the codes that its parameters are gathered as; 0 if they are gathered as they are."""
        return self._gather_of(self.layout.dtype).room_nbytes(self.partition)

    def _allowed_tiers(self, asked: SectionResidence) -> SectionResidence:
        """Return where the parts rest, as far as the optimizers of its tensors allow it."""
        if not (self.needs_whole_tensors and asked.streams):
            return asked
        if self._group.rank == 0:
            warnings.warn(
                f"{self.name!r} stays in memory: an optimizer that looks at whole tensors cannot update it chunk by "
                "chunk. Use AdamW, SGD or Lion for what should rest on NVME.",
                RuntimeWarning,
                stacklevel=2,
            )
        return SectionResidence(parameter=Tier.DEVICE, gradient=Tier.DEVICE, state=Tier.DEVICE)

    def _make_state(self, optimizers: Mapping[str, Optimizer], master: MasterForm | None) -> OptimizerState:
        """Make the state on all ranks, or on none: one rank's GPU may have less left than another's."""
        context = self._context
        made: OptimizerState | None = None
        error: DeviceMemoryError | None = None
        try:
            made = OptimizerState(
                self.layout,
                self.partition,
                rank=self._group.rank,
                whole=context.plan.state.placement is Placement.REPLICATED,
                optimizers=optimizers,
                master=master,
                name=self._stored_as,
                streaming=self._streaming(),
                device=self._device,
                zeros=context.host.zeros if self._is_offloaded(self.tiers.state) else None,
            )
        except DeviceMemoryError as caught:
            error = caught
        if not self._device.in_host_memory:
            raise_together(self._group, error, name="register")
        assert made is not None
        return made

    def _is_offloaded(self, tier: Tier) -> bool:
        """Say whether what rests in a tier is elsewhere than in the memory that computing happens in."""
        return tier not in self._context.backings.reach

    def _offloaded_array(self, kind: str, dtype: str, tier: Tier) -> ChunkedArray:
        """Return an array of this rank's range that is not where computing happens."""
        backings = self._context.backings
        cuts = backings.cuts_of(self.partition.counts[self._group.rank], self.tiers)
        return backings.offloaded(f"{self._stored_as}/{kind}", cuts, dtype, tier=tier)

    def _streaming(self) -> Streaming | None:
        if not self.is_offloaded:
            return None
        return Streaming(
            storage=self._context.storage,
            chunk_numel=self._context.backings.chunk_numel,
            state=self.tiers.state is Tier.NVME,
            resident_nbytes=self.tiers.state_resident_nbytes,
        )

    @property
    def is_offloaded(self) -> bool:
        """Whether some of it rests elsewhere than where computing happens; the same on every rank."""
        return self.tiers.is_offloaded(self._context.backings.reach)

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
        return [] if self._gradient is None else [self._gradient, *self._nodes]

    @property
    def columns(self) -> list[ChunkedArray]:
        """Everything of it that may rest elsewhere than in memory."""
        found = [] if self.state is None else list(self.state.columns.values())
        return [*found, self.parameters.array, *self.offloaded_gradient]

    @property
    def buckets(self) -> list[GradientBucket]:
        """All places where gradients of its tensors are collected, by whichever unit."""
        return [] if self.bucket is None else [self.bucket, *self.tied_buckets]

    def _make_bucket(self) -> None:
        """Make the place where gradients are collected. Every rank calls this."""
        context = self._context
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

    def add_tied_bucket(self, full: str) -> GradientBucket:
        """Return a place for another unit's gradients of one tensor: only its range travels. No communication.

        `reserve_for_ties` comes first.
        """
        assert self.bucket is not None
        extent = self.layout.of(full)
        layout = FlatLayout.build({full: extent.shape}, dtype=self._summed_in)
        partition, within = self._tied_range(extent.offset, layout.numel)
        made = GradientBucket(
            layout,
            partition,
            group=self._group,
            placement=Placement.SHARDED,
            needed=Placement.SHARDED,
            slots=self._context.slots.buckets,
            sink=self._tied_sink(within),
            tree=self._context.leaves,
            name=self.name,
            traffic=self._context.ledger.moved,
            kernels=bucket_kernels_for(self._device),
            replicas=None if self._context.leaves is None else self._context.mesh.replicate,
        )
        self._note_tied_sum(made, within)
        self.tied_buckets.append(made)
        return made

    def _note_tied_sum(self, tied: GradientBucket, within: slice) -> None:
        """Have the root of another unit's tree added to the sum, if it has one of its own."""
        if self._context.leaves is not None:
            self._tied_sums.append((within, tied.finish_reduce))

    def _tied_range(self, first: int, numel: int) -> tuple[Partition, slice]:
        """Return who holds which part of a stretch, and which elements of this rank's range are of it."""
        own = self.partition.of(self._group.rank)
        begin = min(max(first, own.first), own.last) - own.first
        partition = self.partition.within(first, first + numel)
        return partition, slice(begin, begin + partition.counts[self._group.rank])

    def _tied_sink(self, within: slice) -> GradientSink:
        """Return what sums another unit's gradients of some elements: in their place, or in a tree of their own."""
        assert self.bucket is not None
        if self._context.leaves is None:
            return TiedRange(self.bucket, within)
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
        slots, stream = context.slots.summed, context.backings.gradient_stream
        most_read = context.backings.chunk_numel
        if context.leaves is not None:
            return OffloadedFold(
                self.offloaded_gradient,
                context.leaves,
                block=context.norm_block,
                slots=slots,
                stream=stream,
                most_read=most_read,
                tied=self._tied_sums,
            )
        return OffloadedGradient(
            self._gradient,
            block=context.norm_block,
            slots=slots,
            stream=stream,
            most_read=most_read if context.micro_steps > 1 else 0,
        )

    @property
    def names(self) -> frozenset[str]:
        """The full names of its tensors."""
        return frozenset(extent.name for extent in self.layout.extents)

    @property
    def owned(self) -> ChunkedArray:
        """The range of the parameters that this rank updates. All of it if every rank has state for all."""
        replicated = self._context.plan.state.placement is Placement.REPLICATED
        return self.parameters.array if replicated else self.parameters.shard

    @property
    def shard(self) -> ChunkedArray:
        """This rank's range of the parameters."""
        return self.parameters.shard

    def checksum(self) -> tuple[int, int]:
        """Return the crc32c of this rank's range of the parameters, and its bytes: without what evens ranges out."""
        own = self.partition.of(self._group.rank)
        return self.shard.checksum(max(min(own.last, self.layout.end) - own.first, 0))

    def finish_reduce(self) -> SummedGradient:
        """Wait for the reduction and return the summed gradient as the optimizer needs it. Every rank calls this."""
        assert self.bucket is not None
        assert self.state is not None
        array = self.bucket.finish_reduce()
        if self._sink is not None:
            return self._sink
        column = ChunkedArray(self.name, self.state.cuts, array, device=self._device)
        return SummedInMemory(column)

    @property
    def storage_error(self) -> StorageError | None:
        """What a disk had against this step's gradients, on this rank alone."""
        return None if self._sink is None else self._sink.error

    @property
    def completes_sum_on_disk(self) -> bool:
        """Whether `finish_reduce` still reads and writes a disk, which may fail; the same on every rank."""
        return bool(self._sink is not None and self._tied_sums and self.tiers.gradient is Tier.NVME)

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write new values while no gather is under way; these tensors' master weights follow. No communication."""
        self.parameters.assign(values)
        if self.state is not None:
            self.state.take_master_from(self.owned, names=values.keys())

    def close(self) -> None:
        """Give the memory back."""
        for bucket in self.buckets:
            bucket.close()
        self.parameters.close()

    def withdraw(self) -> None:
        """Close a section that could not be made as a whole: what it has put into a store goes, too."""
        for column in self.columns:
            with contextlib.suppress(ZerortError):
                column.delete()
        self.close()
