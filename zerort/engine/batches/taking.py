"""`take`: this rank's part of each batch of an order, step by step; see `Runtime.take`.

for indices in rt.take(order):        the order's cursor stands at `taken`
    …                                 pulled, not used: a save here would give the batch again
    rt.step()                         used: `taken` is behind the batch, also in the step's own checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zerort.comm.agreed import agreed, expect_same
from zerort.data import Cursor, Order, Share
from zerort.data.share import check_weights
from zerort.engine.context import Context
from zerort.errors import CallError

__all__ = ["Taking", "take"]


class Taking(Iterator[NDArray[np.int64]]):
    """This rank's part of each batch, from where the order's cursor stands. Made by `Runtime.take`.

    Args:
        order: The samples.
        cursor: How far they are used.
        share: Returns this rank's part of a batch, as it is now.
        until: The position to end at: that of an epoch's end; None: never.
        runs_ahead: Whether loaders pull batches before they are used.
        follows: Whether the share is the runtime's, whatever that is.
    """

    def __init__(
        self,
        order: Order,
        cursor: Cursor,
        share: Callable[[], Share],
        *,
        until: int | None,
        runs_ahead: bool = False,
        follows: bool = True,
    ) -> None:
        self._order, self._cursor, self._share = order, cursor, share
        self._until = until
        self._loop = cursor.begin(runs_ahead=runs_ahead, follows=follows)

    @property
    def epoch(self) -> int:
        """The epoch that the last batch was of; of the first one, before that."""
        return max(self._cursor.pulled - 1, 0) // self._order.length

    @property
    def ends_epoch(self) -> bool:
        """Whether the last batch was its epoch's last: the time to evaluate."""
        return self._cursor.pulled > 0 and self._cursor.pulled % self._order.length == 0

    def __len__(self) -> int:
        """Return how many batches are left."""
        if self._until is None:
            raise CallError("Expected the length of a loop that ends, got one over endless epochs (epochs=None).")
        return self._order.batch_count(self._cursor.pulled, self._until)

    @property
    def batch(self) -> int:
        """How many samples of a whole batch are this rank's."""
        return sum(end - begin for begin, end in self._share().of(self._order.batch))

    def __next__(self) -> NDArray[np.int64]:
        cursor, order = self._cursor, self._order
        if cursor.loop != self._loop:
            raise CallError(
                f"Expected one loop over the order {order.name!r} at a time, got a batch asked of one that has ended: "
                "another loop was begun, or a checkpoint loaded. Begin anew: for … in rt.take(order), or iter(loader)."
            )
        first = cursor.pulled
        if self._until is not None and first >= self._until:
            cursor.finished = first
            raise StopIteration
        end = order.batch_end(first)
        parts = [order.indices(first + begin, first + stop) for begin, stop in self._share().of(end - first)]
        cursor.pull(end, mine=sum(map(len, parts)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def take(
    context: Context, order: Order, *, epochs: int | None, shares: Sequence[float] | None, runs_ahead: bool = False
) -> Taking:
    """Return a loop over an order; see `Runtime.take`. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        order: The samples.
        epochs: Where to end.
        shares: How much of a batch each rank takes.
        runs_ahead: Whether loaders pull batches before they are used.
    """
    share: Share | None = None
    with agreed(context.world, "take"):
        if not isinstance(order, Order):
            raise CallError(f"Expected a zr.data.Order, got {type(order).__name__}.")
        if epochs is not None and (type(epochs) is not int or epochs < 0):
            raise CallError(f"Expected epochs to be an int of at least 0, or None for no end; got {epochs!r}.")
        share = _share_of(context, shares)
        cursor = context.run.cursors.get(order.name) or Cursor(length=order.length, seed=order.seed)
        cursor.check(order)
        until = None if epochs is None else epochs * order.length
        if until and cursor.finished >= until:
            raise CallError(
                f"Expected an order with samples left in {epochs} epochs, got {order.name!r}, which this run has taken "
                "to that end. epochs= counts from the order's beginning: rt.take(order, epochs=epoch + 1), or "
                "sampler.set_epoch(epoch) with torch."
            )
    assert share is not None
    weights = None if share.weights is None else list(share.weights)
    facts = {**order.describe(), "epochs": epochs, "shares": weights, "taken": cursor.taken}
    expect_same(context.world, facts, what="the order that is taken", error=CallError)
    context.run.cursors[order.name] = cursor
    fixed = share
    # Loaders that run ahead have pulled batches by the shares of before, on each rank as many as it likes.
    now = (lambda: fixed) if runs_ahead or shares is not None else (lambda: _share_of(context, None))
    return Taking(order, cursor, now, until=until, runs_ahead=runs_ahead, follows=shares is None)


def _share_of(context: Context, shares: Sequence[float] | None) -> Share:
    """Return this rank's part of a batch: its leaves, or by capacity, along the ranks that have different data."""
    rank, size = context.mesh.data_parallel
    if context.options.virtual_shards is not None:
        if shares is not None:
            raise CallError(
                "Expected no shares= with virtual_shards, got some. There a rank computes whole leaves of the batch: "
                "rt.micro_batches."
            )
        return Share(parts=context.options.virtual_shards, mine=context.micro_batches)
    shares = context.run.shares if shares is None else shares
    if shares is None and context.run.cut.weights is not None:
        copies = size // context.mesh.shard.size
        shares = [*context.run.cut.weights] * copies
    weights = None if shares is None else check_weights(shares, parts=size, what="shares")
    return Share(parts=size, mine=range(rank, rank + 1), weights=weights)
