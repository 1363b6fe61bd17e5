"""`join`: ranks with different numbers of batches take part until all are done; see `Runtime.join`.

    rank 0    a  b  c                 own batches
    rank 1    d  d' d'                d' is d computed again: its gradients are dropped before they are reduced
    rank 2    a' a' a'                never had one: it was sent rank 0's first, once
    rank 3    e  e' f                 virtual_shards of which it has one fewer than others: e' fills up a step

A rank that has run out has to compute all the same: gathers and reductions need every rank, in the order of a forward
and a backward. Its gradients are replaced by zeros where they are handed in, for they travel before `rt.step`, and
0 × NaN would be NaN (decision 0119).

A `for` over it holds a generator, which ends with the loop: by `break` or an error, too. Then nothing is dropped any
more.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

import numpy as np

from zerort.comm.agreed import agreed, gather_json
from zerort.engine.batches.join_state import JoinState
from zerort.engine.context import Context
from zerort.errors import CallError, UnitStateError

__all__ = ["Joining", "join"]

T = TypeVar("T")
_END: Final = object()


class Joining(Iterator[T], Generic[T]):
    """This rank's batches, then its last one again until all ranks are done. Made by `Runtime.join`.

    Args:
        context: What the runtime's parts share.
        state: What the runtime knows of the loop.
        batches: This rank's, from the second on.
        first: This rank's first batch, or another's; anything if nobody has one.
        is_own: Whether it is this rank's.
    """

    def __init__(self, context: Context, state: JoinState, batches: Iterator[T], *, first: T, is_own: bool) -> None:
        self._context, self._state, self._batches = context, state, batches
        self._last = first
        self._ahead: object = first if is_own else _END
        self._is_over = self._is_left = False

    @property
    def repeating(self) -> bool:
        """Whether the batch is computed again: its gradients, its weight and its loss in `mean` count nothing."""
        return self._state.owns[-1:] == [False]

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                try:
                    batch = next(self)
                except StopIteration:
                    return
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """Leave the loop, as `break` does; every rank alike. Gradients that wait for their step have to be dropped."""
        state, run = self._state, self._context.run
        self._is_left = True
        if run.join is state:
            state.is_left = state.handed_in
            if not state.is_left:
                run.join = JoinState()

    def __next__(self) -> T:
        state, context = self._state, self._context
        if self._is_over:
            raise StopIteration
        if context.run.join is not state or self._is_left:
            raise CallError(
                "Expected one loop of rt.join() at a time, to its end, got a batch asked of one that was left, or "
                "after another was begun. Begin anew with the batches that are left: rt.join(batches)."
            )
        if state.pulled == 0 and not state.anyone:
            self._is_over = True
            context.run.join = JoinState()
            raise StopIteration
        if state.pulled >= context.micro_steps:
            error = UnitStateError(
                "Expected rt.step() before the next batch of rt.join(), got none: in a step the ranks agree whether "
                "any has more."
            )
            context.complain(error)
            raise error
        # A rank with a leaf fewer than others takes no batch of its own for the micro-step that only fills up its step.
        is_own = self._ahead is not _END and state.pulled < len(context.own_micro_batches)
        if is_own:
            self._last = self._ahead  # type: ignore[assignment]
            self._ahead = self._next()
        state.has_more = self._ahead is not _END
        state.pull(own=is_own)
        return self._last

    def _next(self) -> object:
        try:
            return _pull(self._context, self._batches)
        except Exception as error:
            self._context.complain(error)
            raise


def join(context: Context, batches: Iterable[T]) -> Joining[T]:
    """Return a loop over all ranks' batches; see `Runtime.join`. Every rank calls this."""
    world = context.world
    first: object = _END
    with agreed(world, "join"):
        _expect_room(context)
        iterator = iter(batches)
        first = _pull(context, iterator)
    owns = gather_json(world, first is not _END, name="join")
    is_own = first is not _END
    if any(owns) and not all(owns):
        first = _sent(context, first, owns)
    context.run.join = state = JoinState(anyone=any(owns))
    return Joining(context, state, iterator, first=first, is_own=is_own)  # type: ignore[arg-type]


def _expect_room(context: Context) -> None:
    """Raise if a loop cannot begin."""
    left = context.run.join.problem(context.micro_steps) if context.run.join.is_left else None
    if left is not None:
        raise left


def _pull(context: Context, batches: Iterator[T]) -> object:
    """Return the next batch, or `_END`. Raise if it is of an order whose steps use the batch that came last."""
    cursors = context.run.cursors
    before = sum(cursor.pulls for cursor in cursors.values())
    batch = next(batches, _END)
    if sum(cursor.pulls for cursor in cursors.values()) > before:
        raise CallError(
            "Expected batches of this rank's own in rt.join(), got those of rt.take(): they are asked for one ahead, "
            "and a checkpoint would lose one. An order gives all ranks equally many batches: leave rt.join() out."
        )
    return batch


def _sent(context: Context, first: object, owns: list[bool]) -> object:
    """Return this rank's first batch, or that of the lowest rank that has one. Every rank calls this."""
    world, root = context.world, owns.index(True)
    packed = b""
    with agreed(world, "join"):
        if world.rank == root:
            try:
                packed = pickle.dumps(first)
            except Exception as error:
                raise CallError(
                    f"Expected a batch that can be pickled, to be sent to ranks without any, got {type(first).__name__}"
                    f": {error}"
                ) from None
    nbytes = gather_json(world, len(packed), name="join")[root]
    carried = np.frombuffer(packed, np.uint8) if world.rank == root else np.empty(nbytes, np.uint8)
    # not-gpu: between arrays of the host
    carried = world.broadcast(carried.copy(), root=root, name="join").wait()
    return first if owns[world.rank] else pickle.loads(carried.tobytes())
