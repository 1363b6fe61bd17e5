"""`FoldedShard`: this rank's range of all leaves of a fixed tree, folded as slices of it arrive.

    micro-step 0    g0 g1 g2      slices of three ranks, side by side in a slot     kept: s01 g2
    micro-step 1    g3 g4 g5      g3 to g2, s23 to s01, …                           kept: s0123 s45
    micro-step 2    g6            (a rank without a leaf sends nothing)             kept: s0123456

Slices travel unsummed, and come in the tree's order: what is kept is a binary counter, ⌊log₂ leaves⌋ + 1 shards at
most. Copies of the model fold their own leaves, and exchange what these sum up to with the last (decision 0111).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.leaves import Leaves, Node, insert
from zerort.buffer.sinks import ReduceInto, TiedSums
from zerort.buffer.tree import sum_over_copies
from zerort.comm import Group
from zerort.device import Ticket
from zerort.device.slots import Slots
from zerort.typing import Array, Device

__all__ = ["FoldedShard", "Folding"]


class _Part(NamedTuple):
    """A node of the tree, of this rank's range."""

    array: Array
    is_kept: bool
    """Whether its memory lasts longer than the slot in which slices arrive."""


@dataclass(slots=True)
class Folding:
    """Where one copy's leaves stand in a step: how many micro-steps came, and what they sum up to so far."""

    leaves: Leaves
    """All leaves, dealt in turn."""
    copy: int = 0
    """Whose are folded."""
    micro_steps: int = 0
    """Micro-steps whose slices came, or are on their way."""

    def next_micro_step(self) -> range:
        """Return the leaves of the next micro-step."""
        self.micro_steps += 1
        return self.leaves.of_micro_step(self.copy, self.micro_steps - 1)

    @property
    def nodes(self) -> int:
        """How many nodes all leaves so far sum up to."""
        return self.leaves.nodes_after(self.copy, self.micro_steps)


@dataclass(slots=True)
class _Kept:
    """The nodes of one step, and memory for more."""

    nodes: dict[Node, _Part] = field(default_factory=dict)
    spare: list[Array] = field(default_factory=list)
    made: int = 0
    """Arrays, of nodes and spare ones."""


class FoldedShard:
    """One shard of a fixed tree's sum, in memory; a `GradientSink` whose reductions bring slices side by side.

    Args:
        leaves: All leaves, dealt in turn.
        numel: Elements of this rank's range.
        dtype: What they are summed in.
        device: Whose memory it is.
        slots: Where slices arrive.
        kernels: That device's.
        replicas: The ranks that hold the same range of other copies of the model; None: there is one.
        tied: Other units' gradients of its tensors, each with a tree of its own: added to the root.
    """

    array = None
    sums_copies = True

    def __init__(
        self,
        leaves: Leaves,
        *,
        numel: int,
        dtype: np.dtype[Any],
        device: Device,
        slots: Slots,
        kernels: BucketKernels = HOST_KERNELS,
        replicas: Group | None = None,
        tied: TiedSums = (),
    ) -> None:
        self._leaves = leaves
        self._tied = tied
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._slots = slots
        self._kernels = kernels
        self._replicas = replicas
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept at most, from the first reduction to the end of the step."""
        return self._leaves.held * self._numel * self._dtype.itemsize

    @property
    def room_nbytes(self) -> int:
        """Bytes of the slices of one micro-step."""
        return self.room_for(self._numel)

    def room_for(self, numel: int) -> int:
        """Return the same for another rank, which holds ``numel`` elements."""
        return self._leaves.ranks * numel * self._dtype.itemsize

    def reset(self) -> None:
        """Forget the sum."""
        self._folding = Folding(self._leaves, 0 if self._replicas is None else self._replicas.rank)
        self._kept = _Kept()  # a new one: what is still under way keeps the old
        self._root: Array | None = None

    def put(self, reduce_into: ReduceInto, *, within: slice | None = None) -> Ticket[Array]:
        """Start to bring the slices of a micro-step here and fold them; done when they are.

        Args:
            reduce_into: Starts to put them side by side into the array that it is given, in the order of leaves.
            within: None: other units' gradients have sinks of their own.
        """
        assert within is None
        leaves, kept = self._folding.next_micro_step(), self._kept
        with self._slots.lease(self.room_nbytes).returned_on_error() as slot:
            slot.busy = arrival = reduce_into(slot.array(len(leaves) * self._numel, self._dtype))
            while kept.made < self._folding.nodes:
                kept.spare.append(self._device.scratch(self._numel, self._dtype))
                kept.made += 1

            def fold() -> Array:
                slices = arrival.wait()  # gpu-wait: the_fixed_tree
                self._fold(kept, leaves, slices.reshape(len(leaves), self._numel))
                return slices[:0]

            stream = self._device.named_stream("reduce")
            ticket: Ticket[Array] = stream.submit(fold, name="fold slices", eager=arrival.done())
            slot.release(after=ticket)  # gpu-wait: the_fixed_tree [after=ticket -> ]
        return ticket

    def _fold(self, kept: _Kept, leaves: range, slices: Array) -> None:
        pair = self._pairing(kept)
        for leaf, piece in zip(leaves, slices, strict=True):
            insert(kept.nodes, (0, leaf), _Part(piece, is_kept=False), total=self._leaves.total, pair=pair)
        for node, part in kept.nodes.items():
            if not part.is_kept:
                lasting = kept.spare.pop()
                self._kernels.cast_into(lasting, part.array)
                kept.nodes[node] = _Part(lasting, is_kept=True)

    def _pairing(self, kept: _Kept) -> Callable[[_Part, _Part], _Part]:
        def pair(left: _Part, right: _Part) -> _Part:
            self._kernels.add_into(left.array, right.array)
            if right.is_kept:
                kept.spare.append(right.array)
            return left

        return pair

    def total(self, summed: Array, *, name: str) -> Array:
        """Return the sum over all leaves, once all are folded; see `GradientSink.total`."""
        if self._root is None:
            kept, nodes = self._kept, {node: part.array for node, part in self._kept.nodes.items()}
            if self._replicas is None:
                (self._root,) = nodes.values()
            else:
                self._root = self._sum_over_copies(self._replicas, kept, nodes, name)
            for within, tied_root in self._tied:
                self._kernels.add_into(self._root[within], tied_root())
        return self._root

    def _sum_over_copies(self, replicas: Group, kept: _Kept, nodes: dict[Node, Array], name: str) -> Array:
        def room() -> Array:
            return kept.spare.pop() if kept.spare else self._device.scratch(self._numel, self._dtype)

        def pair(left: Array, right: Array) -> Array:
            self._kernels.add_into(left, right)
            kept.spare.append(right)
            return left

        return sum_over_copies(replicas, nodes, leaves=self._leaves, room=room, pair=pair, name=name)
