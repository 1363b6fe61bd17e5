"""`StateColumns`: makes what state is kept in: memory of its own, or a range of addresses for all ranks' ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import Partition
from zerort.storage.session import StorageSession
from zerort.typing import Array, Device, Reserve

__all__ = ["StateColumns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateColumns:
    """What columns of one section's state have in common."""

    name: str
    """What values are called in a store, before the kind of state."""
    rank: int
    whole: bool
    """Whether every rank has all elements."""
    chunks: int
    """Into which a column is cut."""
    resident: int
    """Chunks of these that are in memory."""
    storage: StorageSession | None
    """Where the others rest."""
    device: Device
    zeros: Callable[[int, str], Array] | None
    """Makes the memory; None: the device does."""
    before: Mapping[str, ChunkedArray]
    """The same on another partition, by kind: what belongs to both stays where it is, if it can (decision 0179)."""

    def make(self, kind: str, cuts: Sequence[int], dtype: str, partition: Partition) -> ChunkedArray:
        """Return this rank's range of one kind of state: zeros, or with values of the other partition here and there.

        Args:
            kind: What to call it.
            cuts: Where chunks begin, counted in the range, and the end of the last.
            dtype: Of its elements.
            partition: Which rank has which range of it.

        Raises:
            DeviceMemoryError: A GPU has too little left.
        """
        first = 0 if self.whole else partition.of(self.rank).first
        reserve = self._reserve(kind, dtype, partition)
        if reserve is not None:
            memory = reserve.take(first, first + cuts[-1])
        else:
            memory = (self.zeros or self.device.zeros)(cuts[self.resident], dtype)
        return ChunkedArray(
            f"{self.name}/{kind}",
            cuts,
            memory,
            resident=self.resident,
            storage=self.storage,
            device=self.device,
            reserve=reserve,
            first=first,
        )

    def _reserve(self, kind: str, dtype: str, partition: Partition) -> Reserve | None:
        """Return addresses for all ranks' ranges of a column that is in memory and can be cut anew."""
        if self.zeros is not None or self.whole or self.resident < self.chunks or partition.size == 1:
            return None
        if self.before:
            return self.before[kind].reserve
        return self.device.reserve(partition.numel, dtype)
