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
from collections.abc import Mapping

from zerort.buffer import PLAIN, CodedGather, GradientBucket, RangeGather
from zerort.comm.agreed import raise_together
from zerort.config import Tier
from zerort.engine.context import Context
from zerort.engine.model.division import Division, needs_whole_tensors
from zerort.engine.model.gradients.section import SectionGradients
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.gradients import SummedGradient, SummedInMemory
from zerort.engine.residence.parameters import Parameters
from zerort.engine.rows.table import RowTable
from zerort.engine.step.state import OptimizerState
from zerort.engine.step.state_entry import Streaming
from zerort.engine.wire.coding import range_codec
from zerort.errors import DeviceMemoryError, ZerortError
from zerort.layout import Partition, Placement
from zerort.typing import Array

__all__ = ["Section"]


class Section(SectionGradients):
    """Tensors of one dtype, all trainable or all frozen. Every rank makes it at once.

    Args:
        name: Unit and dtype, for errors and traces.
        part: Its tensors, in the order in which they should lie, their optimizers and the form of their state.
        context: What the runtime's parts share.
    """

    table: RowTable | None = None
    """This rank's rows, if they are gathered, reduced and updated alone (`RowSection`)."""

    def __init__(
        self,
        name: str,
        part: Division,
        *,
        context: Context,
    ) -> None:
        optimizers = part.optimizers
        self.is_lazy = part.lazy
        """Whether rows without a gradient stay as they are (`RowSection`)."""
        self.needs_whole_tensors = any(map(needs_whole_tensors, (optimizers or {}).values()))
        """Whether an optimizer of its tensors looks at whole ones: then all of it is in memory."""
        tiers = context.tiers_of(name)
        if self.needs_whole_tensors and tiers.is_offloaded(context.backings.reach):
            tiers = _without_streaming(name, rank=context.mesh.shard.rank)
        cut = part.cut(context.run.cut)
        self.granule = cut.granule
        """Elements: ranges of ranks begin at multiples of it."""
        shapes = {full: spec.shape for full, spec in part.tensors.items()}
        layout, partition = cut.of(shapes, dtype=part.dtype)
        super().__init__(name, layout, partition, tiers=tiers, context=context)
        self._optimizers, self._master, self._rows, self._is_sparse = optimizers, part.master, part.rows, part.is_sparse
        self.parameters: Parameters
        self.state: OptimizerState | None = None
        self.make_parts()
        if optimizers is not None:
            self._make_bucket()

    def make_parts(self, before: Section | None = None) -> None:
        """Make what is cut over the ranks, as the partition says; what another section has of it whole is shared.

        Every rank calls this. There are no values yet.
        """
        context = self._context
        self.parameters = context.backings.parameters(
            self.layout,
            self.partition,
            placement=self.parameter_placement,
            residence=self.tiers,
            name=self._stored_as,
            traffic=context.ledger.moved,
            whole=None if before is None else before.parameters.at_rest,
            gather=self._gather(),
            rows=self._rows,
            uncoded=context.ledger.uncoded,
            secondary=context.plan.secondary is not None,
            copy=None if before is None else before.parameters.host_copy,
            is_current=before is not None and before.parameters.is_copy_current,
        )
        if self._optimizers is None:
            return
        if before is None or context.plan.state.placement is Placement.SHARDED:
            self.state = self._make_state(before)
        self._make_offloaded_gradient()

    @property
    def parameter_placement(self) -> Placement:
        """How its parameters lie over the ranks."""
        return self._context.plan.parameter.placement

    def recut(self, partition: Partition) -> Section:
        """Return the same section on another partition, without a bucket; `make_parts` has yet to make what is its own.

        Parameters that this rank reaches as a whole, and state that it holds as a whole, belong to both.
        """
        made = copy.copy(self)
        made.partition, made.bucket, made._cuts = partition, None, self._cuts + 1
        return made

    def swap_parts(self, other: Section) -> None:
        """Exchange what `recut` has made for what was there: the bucket stays, and has no gradients now."""
        for part in ("partition", "parameters", "state", "_gradient", "_nodes", "_tied_arrays", "_cuts"):
            mine, theirs = getattr(self, part), getattr(other, part)
            setattr(self, part, theirs)
            setattr(other, part, mine)
        self._recut_buckets()

    def _gather(self) -> RangeGather:
        """Return how its ranges become the whole."""
        context = self._context
        if self._rows is not None or self.parameter_placement is not Placement.SHARDED:
            return PLAIN  # what rests as codes travels as these
        group = context.mesh.shard
        apart = len(set(group.hosts)) > 1 if context.device.in_host_memory else not group.one_host
        codec = range_codec(context.coding, self.layout.dtype, is_sparse=self._is_sparse and apart)
        return PLAIN if codec is None else CodedGather(codec, context.slots.codes, context.ledger.uncoded)

    @property
    def codes_nbytes(self) -> int:
        """Bytes of the codes that its parameters are gathered as; 0 if they are gathered as they are."""
        return self._gather().room_nbytes(self.partition)

    def _make_state(self, before: Section | None) -> OptimizerState:
        """Make the state on all ranks, or on none: one rank's GPU may have less left than another's."""
        context = self._context
        assert self._optimizers is not None
        made: OptimizerState | None = None
        error: DeviceMemoryError | None = None
        try:
            made = OptimizerState(
                self.layout,
                self.partition,
                rank=self._group.rank,
                whole=context.plan.state.placement is Placement.REPLICATED,
                optimizers=self._optimizers,
                master=self._master,
                name=self._stored_as,
                streaming=self._streaming(),
                device=self._device,
                zeros=context.host.zeros if self._is_beyond_reach(self.tiers.state) else None,
                before=None if before is None else before.state,
            )
        except DeviceMemoryError as caught:
            error = caught
        if not self._device.in_host_memory:
            raise_together(self._group, error, name="register")
        assert made is not None
        return made

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
    def columns(self) -> list[ChunkedArray]:
        """Everything of it that may rest elsewhere than in memory."""
        found = [] if self.state is None else list(self.state.columns.values())
        return [*found, self.parameters.array, *self.offloaded_gradient]

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
        own = self.parameters.stored_partition.of(self._group.rank)
        return self.shard.checksum(max(min(own.stop, self.parameters.stored_layout.end) - own.first, 0))

    def finish_reduce(self) -> SummedGradient:
        """Wait for the reduction and return the summed gradient as the optimizer needs it. Every rank calls this."""
        assert isinstance(self.bucket, GradientBucket)
        assert self.state is not None
        array = self.bucket.finish_reduce()
        if self._sink is not None:
            return self._sink
        column = ChunkedArray(self.name, self.state.cuts, array, device=self._device)
        return SummedInMemory(column)

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write new values while no gather is under way; these tensors' master weights follow. No communication."""
        self.parameters.assign(values)
        if self.state is not None:
            self.state.take_master_from(self.owned, names=values.keys())
            self.state.forget_masks(values.keys())

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


def _without_streaming(name: str, *, rank: int) -> SectionResidence:
    """Return where a section rests that cannot be updated chunk by chunk, and say so."""
    if rank == 0:
        warnings.warn(
            f"{name!r} stays in memory: an optimizer that looks at whole tensors, or prunes them, cannot update it "
            "chunk by chunk. Use AdamW, SGD or Lion, without sparsity, for what should rest elsewhere.",
            RuntimeWarning,
            stacklevel=2,
        )
    return SectionResidence(parameter=Tier.DEVICE, gradient=Tier.DEVICE, state=Tier.DEVICE)
