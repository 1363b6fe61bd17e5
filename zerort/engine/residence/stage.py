"""`Stage`: where updates are computed on a runtime with GPUs, and how arrays that rest elsewhere come there.

all of it on the GPU   computed where it lies, on the caller's stream
GPU and host           through a `Staging`, on the side that is faster or that was asked for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zerort.device import Done, Ticket
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.residence.host_memory import HostMemory
from zerort.typing import Array, Device

if TYPE_CHECKING:
    from zerort.streaming import ArrayTransfer, Staging
    from zerort.streaming.transfers import Place

__all__ = ["Stage"]

_DEPTH = 3
"""Chunks that are on their way at once: one coming, one being computed, one leaving."""

_ROOM = 8192
"""Bytes of a slot for where its arrays begin."""

_MEASURED = 8 * 1024**2
"""Bytes at least, for copies that are timed: shorter ones would tell how long a copy takes to begin."""


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
        self._pinned: Array | None = None
        self._place: Place | None = None  # once it is decided

    def reserve(self, slot_nbytes: int) -> None:
        """Have pinned memory for chunks of so many bytes on the GPU. Every rank calls this alike."""
        needed = max(_DEPTH * (slot_nbytes + _ROOM), _MEASURED)
        if self._options.update_on != "device" and (self._pinned is None or self._pinned.size < needed):
            self.close()  # no copy is under way then
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                self._host.free(pinned)
            self._pinned = self._host.zeros(needed, "uint8")

    @property
    def nbytes(self) -> int:
        """Memory that chunks take on their way, on both sides."""
        return 0 if self._staging is None else self._staging.nbytes

    def run(
        self, chunks: Sequence[Sequence[ArrayTransfer]], compute: Callable[..., object]
    ) -> Ticket[list[Ticket[None]]]:
        """Compute ``compute(number, array, array, …)`` for every chunk, on one side, and bring back what was changed.

        Returns:
            A Ticket that is done when arrays on the host are the caller's again. Those on the GPU are already, for what
            comes next on the caller's stream. Its result, there at once, has such a Ticket for each chunk by itself.
        """
        if not any(self._is_mixed(chunk) for chunk in chunks):
            for number, chunk in enumerate(chunks):
                compute(number, *(one.array for one in chunk))
            return Done([Done(None) for _ in chunks])
        place = self._place = self._place or self._choose(chunks)
        return self._staging_for(chunks, place).run(chunks, compute, on=place)

    def _is_mixed(self, chunk: Sequence[ArrayTransfer]) -> bool:
        return any(not self._device.owns(one.array) for one in chunk)

    def _choose(self, chunks: Sequence[Sequence[ArrayTransfer]]) -> Place:
        """Return where updates are faster, as far as the first of them tells. Ranks need not agree."""
        from zerort.streaming.update_place import Traffic, choose_place, measure

        if self._options.update_on != "auto":
            return self._options.update_on
        return choose_place(Traffic.of(chunks), measure(self._device, pinned=self._pinned)).place

    def _staging_for(self, chunks: Sequence[Sequence[ArrayTransfer]], place: Place) -> Staging:
        from zerort.streaming import Staging, slot_nbytes_of

        needed = slot_nbytes_of(chunks, on=place)
        if self._staging is not None and self._staging.slot_nbytes < needed:
            self.close()
        if self._staging is None:
            pinned = self._pinned if place == "host" else None
            self._staging = Staging(self._device, slot_nbytes=needed, depth=_DEPTH, pinned=pinned, name="update")
        return self._staging

    def finish(self) -> None:
        """Wait until what was computed is where it rests."""
        if self._staging is not None:
            self._staging.finish()  # gpu-wait: a_digest_is_of_what_was_written

    def close(self) -> None:
        """Wait for what is under way and give the memory back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
