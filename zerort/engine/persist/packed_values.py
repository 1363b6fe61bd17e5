"""`PackedValues`: small arrays of a binding in the form that a checkpoint holds. The first rank has all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from zerort.comm import Group
from zerort.layout import FlatLayout, Partition
from zerort.typing import Array

if TYPE_CHECKING:
    from zerort.checkpoint import Value

__all__ = ["PackedValues"]


class PackedValues:
    """Arrays by full name, one flat array for each dtype on the first rank of a copy of the model.

    Args:
        arrays: Of the host; only the first rank's are used.
        group: The ranks that share a copy.
    """

    def __init__(self, arrays: Mapping[str, Array], group: Group) -> None:
        self._size = group.size
        self._packed: list[tuple[FlatLayout, Array]] = []
        by_dtype: dict[str, dict[str, Array]] = {}
        for name, array in arrays.items():
            by_dtype.setdefault(array.dtype.name, {})[name] = array
        for dtype, some in by_dtype.items():
            layout = FlatLayout.build({name: array.shape for name, array in some.items()}, dtype=dtype)
            flat = np.zeros(layout.numel if group.rank == 0 else 0, next(iter(some.values())).dtype)
            for extent in layout.extents if flat.size else ():
                flat[extent.slice] = some[extent.name].reshape(-1)
            self._packed.append((layout, flat))

    def __iter__(self) -> Iterator[Value]:
        from zerort.checkpoint import Value  # here: it takes a third of the time that all of zerort takes to import

        for layout, flat in self._packed:
            partition = Partition.of_counts([layout.numel] + [0] * (self._size - 1))
            yield Value(kind="buffer", layout=layout, partition=partition, mine=flat)

    def arrays(self) -> dict[str, Array]:
        """Return the values by name, as they were loaded; nothing on other ranks than the first."""
        return {
            extent.name: flat[extent.slice].reshape(extent.shape)
            for layout, flat in self._packed
            if flat.size
            for extent in layout.extents
        }
