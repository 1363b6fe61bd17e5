"""`Workspace`: the slots and threads of a pipeline, which its runs use one after the other.

slots       memory for `depth` chunks; a slot is busy until what was computed in it is written
feeder      reads the next chunk into a slot as soon as that is free
writer      writes a chunk once a GPU has computed it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from zerort.device import HostDevice, HostStream, Ticket, joined
from zerort.device.slots import Slot, Slots, cut_from
from zerort.storage.files.blocks import PAGE_NBYTES
from zerort.storage.stores.operation import StoreOperation
from zerort.typing import Array, Memory

__all__ = ["Workspace"]


class Workspace:
    """What the runs of a pipeline share.

    Args:
        name: The pipeline's.
        slot_nbytes: Memory of one slot.
        depth: How many slots there may be.
        memory: Where they come from; None takes the host's.
        pinned: What to cut them from instead; see `Pipeline`.
    """

    def __init__(self, name: str, *, slot_nbytes: int, depth: int, memory: Memory | None, pinned: Array | None) -> None:
        source: Memory = HostDevice(name) if memory is None else memory
        allocate = functools.partial(source.empty, dtype="uint8", alignment=PAGE_NBYTES)
        self.name = name
        self.depth = depth
        self.slot_nbytes = slot_nbytes
        self.slots = Slots(f"slots of {name!r}", allocate=allocate if pinned is None else cut_from(pinned))
        self.feeder = HostStream(f"{name} feed")
        self._writer = HostStream(f"{name} write", helping=False)  # nobody waits for it while there is more to compute
        self._failure: BaseException | None = None

    def reserve(self, chunks: int) -> None:
        """Have slots for so many chunks at once, at most `depth`."""
        self.slots.reserve(max(self.slot_nbytes, 1), count=min(self.depth, chunks))

    def wait_written(self, slot: Slot) -> None:
        """Wait until the chunk that was in a slot is written, and raise what that raised."""
        busy = slot.busy
        if busy is None:
            return
        try:
            busy.wait()  # gpu-wait: state_on_a_disk_streams
        except Exception as error:
            self._failure = error
            raise
        finally:
            if busy.done():  # else the wait was interrupted, and somebody has to wait again
                slot.busy = None

    def write_after(self, ticket: Ticket[Any], write: Callable[[list[Ticket[Any]]], None]) -> Ticket[None]:
        """Let the writer begin to write when a ticket is done. Returns the Ticket of all that."""
        writes = StoreOperation(title=f"Writes of pipeline {self.name!r}")

        def work() -> None:
            writes.attempt(ticket.wait)  # gpu-wait: what_a_run_leaves_to_the_gpu
            writes.attempt(lambda: write(writes.parts))
            writes.asked.set()

        self._writer.submit(work, name="write")
        return Ticket(writes)

    def wait_submitted(self) -> None:
        """Wait until all that was computed is being written: whoever reads it from now on comes after that."""
        self._writer.synchronize()  # gpu-wait: what_a_run_leaves_to_the_gpu

    def finish(self) -> None:
        """Wait until all that was computed is written, and raise the first error; all other writes have ended, too."""
        try:
            joined(self._writes(), result=None).wait()  # gpu-wait: what_a_run_has_written
        finally:
            self.failure()
            for slot in self.slots:
                if slot.busy is not None and slot.busy.done():
                    slot.busy = None

    def failure(self) -> BaseException | None:
        """Return what a write has raised, if it is known by now. Never waits."""
        for ticket in self._writes():
            if ticket.done():
                try:
                    ticket.wait()  # not-gpu: it is done
                except Exception as error:
                    self._failure = error
        return self._failure

    def _writes(self) -> Sequence[Ticket[Any]]:
        return [busy for slot in self.slots if (busy := slot.busy) is not None]

    def close(self) -> None:
        """Wait for writes that are under way, end the threads and give the memory back.

        Raises:
            Exception: What a write raised.
        """
        try:
            self.finish()  # gpu-wait: slots_are_free_when_a_pipeline_is_closed
        finally:
            self.feeder.close()
            self._writer.close()
            self.slots.close()
