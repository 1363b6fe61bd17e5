"""`Gatherable`: what buffers have in common that ranks hold in ranges and look at as a whole."""

from __future__ import annotations

from collections import Counter

import numpy as np

from zerort.buffer.redistribute import redistribute
from zerort.comm import Group
from zerort.device import Ticket
from zerort.errors import UnitStateError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["Gatherable"]


class Gatherable:
    """One 1-D array that the ranks hold together, wherever their ranges rest.

    Args:
        layout: Where each tensor lies.
        partition: Which rank holds which range; of the layout's numel.
        group: The ranks.
        name: What to call it in errors and traces.
        traffic: Where moved bytes are counted, by collective.
    """

    def __init__(
        self,
        layout: FlatLayout,
        partition: Partition,
        *,
        group: Group,
        name: str,
        traffic: Counter[str] | None,
    ) -> None:
        self.layout = layout
        self.partition = partition
        self.name = name
        self.dtype = numpy_dtype(layout.dtype)
        self._group = group
        self._traffic = traffic
        self._place: Array | None = None  # of the gathered form

    def _gather(self, mine: Array, *, out: Array) -> Ticket[Array]:
        """Bring all ranks' ranges to ``out``; every rank calls this."""
        return redistribute(
            self._group,
            mine,
            placement=Placement.SHARDED,
            to=Placement.REPLICATED,
            partition=self.partition,
            out=out,
            name=self.name,
            padding=self.layout.numel - self.layout.end,
            traffic=self._traffic,
        )

    @property
    def whole(self) -> Array:
        """Where the whole is, or will be when it is gathered: 1-D."""
        if self._place is None:
            raise UnitStateError(f"Expected {self.name!r} to be gathered before it is looked at. Restore it first.")
        return self._place

    def view(self, name: str) -> Array:
        """Return one tensor of the gathered form in place; its values come with the gather. NumPy's are read-only."""
        extent = self.layout.of(name)
        found = self.whole[extent.slice].reshape(extent.shape)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found
