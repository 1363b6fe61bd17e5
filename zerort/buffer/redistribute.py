"""The placement table as code: turn one placement of a flat array into another.

    SHARDED → REPLICATED    all_gather        my range in, the whole out
    PARTIAL → SHARDED       reduce_scatter    the whole in, my range of the sum out
    PARTIAL → REPLICATED    all_reduce        the whole in, the sum out
    REPLICATED → SHARDED    a slice           nothing moves between ranks

The table itself is `zerort.layout.TRANSITIONS`. Sums in a fixed tree and codes replace its collective by their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from zerort.buffer.coded.reduce import CodedReduce
from zerort.buffer.tree import TreeSum, tree_all_reduce, tree_reduce_scatter
from zerort.comm import Group
from zerort.comm.arrays import address_of_any
from zerort.device import Done, Ticket
from zerort.layout import Collective, Partition, Placement, transition
from zerort.typing import Array

__all__ = ["redistribute"]

Move = Callable[[Group, Array, Array, Partition, str], Ticket[Array]]


def _slice(group: Group, source: Array, out: Array, partition: Partition, name: str) -> Ticket[Array]:
    return _copy_locally(group, source[partition.of(group.rank).slice], out, partition, name)


def _copy_locally(group: Group, source: Array, out: Array, partition: Partition, name: str) -> Ticket[Array]:
    if address_of_any(source) != address_of_any(out):
        group.device.put(source, out=out)
    return Done(out)


# All pass eager=False, even for small arrays: a rank that computes on must not wait here for the slowest one.
_MOVES: Final[dict[Collective, Move]] = {
    Collective.ALL_GATHER: lambda group, source, out, partition, name: group.all_gather(
        source, out=out, counts=partition.counts, name=name, eager=False
    ),
    Collective.REDUCE_SCATTER: lambda group, source, out, partition, name: group.reduce_scatter(
        source, out=out, counts=partition.counts, name=name, eager=False
    ),
    Collective.ALL_REDUCE: lambda group, source, out, partition, name: group.all_reduce(
        source, out=out, name=name, eager=False
    ),
    Collective.SLICE: _slice,
    Collective.NONE: _copy_locally,
}

# Of these the ones that sum, where bits may not depend on the number of ranks.
_TREE_MOVES: Final = {Collective.REDUCE_SCATTER: tree_reduce_scatter, Collective.ALL_REDUCE: tree_all_reduce}

_LOCAL: Final = frozenset({Collective.SLICE, Collective.NONE})  # nothing goes from rank to rank


def redistribute(
    group: Group,
    source: Array,
    *,
    placement: Placement,
    to: Placement,
    partition: Partition,
    out: Array,
    name: str = "",
    tree: TreeSum | None = None,
    senders: range | None = None,
    padding: int = 0,
    traffic: Counter[str] | None = None,
    codec: CodedReduce | None = None,
) -> Ticket[Array]:
    """Turn ``source``, which lies as ``placement`` says, into ``out``, which lies as ``to`` says.

    Args:
        group: The ranks; all of them call this.
        source: 1-D: the whole, or my range if it is SHARDED.
        placement: How it lies now.
        to: How it should lie.
        partition: Which rank holds which range.
        out: 1-D: the whole, or my range if ``to`` is SHARDED. It may be the very place in ``source`` (in place).
        name: What to call this in errors and traces.
        tree: What to sum instead of ``source``, in one fixed pairwise tree. See `zerort.buffer.tree`.
        senders: Ranks whose ranges are put side by side into ``out`` instead of being summed; of PARTIAL to SHARDED.
        padding: Elements at the end of the whole that only make ranges equally long: they are not counted.
        traffic: Where the bytes of the larger side are counted, by collective.
        codec: How PARTIAL becomes SHARDED, if summands travel as codes; it knows of senders, too.

    Raises:
        PlanError: There is no such move.
    """
    collective = transition(placement, to=to)
    if codec is not None and collective is Collective.REDUCE_SCATTER:
        return codec.start(group, source, out=out, partition=partition, name=name, padding=padding, traffic=traffic)
    if senders is not None:
        assert collective is Collective.REDUCE_SCATTER
        if traffic is not None and group.size > 1:
            traffic["all_to_all"] += source.nbytes - padding * source.itemsize
        counts = tuple(partition.counts if rank in senders else (0,) * group.size for rank in range(group.size))
        given = source if group.rank in senders else source[:0]
        return group.all_to_all(given, out=out, counts=counts, name=name, eager=False)
    if traffic is not None and group.size > 1 and collective not in _LOCAL:
        times = 1 if tree is None else tree.leaves.exchanges
        traffic[collective.name.lower()] += times * (max(source.nbytes, out.nbytes) - padding * source.itemsize)
    if tree is not None and collective in _TREE_MOVES:
        return _TREE_MOVES[collective](group, tree, out, partition, name)
    return _MOVES[collective](group, source, out, partition, name)
