"""`GradientBucket`: collects the gradients of one flat layout and fires their reduction when it is full.

    add(name, gradient) … add(name, gradient)      written where they belong, in the bucket's dtype
    fire()                                         PARTIAL → the plan's placement, on the group's stream
    end_step()                                     behind the last: the sum over copies of the model
    finish_reduce()                                → the placement that the optimizer needs, before the step

A bucket that is SHARDED lives in a slot from the first gradient of a micro-step to the end of its reduction; every
micro-step is reduced, and its `GradientSink` keeps this rank's range of the sum. A `whole` one is an array per rank, in
which micro-steps are summed until the last is reduced (decision 0087). With a `tree` micro-steps are leaves of one
fixed pairwise tree: a SHARDED bucket sends slices unsummed to a sink that folds them, a `whole` one sums them in the
tree and is reduced by `finish_reduce`. Another unit's gradients of a tensor have a bucket of their own, whose sink is
the tensor's range of this one's sum (`TiedRange`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from zerort.buffer.coded.reduce import CodedReduce
from zerort.buffer.collecting import GradientCollector
from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.leaves import Leaves
from zerort.buffer.redistribute import redistribute
from zerort.buffer.sinks import GradientSink, ReduceInto, SummedShard
from zerort.buffer.tree import TreeSum
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["GradientBucket"]


class GradientBucket(GradientCollector):
    """The gradients of one flat layout, between backward and the step. Every rank makes it at once.

    Args:
        layout: Where each gradient lies; its dtype is the one they are summed in.
        partition: Which rank holds which range of the sum.
        group: The ranks whose gradients are summed.
        placement: How gradients rest until the step: REPLICATED, PARTIAL or SHARDED.
        needed: How the optimizer wants them: REPLICATED or SHARDED.
        micro_steps: Rounds of gradients per step.
        slots: Where gradients are collected.
        sink: Keeps the sum where it is SHARDED; None: in memory. With a tree it has to fold slices.
        tree: The leaves of a fixed pairwise tree: a micro-step is one of them. Dealt in turn, unless the bucket is
            whole.
        whole: Sum micro-steps in a whole array even where gradients are SHARDED, and reduce once.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
        kernels: Those of the group's device.
        replicas: The ranks that hold the same range of other copies of the model; None: there is one.
        codec: How gradients travel as codes; None: they travel as they are.
    """

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        group: Group,
        placement: Placement,
        needed: Placement,
        slots: Slots,
        sink: GradientSink | None = None,
        micro_steps: int = 1,
        tree: Leaves | None = None,
        whole: bool = False,
        name: str = "",
        traffic: Counter[str] | None = None,
        kernels: BucketKernels = HOST_KERNELS,
        replicas: Group | None = None,
        codec: CodedReduce | None = None,
    ) -> None:
        self.name = name
        self._group = group
        self._replicas = replicas
        self._codec = codec
        self._placement = placement
        self._needed = needed
        self._traffic = traffic
        whole = whole or placement is not Placement.SHARDED
        self._copy = 0 if replicas is None else replicas.rank
        dtype = numpy_dtype(layout.dtype)
        made: TreeSum | None = None
        if tree is not None and whole:
            made = TreeSum(
                tree,
                self._copy * group.size + group.rank,
                numel=layout.numel,
                dtype=dtype,
                device=group.device,
                kernels=kernels,
                empty=self._empty,
                replicas=replicas,
            )
        super().__init__(
            layout,
            device=group.device,
            slots=slots,
            resident=group.zeros(layout.numel, dtype, name=name) if whole else None,
            tree=made,
            kernels=kernels,
        )
        self._dealt = None if whole else tree  # leaves whose slices a sink folds
        self.sink: GradientSink | None = None
        """What keeps this rank's range of the sum; None if gradients are whole."""
        self._cut(partition, sink)
        self.needs_slots = not whole or (micro_steps > 1 and tree is None)
        """Whether gradients may be collected in slots."""
        self.leaves_slots_busy = not whole
        """Whether a slot is still read after the bucket has fired."""
        self.fires = placement is not Placement.PARTIAL and self._tree is None
        """Whether `fire` calls the other ranks of a copy of the model."""
        self.calls = self.fires * (2 if codec is not None and codec.senders.sum_first else 1)
        """How often it calls them."""
        self.fires_over_copies = self.fires and not (self.sink is not None and self.sink.sums_copies)
        """Whether `end_step` calls the copies."""
        self.reduces_micro_steps = not whole
        """Whether every micro-step is fired, or the last one alone."""
        self.reduction: Ticket[Array] | None = None
        """The sum over one copy of the model, from when it was fired."""
        self._fired: list[Ticket[Array]] = []  # of this step
        self._over_copies: Ticket[Array] | None = None  # the same, summed in place over all copies
        self._unheard: list[tuple[Group, Ticket[Array]]] = []  # of those two, what nobody has waited for
        self._unsummed: Array | None = None  # this copy's sum, until it is summed over all
        self._read: Ticket[Array] | None = None  # done when the slot is no longer read
        self.reset()

    def _cut(self, partition: Partition, sink: GradientSink | None) -> None:
        self._partition = partition
        self._own = partition.of(self._group.rank).slice
        if self._resident is None and sink is None:
            numel = partition.counts[self._group.rank]
            sink = SummedShard(numel, self.dtype, device=self._device, kernels=self._kernels)
        self.sink = sink if self._resident is None else None

    def recut(self, partition: Partition, *, sink: GradientSink | None) -> None:
        """Give the ranks other ranges of the next sums. Every rank calls this, between steps.

        Args:
            partition: Which rank holds which range from now on.
            sink: Keeps this rank's range where it is SHARDED; None: in memory.
        """
        self.reset()
        self._cut(partition, sink)

    def reset(self) -> None:
        """Forget all gradients."""
        if self._slot is not None:
            # gpu-wait: a_slot_is_read_also_if_its_sum_cannot_be_put_away [after=self._read -> ]
            self._slot.release(after=self._read)
            self._slot = None
        for group, ticket in self._unheard:
            group.disregard(ticket)
        self._unheard.clear()
        self._fired.clear()
        self.reduction = self._read = self._over_copies = self._unsummed = None
        self._placed = Placement.PARTIAL
        self._forget()
        if self.sink is not None:
            self.sink.reset()
        if self._codec is not None and self._codec.residual is not None:
            self._codec.residual.restore()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds from the reduction to the step; all the time, if the bucket is resident."""
        if self._resident is None:
            assert self.sink is not None
            return self.sink.nbytes
        return self._resident.nbytes + (0 if self._tree is None else self._tree.nbytes)

    def end_micro_step(self) -> None:
        """Close this micro-step: what has no gradient counts as zero. Nothing is communicated."""
        super().end_micro_step()
        if self.reduces_micro_steps:
            self._placed = Placement.PARTIAL

    def _empty(self, numel: int, dtype: np.dtype[Any]) -> Array:
        """Return memory of this rank's own: on GPUs all ranks get it or none, for one may have less left."""
        device = self._group.device
        if device.in_host_memory:
            alone: Array = device.empty(numel, dtype)
            return alone
        return self._group.zeros(numel, dtype, name=self.name)

    # -- reducing --------------------------------------------------------------------------------------------------

    def fire(self) -> None:
        """Start to turn this rank's micro-step, or the sum of them, into what rests until the step. All ranks do."""
        if self._tree is None:
            self._move(self._placement)
        if self._slot is not None:
            self._slot.release(after=self._read)  # gpu-wait: no_order_of_streams_changes_a_walk [after=self._read -> ]
            self._slot = self._read = None  # the sum may be put away by now: nothing here keeps its memory

    def reduce_within(self, reduce_into: ReduceInto, within: slice) -> Ticket[Array]:
        """Start another bucket's reduction and add it to a range of this one's sum, which is SHARDED."""
        assert self.sink is not None
        self.reduction = self.sink.put(reduce_into, within=within)
        if self._replicas is not None:
            self._unsummed = self.sink.array
        return self.reduction

    def end_step(self) -> None:
        """Start what follows the last round, once it is fired: the sum over copies of the model. All ranks do."""
        if self._tree is None and self._replicas is not None and self._replicas.runs_ahead:
            self._sum_over_copies()

    def finish_reduce(self) -> Array:
        """Wait for the reduction and return the summed gradient as the optimizer needs it. Every rank calls this."""
        if self._placed is Placement.PARTIAL:
            self._move(self._needed)
        self._sum_over_copies()
        self._move(self._needed)
        summed = self._arrived()
        return summed if self.sink is None else self.sink.total(summed, name=self.name)

    def wait(self) -> None:
        """Wait for what was fired; raise what went wrong with it."""
        for ticket in (*self._fired, self._over_copies):
            if ticket is not None:
                ticket.wait()  # not-gpu: for its error; `finish_reduce` orders what is computed
        self._unheard.clear()

    def _arrived(self) -> Array:
        """Return the sum for what the caller does next."""
        assert self.reduction is not None
        summed: Array = self._device.order_after(self.reduction)  # gpu-wait: a_bucket_settles_what_it_has_just_fired
        if self._over_copies is not None:
            self._device.order_after(self._over_copies)  # gpu-wait: gradients_that_rest_partial
        self._unheard.clear()
        return summed

    def _sum_over_copies(self) -> None:
        """Start to sum this copy's sum over all copies of the model, in place."""
        if self._replicas is None or self._unsummed is None:
            return
        array, self._unsummed = self._unsummed, None
        if self._traffic is not None:
            first = self._own.start if self._placed is Placement.SHARDED else 0
            self._traffic["all_reduce"] += max(min(array.size, self.layout.end - first), 0) * array.itemsize
        # not-gpu: calls over GPUs take turns
        self._over_copies = self._replicas.all_reduce(
            array, out=array, name=self.name, eager=False, after=self.reduction
        )
        self._unheard.append((self._replicas, self._over_copies))

    def _move(self, to: Placement) -> None:
        if to is self._placed:
            return
        if self._placed is not Placement.PARTIAL:
            source = self._arrived()
        else:
            source = self._apart() if self._resident is None else self._resident
        in_place = False

        def reduce_into(out: Array | None = None) -> Ticket[Array]:
            nonlocal in_place
            in_place = out is None
            self._read = redistribute(
                self._group,
                source,
                placement=self._placed,
                to=to,
                partition=self._partition,
                out=source[self._own] if out is None else out,
                name=self.name,
                tree=self._tree,
                senders=self._senders(),
                padding=self.layout.numel - self.layout.end,
                traffic=self._traffic,
                codec=self._codec_for_micro_step(),
            )
            return self._read

        was_partial = self._placed is Placement.PARTIAL
        if self.sink is not None:
            self.reduction = self.sink.put(reduce_into)
            if in_place:
                self._read = self.reduction
        else:
            self.reduction = reduce_into(source if to is not Placement.SHARDED else None)
        self._fired.append(self.reduction)
        self._placed = to
        if self._replicas is not None or self.reduces_micro_steps:  # a step may end before it is waited for
            self._unheard.append((self._group, self.reduction))
        if self._replicas is not None and self._tree is None and was_partial:  # a tree is summed over them by itself
            summed = source if to is not Placement.SHARDED else source[self._own]
            self._unsummed = summed if self.sink is None else self.sink.array

    def _codec_for_micro_step(self) -> CodedReduce | None:
        """Return the codec, told who sends and which tensors had no gradient: in this step so far, or in its leaf."""
        codec, senders, seen = self._codec, self._senders(), self.seen
        if codec is None:
            return None
        if senders is not None:
            codec, seen = codec.of_leaves(len(senders), at=self.micro_steps - 1), self._closed
        if codec.residual is None:
            return codec
        return replace(codec, unfed=tuple(e.slice for e in self.layout.extents if e.name not in seen))

    def _senders(self) -> range | None:
        """Return the ranks that have a leaf in the micro-step that was closed last, if slices travel unsummed."""
        if self._dealt is None:
            return None
        return range(len(self._dealt.of_micro_step(self._copy, self.micro_steps - 1)))

    def close(self) -> None:
        """Give the memory back."""
        self.reset()
        if self._resident is not None:
            self._group.release_local(self._resident)

    def __repr__(self) -> str:
        filled = f"{len(self._present)} of {len(self.layout.extents)} filled"
        return f"GradientBucket({self.name!r}, {self._placement}, {filled})"
