"""`HostParameters`: parameters that rest in pinned host memory, each rank's range, and are gathered on GPUs.

    restore(out=…)   this rank's range to its place in the slot ── by event ──> an all_gather in place

The host waits for neither. It stands in the place of a `FlatBuffer`, with the same verbs.
"""

from __future__ import annotations

from typing import Any

from zerort.device import Done, Ticket, joined
from zerort.engine.residence.column_parameters import ColumnParameters
from zerort.typing import Array

__all__ = ["HostParameters"]


class HostParameters(ColumnParameters):
    """One flat buffer of parameters that rests on the host while computing happens on GPUs.

    The arguments are those of `ColumnParameters`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written: Ticket[None] = Done(None)
        """Done when the last update of these is in the host's memory: that of others may still be on its way."""
        self._whole: Ticket[Array] | None = None

    def restore(self, *, out: Array | None = None) -> Ticket[Array]:
        """Return the Ticket of the whole. Every rank calls this.

        Args:
            out: Where it goes: 1-D, on the GPU, of the layout's numel and dtype.
        """
        if self._whole is None:
            assert out is not None, "what rests on the host needs room"
            self._place = out
            mine = out[self._own.slice]
            if not self.written.done():
                # gpu-wait: an_update_is_the_same_on_either_side
                self.written.on(self._group.device.named_stream("copy in"))
            here = self.column.read(0, mine)
            self._group.after(here)  # gpu-wait: no_order_of_streams_changes_a_walk
            self._whole = joined([here, self._gather(mine, out=out)], result=out)
        return self._whole

    def wait(self) -> None:
        """Wait for a gather that is under way."""
        if self._whole is not None:
            self._whole.wait()  # not-gpu: whoever lets a slot go has waited

    def release(self) -> None:
        """Let the gathered form go. Views of it must not be used any more."""
        self._whole = self._place = None

    def close(self) -> None:
        """Let go; the host memory's owner closes that, once no copy is under way."""
        self.release()

    def __repr__(self) -> str:
        return f"HostParameters({self.name!r}, {self.layout.numel} x {self.layout.dtype})"
