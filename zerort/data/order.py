"""`Order`: one global order of a dataset's samples, the same for any number of ranks.

    position      0 1 2 3 4 5 6 | 7 8 9 …              counted over all epochs: the one number of a checkpoint
    epoch         0             | 1                    each with a permutation of its own
    batches       ├ 3 ┼ 3 ┼1┤   ├ 3 ┼ …                Order(length=7, batch=3): an epoch's last batch has the rest

Nothing is stored: an index is computed from its position, the seed and the epoch (`permutation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerort.data.permutation import LARGEST, permute
from zerort.errors import CallError

__all__ = ["Order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One global order of samples: a seeded permutation for every epoch, cut into batches.

    >>> order = Order(length=7, batch=3, seed=7)
    >>> [indices.tolist() for indices in order.batches()]
    [[1, 2, 4], [5, 3, 6], [0]]
    """

    length: int
    """Samples of the dataset."""

    batch: int
    """Samples of a batch over all ranks; an epoch's last batch has what is left. May change when a run goes on."""

    seed: int = 0
    """Which order: the same seed gives the same one, in every run and on any number of ranks."""

    name: str = "data"
    """What errors and checkpoints call it, if a run has several."""

    def __post_init__(self) -> None:
        _expect_int("length", self.length, least=1, most=LARGEST)
        _expect_int("batch", self.batch, least=1, most=LARGEST)
        _expect_int("seed", self.seed, least=0, most=2**63 - 1)
        if not isinstance(self.name, str) or not self.name:
            raise CallError(f"Expected an order's name to be a text, got {self.name!r}.")

    def indices(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the samples at positions ``first`` to ``last - 1``, counted over all epochs; 1-D, int64."""
        if not 0 <= first <= last < 2**63:
            raise CallError(f"Expected positions with 0 <= first <= last < 2^63, got {first} and {last}.")
        parts = []
        while first < last:
            epoch, place = divmod(first, self.length)
            count = min(last - first, self.length - place)
            positions = np.arange(place, place + count)
            parts.append(permute(positions, length=self.length, seed=self.seed, epoch=epoch))
            first += count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def batch_end(self, position: int) -> int:
        """Return where a batch that begins at ``position`` ends: after `batch` samples, or with its epoch."""
        return min(position + self.batch, (position // self.length + 1) * self.length)

    def batch_count(self, first: int, last: int) -> int:
        """Return how many batches there are from position ``first`` to ``last``, which is the end of an epoch."""
        if first >= last:
            return 0
        rest = -first % self.length
        return -(-rest // self.batch) + (last - first - rest) // self.length * -(-self.length // self.batch)

    def batches(self, *, start: int = 0, epochs: int = 1) -> Iterator[NDArray[np.int64]]:
        """Yield whole batches, without a runtime: for one process, or for what is not trained on.

        Args:
            start: The position to begin at.
            epochs: Where to end, counted from the beginning of the order.
        """
        while start < epochs * self.length:
            end = self.batch_end(start)
            yield self.indices(start, end)
            start = end

    def describe(self) -> dict[str, Any]:
        """Return what all ranks have to agree on, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def _expect_int(what: str, value: object, *, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise CallError(f"Expected {what} of an order to be an int from {least} to {most}, got {value!r}.")
