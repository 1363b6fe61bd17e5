"""`Stage`: where a runtime's updates are computed, and how arrays that rest elsewhere come there.

    host only             computed where they lie
    GPU, all of it there  computed where they lie, on the caller's stream
    GPU and host          through a `Staging`, on the side that is faster or that was asked for

May import: device, offload, engine.host_memory, engine.offload_options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zerort.device import Done, HostDevice, Ticket
from zerort.engine.host_memory import HostMemory
from zerort.engine.offload_options import OffloadOptions
from zerort.typing import Device

if TYPE_CHECKING:
    from zerort.offload import Hop, Staging
    from zerort.offload.hops import Place

__all__ = ["Stage"]

_DEPTH = 3
"""Chunks that are on their way at once: one coming, one being computed, one leaving."""


class Stage:
    """This rank's way between its GPU and its host.

    Args:
        device: Where computing happens.
        host: Pinned memory for what passes through the host.
        options: How values stream.
    """

    def __init__(self, device: Device, host: HostMemory, *, options: OffloadOptions) -> None:
        self._device = device
        self._host = host
        self._options = options
        self._staging: Staging | None = None

    @property
    def nbytes(self) -> int:
        """Memory that chunks take on their way, on both sides."""
        return 0 if self._staging is None else self._staging.nbytes

    def run(self, chunks: Sequence[Sequence[Hop]], compute: Callable[..., object]) -> Ticket[None]:
        """Compute ``compute(number, array, array, …)`` for every chunk, on one side, and bring back what was changed.

        Returns:
            A Ticket that is done when arrays on the host are the caller's again. Those on the GPU are already, for what
            comes next on the caller's stream.
        """
        if isinstance(self._device, HostDevice) or not any(self._is_mixed(chunk) for chunk in chunks):
            for number, chunk in enumerate(chunks):
                compute(number, *(hop.array for hop in chunk))
            return Done(None)
        return self._staging_for(chunks).run(chunks, compute, on=self._place)

    def _is_mixed(self, chunk: Sequence[Hop]) -> bool:
        return any(not self._device.owns(hop.array) for hop in chunk)

    @property
    def _place(self) -> Place:
        return "device"

    def _staging_for(self, chunks: Sequence[Sequence[Hop]]) -> Staging:
        from zerort.offload import Staging, slot_nbytes_of

        needed = slot_nbytes_of(chunks, on=self._place)
        if self._staging is not None and self._staging.slot_nbytes < needed:
            self.close()
        if self._staging is None:
            self._staging = Staging(self._device, slot_nbytes=needed, depth=_DEPTH, name="update")
        return self._staging

    def finish(self) -> None:
        """Wait until what was computed is where it rests."""
        if self._staging is not None:
            self._staging.finish()

    def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
