"""`RestingParameters`: parameters that rest on a disk, each rank's range in its own store, and are read to be gathered.

    restore(out=…)   start to read this rank's range into its place in the slot     ahead of time; no rank meets another
    spread()         after all ranks have read theirs                               an all_gather, unless they share it

A gather after an update reads what the update writes, in that order: the store keeps the order of reads and writes of
one value, so a gather waits for the write-back of its own section and for no other. It stands in the place of a
`FlatBuffer`, with the same verbs (decision 0028).
"""

from __future__ import annotations

from typing import Any

from zerort.device import Done, Ticket
from zerort.engine.residence.column_parameters import ColumnParameters
from zerort.typing import Array

__all__ = ["RestingParameters"]


class RestingParameters(ColumnParameters):
    """One flat buffer of parameters that rests on the ranks' disks; the arguments are those of `ColumnParameters`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spread: Ticket[Array] | None = None

    def restore(self, *, out: Array | None = None) -> Ticket[Array]:
        """Start to read this rank's range into its place in ``out``; the Ticket is done when it is there.

        The whole is there when all ranks' ranges are: they meet, and then call `spread`.

        Args:
            out: Where the whole goes: 1-D, of the layout's numel and dtype.
        """
        assert out is not None, "what rests on a disk needs room"
        self._place = out
        return self.column.read(0, out[self._own.slice])

    def spread(self) -> Ticket[Array]:
        """Bring the other ranks' ranges here, which they have read; every rank calls this."""
        if self._group.one_memory:
            self._spread = Done(self.whole)
        else:
            self._spread = self._gather(self.whole[self._own.slice], out=self.whole)
        return self._spread

    def wait(self) -> None:
        """Wait for a gather that is under way."""
        if self._spread is not None:
            self._spread.wait()  # not-gpu: whoever lets a slot go has waited

    def release(self) -> None:
        """Let the gathered form go. Views of it must not be used any more."""
        self._place = self._spread = None

    def close(self) -> None:
        """Let go; the store's owner closes the store."""
        self.release()

    def __repr__(self) -> str:
        return f"RestingParameters({self.name!r}, {self.layout.numel} x {self.layout.dtype})"
