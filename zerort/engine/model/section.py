"""`Section`: the tensors of a unit that share a dtype and are all trainable, or all frozen.

    trainable    parameters (FlatBuffer), gradients (GradientBucket), optimizer state
    frozen       parameters only: no gradient, no state, no reduction

A section is what a plan is applied to: each of the three parts lies as its residence says, and rests where its
`SectionResidence` say.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from zerort.buffer import FlatBuffer, GradientBucket
from zerort.comm.agreed import raise_together
from zerort.config import Tier
from zerort.engine.context import Context
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray, cut_chunks
from zerort.engine.residence.gradients import OffloadedGradient, SummedGradient, SummedInMemory
from zerort.engine.residence.host_parameters import HostParameters
from zerort.engine.residence.resting_parameters import RestingParameters
from zerort.engine.step.state import OptimizerState
from zerort.engine.step.state_entry import Streaming
from zerort.errors import DeviceMemoryError, StorageError, ZerortError
from zerort.layout import Placement, itemsize
from zerort.layout.dtypes import gradient_dtype
from zerort.native.dtypes import numpy_dtype
from zerort.optim import Optimizer, TensorOptimizer
from zerort.optim.kernels import bucket_kernels_for
from zerort.storage.files.blocks import PAGE_NBYTES
from zerort.storage.files.segments import round_up
from zerort.typing import Array

__all__ = ["Section"]


class Section:
    """Tensors of one dtype, all trainable or all frozen. Every rank makes it at once.

    Args:
        name: Unit and dtype, for errors and traces.
        tensors: Shapes and dtype by full name, in the order in which they should lie.
        optimizers: The tensors' optimizers by full name; None if they are frozen.
        context: What the runtime's parts share.
        resident: Keep whole gradients, because several units contribute to them.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, TensorSpec],
        *,
        optimizers: Mapping[str, Optimizer] | None,
        context: Context,
        resident: bool = False,
    ) -> None:
        group = context.mesh.shard
        dtype = next(iter(tensors.values())).dtype
        self.name = name
        self.layout, self.partition = context.cut.of({full: spec.shape for full, spec in tensors.items()}, dtype=dtype)
        self._group = group
        self._device = group.device
        self._context = context
        self.needs_whole_tensors = any(isinstance(one, TensorOptimizer) for one in (optimizers or {}).values())
        """Whether an optimizer of its tensors looks at whole ones: then all of it is in memory."""
        self.tiers = self._resting_tiers(context.tiers_of(name))
        self.parameters = self._make_parameters()
        self.state: OptimizerState | None = None
        self.bucket: GradientBucket | None = None
        self._gradient: ChunkedArray | None = None  # where it rests, if that is not in memory
        self.gradient_dtypes: tuple[np.dtype[Any], ...] = (numpy_dtype(dtype),)
        if optimizers is not None:
            self.state = self._make_state(optimizers)
            if self._is_offloaded(self.tiers.gradient):
                self._gradient = self._resting_column("gradient", self._summed_in, self.tiers.gradient)
            self.make_bucket(resident=resident)

    @property
    def _summed_in(self) -> str:
        """What gradients are collected and summed in."""
        return gradient_dtype(
            self.layout.dtype, self._context.options.gradient_dtype, over_nccl=self._group.kind == "nccl"
        )

    def _resting_tiers(self, asked: SectionResidence) -> SectionResidence:
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

    def _make_parameters(self) -> FlatBuffer | HostParameters | RestingParameters:
        plan, group, traffic = self._context.plan, self._group, self._context.ledger.moved
        if not self._is_offloaded(self.tiers.parameter):
            placement = plan.parameter.placement
            return FlatBuffer(
                self.layout, self.partition, group=group, placement=placement, name=self.name, traffic=traffic
            )
        column = self._resting_column("parameter", self.layout.dtype, self.tiers.parameter)
        if self.tiers.parameter is Tier.HOST:
            return HostParameters(
                self.layout, self.partition, column=column, group=group, name=self.name, traffic=traffic
            )
        return RestingParameters(
            self.layout, self.partition, column=column, group=group, name=self.name, traffic=traffic
        )

    def _make_state(self, optimizers: Mapping[str, Optimizer]) -> OptimizerState:
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
                name=self.name,
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
        return tier is Tier.NVME or (tier is Tier.HOST and not self._device.in_host_memory)

    def _resting_column(self, kind: str, dtype: str, tier: Tier) -> ChunkedArray:
        """Return a column of this rank's range that is not where computing happens."""
        count = self.partition.counts[self._group.rank]
        cuts = cut_chunks(count, most=self._context.tiers.chunk_numel)
        resident = len(cuts) - 1 if tier is Tier.HOST else 0
        memory = self._context.host.zeros(cuts[resident], dtype)
        name = f"{self.name}/{kind}"
        return ChunkedArray(name, cuts, memory, resident=resident, tiers=self._context.tiers, device=self._device)

    def _streaming(self) -> Streaming | None:
        if not self.is_offloaded:
            return None
        return Streaming(
            tiers=self._context.tiers,
            chunk_numel=self._context.tiers.chunk_numel,
            state=self.tiers.state is Tier.NVME,
            resident_nbytes=self.tiers.state_resident_nbytes,
        )

    @property
    def staged_nbytes(self) -> int:
        """Bytes of a chunk that may pass between a host and a GPU; 0 if nothing of it does. The same on every rank."""
        if self.state is None or self._device.in_host_memory or self._streaming() is None:
            return 0
        widths = [self.layout.dtype, self._summed_in]
        widths += [column.dtype.name for column in self.state.columns.values()]
        longest = min(max(self.partition.counts), self._context.tiers.chunk_numel)
        return longest * sum(map(itemsize, widths))

    @property
    def streamed_nbytes(self) -> int:
        """Bytes of a chunk that passes through the host between a disk and a GPU, page by page; 0 if none does.

        The same on every rank.
        """
        if self.state is None or self._device.in_host_memory:
            return 0
        widths = {
            "parameter": [itemsize(self.layout.dtype)],
            "gradient": [itemsize(self._summed_in)],
            "state": [column.dtype.itemsize for column in self.state.columns.values()],
        }
        cuts = [cut_chunks(count, most=self._context.tiers.chunk_numel) for count in set(self.partition.counts)]
        longest = max(last - first for one in cuts for first, last in pairwise(one))
        return sum(
            round_up(longest * width, PAGE_NBYTES)
            for part, each in widths.items()
            if getattr(self.tiers, part) is Tier.NVME
            for width in each
        )

    @property
    def is_offloaded(self) -> bool:
        """Whether some of it rests elsewhere than where computing happens; the same on every rank."""
        return any(map(self._is_offloaded, (self.tiers.parameter, self.tiers.gradient, self.tiers.state)))

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that a summed gradient takes until it is put away; on GPUs on the rank that takes most. None: none."""
        sink = None if self.bucket is None else self.bucket.sink
        if not isinstance(sink, OffloadedGradient):
            return None
        if self._device.in_host_memory:
            return sink.room_nbytes
        return max(self.partition.counts) * sink.column.dtype.itemsize

    @property
    def columns(self) -> list[ChunkedArray]:
        """Everything of it that may rest elsewhere than in memory."""
        found = [] if self.state is None else list(self.state.columns.values())
        if not isinstance(self.parameters, FlatBuffer):
            found.append(self.parameters.column)
        return found if self._gradient is None else [*found, self._gradient]

    def make_bucket(self, *, resident: bool) -> None:
        """Make the place where gradients are collected, or make it anew. Every rank calls this."""
        context = self._context
        if self.bucket is not None:
            self.bucket.close()
        if resident and self._gradient is not None:
            self._keep_gradient_in_memory()
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
            tree=context.options.deterministic,
            resident=resident,
            name=self.name,
            traffic=context.ledger.moved,
            kernels=bucket_kernels_for(self._device),
            replicas=context.mesh.replicate,
        )

    def _keep_gradient_in_memory(self) -> None:
        """Give up the room on the disk: gradients of several units are summed in memory."""
        assert self._gradient is not None
        with contextlib.suppress(StorageError):  # a file that cannot be deleted goes with the runtime's others
            self._gradient.delete()
        self._gradient = None
        self.tiers = replace(self.tiers, gradient=Tier.DEVICE)
        if self._group.rank == 0:
            warnings.warn(
                f"The gradient of {self.name!r} stays in memory, whole: another unit is tied to it, and their "
                "gradients are summed there. Register tied parameters in one unit for a gradient on NVME.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_sink(self) -> OffloadedGradient | None:
        if self._gradient is None:
            return None
        context = self._context
        return OffloadedGradient(
            self._gradient, block=context.norm_block, slots=context.slots.summed, stream=context.tiers.stream
        )

    @property
    def names(self) -> frozenset[str]:
        """The full names of its tensors."""
        return frozenset(extent.name for extent in self.layout.extents)

    @property
    def owned(self) -> ChunkedArray:
        """The range of the parameters that this rank updates. All of it if every rank has state for all."""
        if self._context.plan.state.placement is not Placement.REPLICATED:
            return self.shard
        array = self.parameters.whole  # each rank writes all of it: it is never gathered
        return ChunkedArray(self.name, (0, array.size), array, device=self._device)

    @property
    def shard(self) -> ChunkedArray:
        """This rank's range of the parameters."""
        if not isinstance(self.parameters, FlatBuffer):
            return self.parameters.column
        array = self.parameters.mine
        cuts: tuple[int, ...] = (0, array.size)
        if self.state is not None and self.state.owned == self.partition.of(self._group.rank):
            cuts = self.state.cuts
        return ChunkedArray(self.name, cuts, array, device=self._device)

    def checksum(self) -> tuple[int, int]:
        """Return the crc32c of this rank's range of the parameters, and its bytes: without what evens ranges out."""
        own = self.partition.of(self._group.rank)
        return self.shard.checksum(max(min(own.last, self.layout.end) - own.first, 0))

    def finish_reduce(self) -> SummedGradient:
        """Wait for the reduction and return the summed gradient as the optimizer needs it. Every rank calls this."""
        assert self.bucket is not None
        assert self.state is not None
        array = self.bucket.finish_reduce()
        if isinstance(self.bucket.sink, OffloadedGradient):
            return self.bucket.sink
        column = ChunkedArray(self.name, self.state.cuts, array, device=self._device)
        return SummedInMemory(column)

    @property
    def storage_error(self) -> StorageError | None:
        """What a disk had against this step's gradients, on this rank alone."""
        sink = None if self.bucket is None else self.bucket.sink
        return sink.error if isinstance(sink, OffloadedGradient) else None

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write new values while no gather is under way; these tensors' master weights follow. No communication."""
        if self.parameters.placement is Placement.REPLICATED:
            whole = self.parameters.whole
            for name, value in values.items():
                flat = np.ascontiguousarray(value).reshape(-1)
                self._device.put(flat, out=whole[self.layout.of(name).slice])
        else:
            self.parameters.pack(values)
        if self.state is not None:
            self.state.take_master_from(self.owned, names=values.keys())

    def close(self) -> None:
        """Give the memory back."""
        if self.bucket is not None:
            self.bucket.close()
        self.parameters.close()

    def withdraw(self) -> None:
        """Close a section that could not be made as a whole: what it has put into a store goes, too."""
        for column in self.columns:
            with contextlib.suppress(ZerortError):
                column.delete()
        self.close()
