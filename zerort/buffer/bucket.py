"""`GradientBucket`: collects the gradients of one flat layout and fires their reduction when it is full.

    add(name, gradient) … add(name, gradient)      written where they belong, in the bucket's dtype
    fire()                                         PARTIAL → the plan's placement, on the group's stream
                                                   behind it, with copies of the model: the sum over those
    finish_reduce()                                → the placement that the optimizer needs, before the step

A bucket that rests SHARDED lives in a slot from the first gradient to the end of the reduction; from then to the step
this rank's range of the sum is kept. Any other is resident: a whole array per rank, which also sums the rounds
(micro-steps) that are reduced at once. A `tree` bucket sums its rounds in one fixed pairwise tree, and is reduced by
`finish_reduce`.

[Note: late memory]
Memory is fullest when backward begins: all activations are there, and no gradient. Each unit's gradients take the place
of its activations. So a shard is allocated when its reduction is fired and freed after the step, as activations are;
one that stayed would be added to the peak. It is private: nobody but its owner reads or writes it. Slots do the same
where ranks can read each other's memory in place (decision 0033).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, SupportsInt

import numpy as np

from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.redistribute import redistribute
from zerort.buffer.tree import TreeSum
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slot, Slots
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["GradientBucket", "GradientSink"]


class GradientSink(Protocol):
    """Where a summed gradient rests, if that is not in memory."""

    def put(self, reduce_into: Callable[[Array], Ticket[Array]], /) -> Ticket[Array]:
        """Start a reduction into memory of its own and put the result away; done when it is."""

    def reset(self) -> None:
        """Forget the last one, and what went wrong with it."""


class GradientBucket:
    """The gradients of one flat layout, between backward and the step. Every rank makes it at once.

    Args:
        layout: Where each gradient lies; its dtype is the one they are summed in.
        partition: Which rank holds which range of the sum.
        group: The ranks whose gradients are summed.
        placement: How gradients rest until the step: REPLICATED, PARTIAL or SHARDED.
        needed: How the optimizer wants them: REPLICATED or SHARDED.
        micro_steps: Rounds of gradients that are summed before they are reduced.
        slots: Where gradients are collected.
        sink: Puts the sum away where it is SHARDED, instead of keeping it in memory.
        tree: Sum in one fixed pairwise tree, at the step.
        resident: Keep a whole array even where a slot would do: for gradients that come from several places.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
        kernels: Those of the group's device.
        replicas: The ranks that hold the same range of other copies of the model; None: there is one.
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
        tree: bool = False,
        resident: bool = False,
        name: str = "",
        traffic: Counter[str] | None = None,
        kernels: BucketKernels = HOST_KERNELS,
        replicas: Group | None = None,
    ) -> None:
        self.layout = layout
        self.name = name
        self.dtype = numpy_dtype(layout.dtype)
        self._partition = partition
        self._group = group
        self._replicas = replicas
        self._placement = placement
        self._needed = needed
        self._slots = slots
        self._traffic = traffic
        self._kernels = kernels
        self._device = group.device
        self._tree: TreeSum | None = None
        if tree:
            self._tree = TreeSum(
                micro_steps,
                numel=layout.numel,
                dtype=self.dtype,
                device=self._device,
                kernels=kernels,
                empty=self._empty,
            )
        self._own = partition.of(group.rank).slice
        keep_whole = resident or micro_steps > 1 or tree or placement is not Placement.SHARDED
        self._resident = group.empty(layout.numel, self.dtype, name=name) if keep_whole else None
        self.sink = None if keep_whole else sink
        """What puts the sum away; None if it stays in memory."""
        self._leaf: Array | None = self._empty(layout.numel, self.dtype) if tree else None
        self.needs_slots = not keep_whole or (micro_steps > 1 and not tree)
        """Whether gradients may be collected in slots."""
        self.leaves_slots_busy = not keep_whole
        """Whether a slot is still read after the bucket has fired."""
        self._gaps = _gaps_of(layout)
        self._slot: Slot | None = None
        self.fires = placement is not Placement.PARTIAL and not tree
        """Whether `fire` calls the other ranks: once, and once more over the copies of the model."""
        self.reduction: Ticket[Array] | None = None
        """The sum over one copy of the model, from when it was fired."""
        self._over_copies: Ticket[Array] | None = None  # the same, summed in place over all copies
        self._unheard: list[tuple[Group, Ticket[Array]]] = []  # of those two, what nobody has waited for
        self._unsummed: Array | None = None  # this copy's sum, until it is summed over all
        self._read: Ticket[Array] | None = None  # done when the slot is no longer read
        self.reset()

    def reset(self) -> None:
        """Forget all gradients."""
        if self._slot is not None:
            # gpu-wait: a_slot_is_read_also_if_its_sum_cannot_be_put_away [after=self._read -> ]
            self._slot.release(after=self._read)
            self._slot = None
        for group, ticket in self._unheard:
            group.disregard(ticket)
        self._unheard.clear()
        self.reduction = self._read = self._over_copies = self._unsummed = None
        self._present: set[str] = set()  # in this round
        self._unseen = False  # gradients came that nobody has looked at
        self.seen: set[str] = set()
        """Names that had a gradient in any round since the last reset."""
        self.rounds = 0
        """Rounds of gradients that are complete."""
        self._nonfinite: list[tuple[str, SupportsInt]] = []  # tensors, or "" for all; where, or the promise of it
        self._placed = Placement.PARTIAL
        if self._tree is not None:
            self._tree.clear()
        if self.sink is not None:
            self.sink.reset()

    @property
    def nonfinite(self) -> str | None:
        """The first tensor in which a gradient of this rank's own holds NaN or infinity."""
        for name, promise in self._nonfinite:
            at = int(promise)
            if at >= 0:
                return name or self.layout.overlaps(at, at + 1)[0].extent.name
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds from the reduction to the step; all the time, if the bucket is resident."""
        if self._resident is None:
            return 0 if self.sink is not None else self._partition.counts[self._group.rank] * self.dtype.itemsize
        leaf = 0 if self._leaf is None else self._leaf.nbytes
        return self._resident.nbytes + leaf + (0 if self._tree is None else self._tree.nbytes)

    # -- filling ---------------------------------------------------------------------------------------------------

    def views(self) -> dict[str, Array]:
        """Return writable arrays for all gradients of this round: nothing is copied later, unless to sum rounds."""
        whole = self._apart() if self.rounds and self._leaf is None else self._collecting()
        self._present = {extent.name for extent in self.layout.extents}
        self._unseen = True
        return {extent.name: whole[extent.slice].reshape(extent.shape) for extent in self.layout.extents}

    def add(self, name: str, gradient: Array, *, donate: bool = False) -> None:
        """Take one gradient of this round; one that comes twice is summed (a tensor that was used twice).

        Args:
            name: Whose it is.
            gradient: The whole of it.
            donate: The array is the bucket's from now on, which may use it where it lies instead of copying it.
        """
        flat = self._device.flat(gradient)
        found: int | None
        if donate and self._is_all(flat):
            self._slot = self._slots.lease(flat.nbytes, memory=flat.view(np.uint8))
            found = self._kernels.check(flat)
        elif name in self._present or self._sums_rounds():
            place = self._collecting()[self.layout.of(name).slice]
            self._add(place, flat)
            found = self._kernels.check(place)
        else:
            found = self._kernels.copy_checked(self._collecting()[self.layout.of(name).slice], flat)
        if found is None:
            self._unseen = True
        elif found >= 0:
            self._nonfinite.append((name, found))
        self._present.add(name)

    @property
    def filling(self) -> bool:
        """Whether gradients of a round that is not closed are here."""
        return bool(self._present)

    def end_round(self) -> None:
        """Close this round: what has no gradient counts as zero. Nothing is communicated."""
        if self._slot is not None and self._resident is not None:  # written through views, beside the sum so far
            apart = self._apart()
            for gap in self._gaps:  # the slot may hold another bucket's gradients there
                apart[gap].view(np.uint8).fill(0)
            self._find_nonfinite(apart)
            self._kernels.add_into(self._resident, apart)
            self._slot.release()
            self._slot = None
        elif not self._sums_rounds():
            whole = self._collecting()
            for extent in self.layout.extents:
                if extent.name not in self._present:
                    whole[extent.slice].view(np.uint8).fill(0)
            for gap in self._gaps:
                whole[gap].view(np.uint8).fill(0)
            if self._unseen:
                self._find_nonfinite(whole)
        elif self._unseen:
            self._find_nonfinite(self._collecting())
        if self._tree is not None:
            assert self._leaf is not None
            self._tree.add(self._leaf)
        self.seen |= self._present
        self._present, self._unseen = set(), False
        self.rounds += 1

    def _empty(self, numel: int, dtype: np.dtype[Any]) -> Array:
        """Return memory of this rank's own: on GPUs all ranks get it or none, for one may have less left."""
        if self._device.in_host_memory:
            alone: Array = self._device.empty(numel, dtype)
            return alone
        return self._group.empty(numel, dtype, name=self.name)

    def _is_all(self, flat: Array) -> bool:
        """Say whether ``flat`` is as good as a slot that it would be copied into."""
        in_slot = self._resident is None and self._slot is None and not self._slots.persistent
        return in_slot and flat.size == self.layout.numel and flat.dtype == self.dtype

    def _sums_rounds(self) -> bool:
        """Say whether this round's gradients go on top of the rounds before."""
        return self.rounds > 0 and self._leaf is None

    def _collecting(self) -> Array:
        """Return where gradients go: the whole of this round's, or of all rounds' sum."""
        if self._leaf is not None:
            return self._leaf
        return self._apart() if self._resident is None else self._resident

    def _apart(self) -> Array:
        if self._slot is None:
            self._slot = self._slots.lease(self.layout.nbytes)
        return self._slot.array(self.layout.numel, self.dtype)

    # -- reducing --------------------------------------------------------------------------------------------------

    def fire(self) -> None:
        """Start to turn this rank's sum into what rests until the step. Every rank calls this."""
        if self._tree is not None:
            assert self._resident is not None
            self._device.put(self._tree.result(), out=self._resident)
            self._tree.clear()
        if self._tree is None:
            self._move(self._placement)
            if self._replicas is not None and self._replicas.runs_ahead:
                self._sum_over_copies()
        if self._slot is not None:
            self._slot.release(after=self._read)  # gpu-wait: no_order_of_streams_changes_a_walk [after=self._read -> ]
            self._slot = self._read = None  # the sum may be put away by now: nothing here keeps its memory

    def finish_reduce(self) -> Array:
        """Wait for the reduction and return the summed gradient as the optimizer needs it. Every rank calls this."""
        if self._placed is Placement.PARTIAL:
            self._move(self._needed)
        self._sum_over_copies()
        self._move(self._needed)
        return self._arrived()

    def wait(self) -> None:
        """Wait for what was fired; raise what went wrong with it."""
        for ticket in (self.reduction, self._over_copies):
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

        def reduce_into(out: Array) -> Ticket[Array]:
            if self._replicas is not None and self._placed is Placement.PARTIAL:
                self._unsummed = out
            self._read = redistribute(
                self._group,
                source,
                placement=self._placed,
                to=to,
                partition=self._partition,
                out=out,
                name=self.name,
                tree=None if self._tree is None else self._kernels,
                padding=self.layout.numel - self.layout.end,
                traffic=self._traffic,
            )
            return self._read

        if to is not Placement.SHARDED:
            self.reduction = reduce_into(source)
        elif self.sink is not None:
            self.reduction = self.sink.put(reduce_into)
        else:
            self.reduction = reduce_into(source[self._own] if self._resident is not None else self._new_shard())
        self._placed = to
        if self._replicas is not None:  # a step may end before it is waited for
            self._unheard.append((self._group, self.reduction))

    def _new_shard(self) -> Array:
        shard: Array = self._device.scratch(self._partition.counts[self._group.rank], self.dtype)
        return shard

    def _find_nonfinite(self, whole: Array) -> None:
        self._nonfinite.append(("", self._kernels.look_for_nonfinite(whole)))

    def _add(self, place: Array, gradient: Array) -> None:
        """Add a gradient of whatever precision to what is there."""
        if gradient.dtype.itemsize > place.dtype.itemsize:
            wide, gradient = gradient, self._device.scratch(place.size, place.dtype)
            self._kernels.cast_into(gradient, wide)
        self._kernels.add_into(place, gradient)

    def close(self) -> None:
        """Give the memory back."""
        self.reset()
        if self._resident is not None:
            self._group.release_local(self._resident)

    def __repr__(self) -> str:
        filled = f"{len(self._present)} of {len(self.layout.extents)} filled"
        return f"GradientBucket({self.name!r}, {self._placement}, {filled})"


def _gaps_of(layout: FlatLayout) -> tuple[slice, ...]:
    """Return the ranges that belong to no tensor: a slot may hold another bucket's gradients there."""
    gaps, end = [], 0
    for extent in layout.extents:
        if extent.offset > end:
            gaps.append(slice(end, extent.offset))
        end = max(end, extent.last)
    if layout.numel > end:
        gaps.append(slice(end, layout.numel))
    return tuple(gaps)
