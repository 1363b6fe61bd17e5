"""`ColumnParameters`: what parameters have in common that rest as a column, elsewhere than where computing happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from zerort.buffer import Gatherable
from zerort.comm import Group
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.layout import FlatLayout, Partition, Placement
from zerort.typing import Array

__all__ = ["ColumnParameters"]


class ColumnParameters(Gatherable):
    """One flat buffer of parameters, of which each rank holds its range as a column.

    Args:
        layout: Where each tensor lies.
        partition: Which rank holds which range.
        column: This rank's range.
        group: The ranks.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
    """

    placement = Placement.SHARDED
    needs_room = True

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        column: ChunkedArray,
        group: Group,
        name: str,
        traffic: Counter[str] | None = None,
    ) -> None:
        super().__init__(layout, partition, group=group, name=name, traffic=traffic)
        self.column = column
        self._own = partition.of(group.rank)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds in memory at rest."""
        return self.column.memory.nbytes

    def pack(self, values: Mapping[str, Array]) -> None:
        """Write tensors into this rank's range, once the last update is there; see `FlatBuffer.pack`.

        Raises:
            StorageError: The file system refused; on this rank alone.
        """
        for name, value in values.items():
            extent = self.layout.of(name)
            flat = np.ascontiguousarray(value).reshape(-1)
            begin, end = max(extent.offset, self._own.first), min(extent.last, self._own.last)
            if begin < end:
                source = flat[begin - extent.offset : end - extent.offset]
                self.column.write(begin - self._own.first, source).wait()  # not-gpu: between arrays of the host

    def changed(self) -> None:
        """Say that ranks have written to their ranges: nothing is kept that could be out of date."""
