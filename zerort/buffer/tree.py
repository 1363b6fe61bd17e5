"""Sums in one fixed pairwise tree, so that their bits do not depend on how many ranks computed them.

    TreeSum                  whole gradients of a rank's own leaves, summed to the largest nodes that are all its own
    tree_reduce_scatter      ranks exchange these, each its range, and sum the rest of the same tree
    sum_over_copies          copies of the model exchange their nodes, one after the other in the tree's order

`leaves.py` draws the tree. Slices of leaves that are dealt in turn are folded by `FoldedShard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.leaves import Leaves, Node, insert
from zerort.comm import Group
from zerort.device import Done, HostDevice, Ticket
from zerort.layout import Partition
from zerort.typing import Array, Device

__all__ = ["TreeSum", "sum_over_copies", "tree_all_reduce", "tree_reduce_scatter"]


class TreeSum:
    """Adds a rank's leaves, which come one after the other, as the tree wants it.

    Args:
        leaves: Those of all ranks.
        rank: Whose come, of all ranks.
        numel: Elements of each.
        dtype: Of each.
        device: Where they lie; None: on the host.
        kernels: That device's.
        empty: Makes their memory; None: the device does.
        replicas: The ranks that hold the same range of other copies of the model; None: there is one.

    >>> total = TreeSum(Leaves(3, 1), 0, numel=1, dtype=np.dtype(float))
    >>> for leaf in (1.0, 2.0, 4.0):
    ...     total.add(np.array([leaf]))
    >>> total.nodes()
    [array([7.])]
    """

    def __init__(
        self,
        leaves: Leaves,
        rank: int,
        *,
        numel: int,
        dtype: np.dtype[Any],
        device: Device | None = None,
        kernels: BucketKernels = HOST_KERNELS,
        empty: Callable[[int, np.dtype[Any]], Array] | None = None,
        replicas: Group | None = None,
    ) -> None:
        self.leaves = leaves
        self.replicas = replicas
        self.kernels = kernels
        self.dtype = dtype
        self._rank = rank
        self._device = HostDevice() if device is None else device
        self._nodes: dict[Node, Array] = {}
        self._added = 0
        make = self._device.empty if empty is None else empty
        self._spare: list[Array] = [make(numel, dtype) for _ in range(leaves.depth)]

    def add(self, leaf: Array) -> None:
        """Add the next leaf; one more than the rank has is dropped. It is copied: the caller may reuse its memory."""
        mine = self.leaves.of(self._rank)
        if self._added == len(mine):
            return
        node = self._spare.pop()
        self._device.put(leaf, out=node)
        insert(self._nodes, (0, mine[self._added]), node, total=self.leaves.total, pair=self._pair)
        self._added += 1

    def nodes(self) -> list[Array]:
        """Return the rank's nodes, in order, once all leaves are added."""
        return [self._nodes[node] for node in self.leaves.nodes(self._rank)]

    def clear(self) -> None:
        """Forget the sums and keep their memory for the next tree."""
        self._spare += self._nodes.values()
        self._nodes.clear()
        self._added = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(node.nbytes for node in (*self._nodes.values(), *self._spare))

    def _pair(self, left: Array, right: Array) -> Array:
        self.kernels.add_into(left, right)
        self._spare.append(right)
        return left


def tree_reduce_scatter(group: Group, tree: TreeSum, out: Array, partition: Partition, name: str) -> Ticket[Array]:
    """Give each rank its range of the sum of all ranks' leaves: for what the caller does next."""
    mine = partition.counts[group.rank]
    found: dict[Node, Array] = {}

    def pair(left: Array, right: Array) -> Array:
        tree.kernels.add_into(left, right)
        return left

    copy = 0 if tree.replicas is None else tree.replicas.rank
    sent = tree.nodes()
    of_rank = [tree.leaves.nodes(copy * group.size + rank) for rank in range(group.size)]
    for at in range(max(map(len, of_rank))):  # each rank's first node, each one's second, …
        having = [rank for rank, nodes in enumerate(of_rank) if at < len(nodes)]
        counts = [partition.counts if rank in having else (0,) * group.size for rank in range(group.size)]
        source = sent[at] if at < len(sent) else group.device.scratch(0, tree.dtype)
        slices = group.device.scratch(len(having) * mine, tree.dtype)
        # gpu-wait: the_fixed_tree
        group.device.order_after(group.all_to_all(source, out=slices, counts=counts, name=name))
        for rank, piece in zip(having, slices.reshape(len(having), mine), strict=True):
            insert(found, of_rank[rank][at], piece, total=tree.leaves.total, pair=pair)
    if tree.replicas is None:
        (root,) = found.values()
    else:
        root = sum_over_copies(
            tree.replicas,
            found,
            leaves=tree.leaves,
            room=lambda: group.device.scratch(mine, tree.dtype),
            pair=pair,
            name=name,
        )
    group.device.put(root, out=out)
    return Done(out)


def sum_over_copies(
    replicas: Group,
    nodes: dict[Node, Array],
    *,
    leaves: Leaves,
    room: Callable[[], Array],
    pair: Callable[[Array, Array], Array],
    name: str,
) -> Array:
    """Return the root of the tree, given this copy's nodes, which are used up: for what the caller does next.

    Args:
        replicas: The ranks that hold the same range, one of each copy. All of them call this.
        nodes: The nodes that this copy's leaves sum up to, of this rank's range.
        leaves: All copies' leaves.
        room: Returns memory for a node of another copy.
        pair: Sums two neighbours, the left one first, and may give the right one's memory to `room` again.
        name: What to call this in errors and traces.
    """
    found: dict[Node, Array] = {}
    for copy in range(leaves.copies):
        for node in leaves.nodes_of_copy(copy):
            array = nodes.pop(node) if copy == replicas.rank else room()
            # gpu-wait: the_fixed_tree
            replicas.device.order_after(replicas.broadcast(array, root=copy, name=name))
            insert(found, node, array, total=leaves.total, pair=pair)
    (root,) = found.values()
    return root


def tree_all_reduce(group: Group, tree: TreeSum, out: Array, partition: Partition, name: str) -> Ticket[Array]:
    """Give every rank the sum of all ranks' leaves: for what the caller does next."""
    mine = group.device.scratch(partition.counts[group.rank], tree.dtype)
    tree_reduce_scatter(group, tree, mine, partition, name)
    return group.all_gather(mine, out=out, counts=partition.counts, name=name)
