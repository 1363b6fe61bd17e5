"""`UpdateStaging`: where updates are computed on a runtime with GPUs, and how arrays that rest elsewhere come there.

all of it on the GPU   computed where it lies, on the caller's stream
GPU and host           through a `Staging`, on the side that `OffloadOptions.update_on` names
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerort.config.offload import OffloadOptions
from zerort.device import Done, Ticket
from zerort.storage.files.segments import round_up
from zerort.streaming.staging import Staging
from zerort.streaming.transfers import ArrayTransfer, Place, slot_nbytes_of
from zerort.typing import Array, Device, HostMemorySource

__all__ = ["STAGING_DEPTH", "UpdateStaging"]

STAGING_DEPTH = 3
"""Chunks that are on their way at once: one coming, one being computed, one leaving."""


class UpdateStaging:
    """This rank's way between its GPU and its host.

    Args:
        device: Where computing happens.
        host: Pinned memory for what passes through the host.
        options: How values stream.
    """

    def __init__(self, device: Device, host: HostMemorySource, *, options: OffloadOptions) -> None:
        self._device = device
        self._host = host
        self._place: Place = options.update_on
        self._staging: Staging | None = None
        self._pinned: Array | None = None

    def reserve(self, slot_nbytes: int) -> None:
        """Have pinned memory for chunks of so many bytes, if the host computes. Every rank calls this alike."""
        needed = STAGING_DEPTH * round_up(slot_nbytes, ArrayTransfer.alignment)
        if self._place == "host" and (self._pinned is None or self._pinned.size < needed):
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
        return self._staging_for(chunks).run(chunks, compute, on=self._place)

    def _is_mixed(self, chunk: Sequence[ArrayTransfer]) -> bool:
        return any(not self._device.owns(one.array) for one in chunk)

    def _staging_for(self, chunks: Sequence[Sequence[ArrayTransfer]]) -> Staging:
        needed = slot_nbytes_of(chunks, on=self._place)
        if self._staging is not None and self._staging.slot_nbytes < needed:
            self.close()
        if self._staging is None:
            depth, pinned = STAGING_DEPTH, self._pinned
            self._staging = Staging(self._device, slot_nbytes=needed, depth=depth, pinned=pinned, name="update")
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
