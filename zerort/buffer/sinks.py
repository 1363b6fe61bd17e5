"""Where this rank's range of a summed gradient is kept from the first micro-step of a step to its update.

    bucket ── reduce_into(out) ──> GradientSink     the first: into memory of its own
    bucket ── reduce_into() ─────> GradientSink     the others: in the bucket's slot, then added to the sum so far
    tied bucket ── reduce_into ──> GradientSink     another unit's gradient of one tensor: into its range of the sum

A sink decides where a reduction goes and what happens behind it; a bucket knows neither. `SummedShard` keeps the sum in
memory, `FoldedShard` folds slices in a fixed tree. Sinks that offload it are in `zerort.engine.residence`.

[Note: late memory]
Memory is fullest when backward begins: all activations are there, and no gradient. Each unit's gradients take the place
of its activations. So a shard is allocated when its reduction is fired and freed after the step, as activations are;
one that stayed would be added to the peak. It is private: nobody but its owner reads or writes it. Slots do the same
where ranks can read each other's memory in place and a step has one micro-step (decisions 0033, 0161).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.device import Ticket
from zerort.typing import Array, Device

__all__ = ["GradientSink", "ReduceInto", "SummedShard", "TiedSums"]


class ReduceInto(Protocol):
    """Starts the reduction of one micro-step over the ranks."""

    def __call__(self, out: Array | None = None) -> Ticket[Array]:
        """Start it into ``out``; None: in place, in memory that is free again when what `GradientSink.put` returns is.

        The result is this rank's range of the sum.
        """


TiedSums = Sequence[tuple[slice, Callable[[], Array]]]
"""Ranges of a shard, and what returns other units' gradients of each, summed: in order of registration."""


class GradientSink(Protocol):
    """Where the sum of a step's reductions is kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes from the first reduction to the end of the step."""

    @property
    def sums_copies(self) -> bool:
        """Whether `total` sums over copies of the model; else the bucket sums ``array`` over them."""

    @property
    def array(self) -> Array | None:
        """The sum, if it is in memory; not before the last ticket is done."""

    def put(self, reduce_into: ReduceInto, /, *, within: slice | None = None) -> Ticket[Array]:
        """Start a reduction and add its result to what is here; done when it is.

        Args:
            reduce_into: Starts the reduction.
            within: The elements of this rank's range that it is of; None: all.
        """

    def total(self, summed: Array, *, name: str) -> Array:
        """Return the step's sum for what the caller does next, given the last ticket's result. Every rank calls this.

        Args:
            summed: What that ticket has promised; it is done.
            name: What to call this in errors and traces.
        """

    def reset(self) -> None:
        """Forget the sum, and what went wrong with it."""


class SummedShard:
    """A sum in memory: one shard, however many micro-steps are added to it.

    Args:
        numel: Elements of this rank's range.
        dtype: What they are summed in.
        device: Whose memory it is.
        kernels: That device's.
    """

    sums_copies = False

    def __init__(
        self, numel: int, dtype: np.dtype[Any], *, device: Device, kernels: BucketKernels = HOST_KERNELS
    ) -> None:
        self.array: Array | None = None
        self._first: Ticket[Array] | None = None  # what fills the shard, before anything is added to it
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._kernels = kernels

    @property
    def nbytes(self) -> int:
        """Bytes from the first reduction to the end of the step."""
        return self._numel * self._dtype.itemsize

    def put(self, reduce_into: ReduceInto, *, within: slice | None = None) -> Ticket[Array]:
        """Reduce into the shard, or add to it; see `GradientSink.put`."""
        place = slice(None) if within is None else within
        if self.array is None:
            self.array = self._device.scratch(self._numel, self._dtype)
            if within is not None:
                self.array.view(np.uint8).fill(0)
            self._first = reduce_into(self.array[place])
            return self._first
        shard, first, reduction = self.array, self._first, reduce_into()
        assert first is not None

        def add() -> Array:
            # Others that are added come one by one, on this stream. The first one may be decoded on another.
            first.wait()  # not-gpu: reductions are done in order there, and codes are decoded on one stream
            self._kernels.add_into(shard[place], reduction.wait())  # gpu-wait: micro_steps_are_added_to_the_shard
            return shard

        stream = self._device.named_stream("reduce")
        ticket: Ticket[Array] = stream.submit(add, name="add to the shard", eager=reduction.done() and first.done())
        return ticket

    def total(self, summed: Array, *, name: str) -> Array:
        """Return the shard; see `GradientSink.total`."""
        return summed

    def reset(self) -> None:
        """Give the shard back."""
        self.array = self._first = None
