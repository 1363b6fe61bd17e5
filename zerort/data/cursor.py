"""`Cursor`: how far the samples of an order are used.

    pull      a batch leaves the order: it may wait in a queue of loaders before it is trained on
    commit    a step is over: the batch that it was made of counts as used

What a checkpoint keeps is `taken`, a position in the order: it counts samples, so that neither the number of ranks nor
the size of a batch matters to whoever goes on.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from zerort.data.order import Order
from zerort.errors import CallError

__all__ = ["Cursor"]


class Cursor:
    """How far one order is used.

    Args:
        length: Samples of the order's dataset.
        seed: The order's seed.
        taken: Samples that are used, over all epochs.
    """

    def __init__(self, *, length: int, seed: int, taken: int = 0) -> None:
        self.length = length
        self.seed = seed
        self.taken = taken
        """Samples that steps were made of, over all epochs."""
        self.finished = 0
        """Up to where a loop of this run has come to its end."""
        self.loop = 0
        """Which loop over the order may go on: the last one, until a load moves the cursor."""
        self.pulls = 0
        """Batches that were pulled to be used by the very next step, none ahead."""
        self.follows = True
        """Whether the loop takes the runtime's shares, whatever they are: it was given none of its own."""
        self._ends: deque[tuple[int, int]] = deque()  # of batches that were pulled and not committed; and this rank's
        self._runs_ahead = False

    def begin(self, *, runs_ahead: bool, follows: bool = True) -> int:
        """Start a new loop over the order at `taken`, instead of the one before; return its number.

        Args:
            runs_ahead: Whether batches are pulled before they are used, one step for each; if not, a step uses the
                last that was pulled.
            follows: Whether the loop takes the runtime's shares, not its own.
        """
        self._ends.clear()
        self._runs_ahead, self.follows = runs_ahead, follows
        self.loop += 1
        return self.loop

    @property
    def pulled(self) -> int:
        """Where the next batch begins."""
        return self._ends[-1][0] if self._ends else self.taken

    @property
    def due(self) -> int:
        """How many samples of the batch that the next step uses are this rank's."""
        return self._ends[0][1] if self._ends else 0

    def pull(self, end: int, *, mine: int = 0) -> None:
        """Take note that a batch up to ``end`` is on its way, of which this rank has ``mine`` samples."""
        if not self._runs_ahead:
            self._ends.clear()
            self.pulls += 1
        self._ends.append((end, mine))

    def commit(self) -> int:
        """Count the batch of a step as used; return how many of its samples were this rank's."""
        if not self._ends:
            return 0
        self.taken, mine = self._ends.popleft()
        return mine

    def restore(self, taken: int) -> None:
        """Go to another position: a checkpoint was loaded. Batches that loaders hold are void."""
        self.taken, self.finished = taken, 0
        self._ends.clear()
        if self._runs_ahead:
            self.loop += 1

    def check(self, order: Order) -> None:
        """Raise unless an order is the one that this counts."""
        for what, mine, others in (("length", self.length, order.length), ("seed", self.seed, order.seed)):
            if mine != others:
                raise CallError(
                    f"Expected the order {order.name!r} to have {what}={mine}, as it had when its first {self.taken} "
                    f"samples were taken, got {what}={others}. Go on with the same dataset and seed; or give another "
                    "order a name of its own: zr.data.Order(name=…)."
                )

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"length": self.length, "seed": self.seed, "taken": self.taken}
