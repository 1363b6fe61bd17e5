"""`ReplicatedParameters`: parameters that every rank holds as a whole; after a change all ranges travel once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerort.device import Done, Ticket
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.parameters import Parameters
from zerort.layout import Placement
from zerort.typing import Array

__all__ = ["ReplicatedParameters"]


class ReplicatedParameters(Parameters):
    """The whole, on every rank. The arguments are those of `Parameters`; ``array`` is the whole."""

    placement = Placement.REPLICATED
    needs_room = False
    can_fail = False

    def __init__(self, *args: Any, cuts: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place = self.array.memory
        self._whole = Done(self._place)
        self._shard = self.array.resident_range(*self._own, cuts=cuts)

    @property
    def shard(self) -> ChunkedArray:
        """This rank's range."""
        return self._shard

    @property
    def at_rest(self) -> Array:
        """The whole."""
        return self.array.memory

    def start(self, out: Array | None = None) -> Ticket[Any]:
        """Let all ranges travel, if they have changed since they did."""
        if self._whole is None:
            self._whole = self._gather(self._shard.memory, out=self.whole)
        return self._whole

    def finish(self) -> Ticket[Array]:
        """Return the Ticket of the whole."""
        assert self._whole is not None, "finished before it was started"
        return self._whole

    def release(self) -> None:
        """Keep the whole: it rests here."""

    def updated(self, written: Sequence[Ticket[Any]]) -> None:
        """Note nothing: it rests where computing happens."""

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write tensors, all of each."""
        for name, value in values.items():
            self.array.put(self.layout.of(name).offset, self._flat(name, value))

    def changed(self) -> None:
        """Say that ranks have written to their ranges: the next `start` lets them travel."""
        if self._group.size > 1:
            self._whole = None

    def close(self) -> None:
        """Give the memory back."""
        self._group.release_local(self.array.memory)
