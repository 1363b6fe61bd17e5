"""Sums in one fixed pairwise tree, so that their bits do not depend on how many ranks computed them.

    leaves     g0  g1  g2  g3  g4  g5  g6  g7        one per virtual shard, in order
                 ╲╱      ╲╱      ╲╱      ╲╱
                 s01     s23     s45     s67          a rank with two leaves starts here
                   ╲     ╱         ╲     ╱
                    s0123           s4567             a rank with four leaves starts here
                        ╲           ╱
                         s01234567

Neighbours are paired level by level; one that is left over goes up as it is. A rank that computes 2^k neighbouring
leaves sums them to one node (`TreeSum`); the ranks' nodes are then summed in the rest of the same tree. Floating-point
addition is not associative, so any other grouping would give other bits (decision 0022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.comm import Group
from zerort.device import Done, HostDevice, Ticket
from zerort.layout import Partition
from zerort.typing import Array, Device

__all__ = ["TreeSum", "sum_pairwise", "tree_all_reduce", "tree_reduce_scatter"]


class TreeSum:
    """Adds arrays that come one after the other, as the tree wants it, with one array per level in hand.

    Args:
        leaves: How many will come.
        numel: Elements of each.
        dtype: Of each.
        device: Where they lie; None: on the host.
        kernels: That device's.
        empty: Makes their memory; None: the device does.

    >>> total = TreeSum(3, numel=1, dtype=np.dtype(float))
    >>> for leaf in (1.0, 2.0, 4.0):
    ...     total.add(np.array([leaf]))
    >>> total.result()
    array([7.])
    """

    def __init__(
        self,
        leaves: int,
        *,
        numel: int,
        dtype: np.dtype[Any],
        device: Device | None = None,
        kernels: BucketKernels = HOST_KERNELS,
        empty: Callable[[int, np.dtype[Any]], Array] | None = None,
    ) -> None:
        self._device = HostDevice() if device is None else device
        self._kernels = kernels
        self._nodes: list[tuple[int, Array]] = []  # (level, sum), the largest subtree first
        make = self._device.empty if empty is None else empty
        self._spare: list[Array] = [make(numel, dtype) for _ in range(self.depth(leaves))]

    @staticmethod
    def depth(leaves: int) -> int:
        """Return how many arrays are in hand at most."""
        return leaves.bit_length()

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return not self._nodes

    def add(self, leaf: Array) -> None:
        """Add the next leaf. It is copied, so the caller may reuse its memory."""
        node = self._spare.pop()
        self._device.put(leaf, out=node)
        level = 0
        while self._nodes and self._nodes[-1][0] == level:
            node = self._pair(self._nodes.pop()[1], node)
            level += 1
        self._nodes.append((level, node))

    def result(self) -> Array:
        """Close the tree and return its root. Only `clear` may follow."""
        while len(self._nodes) > 1:
            right = self._nodes.pop()[1]
            level, left = self._nodes.pop()
            self._nodes.append((level, self._pair(left, right)))
        return self._nodes[0][1]

    def clear(self) -> None:
        """Forget the sums and keep their memory for the next tree."""
        self._spare += [node for _, node in self._nodes]
        self._nodes.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(node.nbytes for _, node in self._nodes) + sum(node.nbytes for node in self._spare)

    def _pair(self, left: Array, right: Array) -> Array:
        self._kernels.add_into(left, right)
        self._spare.append(right)
        return left


def sum_pairwise(nodes: Sequence[Array], *, kernels: BucketKernels = HOST_KERNELS) -> Array:
    """Sum ``nodes`` level by level into the first of them; the others' memory is used up on the way."""
    level = list(nodes)
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        for pair in pairs:
            if len(pair) == 2:
                kernels.add_into(pair[0], pair[1])
        level = [pair[0] for pair in pairs]
    return level[0]


def tree_reduce_scatter(
    group: Group,
    source: Array,
    out: Array,
    partition: Partition,
    name: str,
    *,
    kernels: BucketKernels = HOST_KERNELS,
) -> Ticket[Array]:
    """Give each rank its range of the sum of all ranks' ``source``, made in the tree: for what the caller does next."""
    counts = [partition.counts] * group.size
    mine = partition.counts[group.rank]
    nodes = group.device.scratch(group.size * mine, source.dtype)
    group.device.order_after(group.all_to_all(source, out=nodes, counts=counts, name=name))  # gpu-wait: the_fixed_tree
    group.device.put(sum_pairwise(list(nodes.reshape(group.size, mine)), kernels=kernels), out=out)
    return Done(out)


def tree_all_reduce(
    group: Group,
    source: Array,
    out: Array,
    partition: Partition,
    name: str,
    *,
    kernels: BucketKernels = HOST_KERNELS,
) -> Ticket[Array]:
    """Give every rank the sum over all ranks' ``source``, summed in the tree: for what the caller does next."""
    mine = group.device.scratch(partition.counts[group.rank], source.dtype)
    tree_reduce_scatter(group, source, mine, partition, name, kernels=kernels)
    return group.all_gather(mine, out=out, counts=partition.counts, name=name)
