"""`Leaves`: one fixed pairwise tree over the micro-batches of a step, and which rank computes which of them.

    leaves     g0  g1  g2  g3  g4  g5  g6          one per virtual shard, in order
                 ╲╱      ╲╱      ╲╱    │
                 s01     s23     s45   │
                   ╲     ╱         ╲   │
                    s0123           s456
                        ╲           ╱
                         s0123456

Neighbours are paired level by level; one that is left over goes up as it is. Floating-point addition is not
associative, so any other grouping would give other bits (decision 0089). Two ways to share the leaves out:

    neighbours     rank 0: g0 g1 g2      rank 1: g3 g4 g5 g6     each sums its own, whole (`TreeSum`)
    in turn        rank 0: g0 g2 g4 g6   rank 1: g1 g3 g5        in the tree's order: slices are folded as they come
                                                                 (`FoldedShard`, decision 0111)

With copies of the model each copy has neighbouring leaves, which its ranks compute in either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

__all__ = ["Leaves", "Node", "insert"]

Node = tuple[int, int]
"""Level and number: it stands for 2**level leaves from ``number * 2**level`` on, as far as there are so many."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leaves:
    """Which leaves of a tree each rank computes: as many as the others, or one fewer.

    >>> [tuple(Leaves(5, 3).of(rank)) for rank in range(3)]
    [(0,), (1, 2), (3, 4)]
    >>> [tuple(Leaves(5, 3, in_turn=True).of(rank)) for rank in range(3)]
    [(0, 3), (1, 4), (2,)]
    """

    total: int
    """Leaves of the tree."""
    size: int
    """Ranks; at most as many."""
    copies: int = 1
    """Copies of the model, each held by as many neighbouring ranks."""
    in_turn: bool = False
    """Whether the ranks of a copy compute its leaves in turn; if not, each computes neighbours."""

    @property
    def ranks(self) -> int:
        """Ranks of a copy."""
        return self.size // self.copies

    @property
    def most(self) -> int:
        """Leaves of the rank that has most."""
        return -(-self.total // self.size)

    def of(self, rank: int) -> range:
        """Return the leaves of ``rank``, in order."""
        if self.in_turn:
            copy, place = divmod(rank, self.ranks)
            return self.of_copy(copy)[place :: self.ranks]
        return range(rank * self.total // self.size, (rank + 1) * self.total // self.size)

    def of_copy(self, copy: int) -> range:
        """Return the leaves of a copy's ranks."""
        return range(copy * self.total // self.copies, (copy + 1) * self.total // self.copies)

    def of_micro_step(self, copy: int, at: int) -> range:
        """Return the leaves that a copy's ranks compute in their micro-step number ``at``, in turn; at most its end."""
        return self.of_copy(copy)[at * self.ranks : (at + 1) * self.ranks]

    def nodes(self, rank: int) -> tuple[Node, ...]:
        """Return the largest nodes of the tree all of whose leaves are of ``rank``, in order."""
        return _fold(self.total, self.of(rank))

    def nodes_of_copy(self, copy: int) -> tuple[Node, ...]:
        """Return the largest nodes all of whose leaves are of a copy, in order."""
        return _fold(self.total, self.of_copy(copy))

    def nodes_after(self, copy: int, micro_steps: int) -> int:
        """Return how many nodes the leaves of a copy's first ``micro_steps`` micro-steps sum up to, in turn."""
        return len(_fold(self.total, self.of_copy(copy)[: micro_steps * self.ranks]))

    @property
    def exchanges(self) -> int:
        """Nodes of the rank that has most: ranks exchange one of each at a time."""
        return max(len(self.nodes(rank)) for rank in range(self.size))

    @property
    def depth(self) -> int:
        """Arrays that a rank has in hand at most while it sums its own leaves; the most of any rank."""
        return max(_most(self.total, self.of(rank)) for rank in range(self.size))

    @property
    def held(self) -> int:
        """Shards that a rank keeps at most while slices are folded, then summed over the copies; of any rank."""
        folding = max(self.nodes_after(copy, at) for copy in range(self.copies) for at in range(1, self.most + 1))
        return max(folding, *(self._held_over_copies(copy) for copy in range(self.copies)))

    @property
    def exchanged(self) -> int:
        """Shards that a rank has in hand at most while copies exchange their nodes; of any rank. 0: there is one."""
        return max(map(self._held_over_copies, range(self.copies))) if self.copies > 1 else 0

    @property
    def moves(self) -> tuple[int, int]:
        """How many shards the first copy reads back and puts away in a step, if those that are kept are offloaded."""
        read = written = 0
        kept: set[Node] = set()
        for at in range(1, self.most + 1):
            nodes = set(_fold(self.total, self.of_copy(0)[: at * self.ranks]))
            read, written = read + len(kept - nodes), written + len(nodes - kept)
            kept = nodes
        if self.copies > 1:  # its nodes are exchanged for those of others, and the root is put away
            read, written = read + len(kept), written + 1
        return read, written

    def _held_over_copies(self, copy: int) -> int:
        """Return the shards that a rank of ``copy`` has in hand at most while copies exchange their nodes in order."""
        own, found, most = len(self.nodes_of_copy(copy)), {}, 0  # type: int, dict[Node, None], int
        for other in range(self.copies):
            for node in self.nodes_of_copy(other):
                own -= other == copy
                most = max(most, own + len(found) + 1)
                insert(found, node, None, total=self.total, pair=lambda left, right: None)
        return most


def insert(nodes: dict[Node, T], node: Node, value: T, *, total: int, pair: Callable[[T, T], T]) -> None:
    """Add a node to those that are there, and sum it with its neighbours as far as they are.

    Args:
        nodes: Those that are there.
        node: Which is added.
        value: What it holds.
        total: Leaves of the tree.
        pair: Sums two neighbours, the left one first.
    """
    level, number = node
    while level < (total - 1).bit_length():
        beside = number ^ 1
        if beside << level < total:  # else there are no leaves: it goes up as it is
            if (level, beside) not in nodes:
                break
            other = nodes.pop((level, beside))
            value = pair(value, other) if number < beside else pair(other, value)
        level, number = level + 1, number >> 1
    nodes[level, number] = value


def _insert_all(total: int, leaves: Iterable[int]) -> tuple[dict[Node, None], int]:
    nodes: dict[Node, None] = {}
    most = 0
    for leaf in leaves:
        most = max(most, len(nodes) + 1)
        insert(nodes, (0, leaf), None, total=total, pair=lambda left, right: None)
    return nodes, most


@cache
def _fold(total: int, leaves: range) -> tuple[Node, ...]:
    """Return the nodes that some leaves, one after the other, sum up to, in order."""
    return tuple(sorted(_insert_all(total, leaves)[0], key=lambda node: node[1] << node[0]))


@cache
def _most(total: int, leaves: range) -> int:
    """Return how many arrays that takes."""
    return _insert_all(total, leaves)[1]
