"""`OrderSampler`: an order of samples for torch's `DataLoader`; `Collate`: batches that may be empty on this rank.

    sampler = zt.OrderSampler(rt, zr.data.Order(length=len(dataset), batch=256, seed=7))
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=zt.Collate(dataset), num_workers=4)
    for x, y in loader:
        loss_sum(model(x), y).backward()
        rt.step(weight=len(x))                  uses up one batch of the order

A loader asks for batches ahead of the loop. So what counts as used is not what was asked for, but one batch for each
step: a checkpoint has no batch that waits in a worker, and whoever goes on gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, default_collate

from zerort import Runtime
from zerort.data import Order
from zerort.engine.binding import Taking, samples_taken, take_ahead

__all__ = ["Collate", "OrderSampler"]


class OrderSampler(Sampler[list[int]]):
    """This rank's part of each batch of an order: a ``batch_sampler``. Every rank makes it at once.

    It runs in the loader's own process, whatever ``num_workers`` and ``persistent_workers`` are. A loop over the loader
    begins where the steps of the runtime are, on all ranks at once, and takes one step for each batch.

    Args:
        rt: Whose steps use the samples up, and whose checkpoints keep the place.
        order: The samples.
        epochs: Where a loop ends, counted from the order's beginning; None: never. See `set_epoch`.
        shares: How much of a batch each rank takes; see `zerort.Runtime.take`.
        micro_batches: Yield one of this rank's ``rt.micro_batches`` at a time: ``rt.micro_steps`` batches of the loader
            are one batch of the order, and one step.
    """

    def __init__(
        self,
        rt: Runtime,
        order: Order,
        *,
        epochs: int | None = 1,
        shares: Sequence[float] | None = None,
        micro_batches: bool = False,
    ) -> None:
        self._rt, self._order, self._epochs, self._shares = rt, order, epochs, shares
        self._parts = rt.micro_steps if micro_batches else 1  # of this rank's part of a batch
        self._take()  # so that what is wrong is said here, on every rank

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop end with this epoch: the first is 0. What is used already does not come again."""
        self._epochs = epoch + 1

    @property
    def epoch(self) -> int:
        """The epoch of the next batch that a loop would begin with."""
        return samples_taken(self._rt, self._order) // self._order.length

    def __iter__(self) -> Iterator[list[int]]:
        return (part.tolist() for indices in self._take() for part in np.array_split(indices, self._parts))

    def __len__(self) -> int:
        """Return how many batches a loop has from here on."""
        if self._epochs is None:
            raise TypeError("Expected the length of a loop that ends, got one over endless epochs (epochs=None).")
        left = self._order.batch_count(samples_taken(self._rt, self._order), self._epochs * self._order.length)
        return left * self._parts

    def _take(self) -> Taking:
        return take_ahead(self._rt, self._order, epochs=self._epochs, shares=self._shares)


class Collate:
    """Puts samples together, or none: a rank may have no part of an epoch's last batch, and takes part all the same.

    Args:
        dataset: Its first sample says what a batch looks like.
        collate: Puts samples together; torch's own if None.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of the samples; of none, one whose tensors have 0 rows."""
        if samples:
            return self._collate(samples)
        return _without_rows(self._collate([self._dataset[0]]))


def _without_rows(batch: Any) -> Any:
    """Return a batch of the same form whose tensors have no rows."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: _without_rows(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_without_rows(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
