"""`UpdateStream`: an update's chunks that are on a disk: read, computed, written back, while the next step begins.

    prefetch       begin to read what the last update began with                    while gradients are being reduced
    run            chunks through the pipeline: read, compute, write back           the update
    failure        what a write of the last update has met, if it is known          asked at every meeting of the ranks
    wait_written   the last update is on the disk, or known to have failed          before a save, a load

[Note: Slots] On GPUs the pipeline's slots are cut from the runtime's host memory, which all ranks pin, or none: copies
from and to pageable memory would hold up the thread that asks for them. Without a GPU nobody reserves any, and the
pipeline has memory of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from zerort.errors import StorageError
from zerort.storage.files.blocks import aligned_buffer
from zerort.storage.session import StorageSession
from zerort.streaming.pipeline import Pipeline
from zerort.streaming.run import Run
from zerort.streaming.transfers import StoreTransfer, slot_nbytes_of
from zerort.trace.ledger import Ledger
from zerort.typing import Array, HostMemorySource

__all__ = ["UpdateStream"]


class UpdateStream:
    """This rank's pipeline between its store and its updates. Every rank has one.

    Args:
        storage: Where values are.
        ledger: Where waits are counted.
        host: What slots are cut from if `reserve` asks for it.
        rank: Whose errors these are.
    """

    def __init__(self, storage: StorageSession, *, ledger: Ledger, host: HostMemorySource, rank: int) -> None:
        self._storage = storage
        self._ledger = ledger
        self._host = host
        self._rank = rank
        self._depth = storage.options.depth
        self._pipeline: Pipeline | None = None
        self._ahead: Run | None = None
        self._last: Sequence[Sequence[StoreTransfer]] = ()  # what the last update streamed
        self._reserved: Array | None = None  # [Note: Slots]
        self._reserved_slot = 0
        self._window: Array | None = None

    @property
    def nbytes(self) -> int:
        """Memory that chunks take on their way, or that is kept for them; the window of `window` besides."""
        reserved = 0 if self._reserved is None else self._reserved.nbytes
        window = 0 if self._window is None else self._window.nbytes
        return max(reserved, 0 if self._pipeline is None else self._pipeline.nbytes) + window

    @contextlib.contextmanager
    def window(self, nbytes: int) -> Iterator[Array]:
        """Lend memory for pages of values that are not streamed as chunks: 1-D, uint8, at a page; kept for the next."""
        lent, self._window = self._window, None
        if lent is None or lent.nbytes < nbytes:
            lent = aligned_buffer(nbytes)
        yield lent[:nbytes]
        self._window = lent  # not after an interrupt: reads that nobody has waited for may still come

    def reserve(self, slot_nbytes: int) -> None:
        """Have pinned memory for chunks of so many bytes that go on to a GPU. Every rank calls this alike."""
        if slot_nbytes <= self._reserved_slot:
            return
        if self.wait_written() is None:  # else it remembers what failed; nothing is under way in either case
            self.reset()
        reserved, self._reserved, self._reserved_slot = self._reserved, None, 0
        if reserved is not None:
            self._host.free(reserved)
        self._reserved = self._host.zeros(self._depth * slot_nbytes, "uint8")
        self._reserved_slot = slot_nbytes

    # -- moving ----------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin to read what the last update began with: the next one will, too. Gradients need not be there yet.

        Nothing that these chunks hold may be written until `run` or `cancel_prefetch`.
        """
        if self._ahead is None and self._pipeline is not None and self._last:
            first = self._last[: self._pipeline.depth]
            if all(part.write for chunk in first for part in chunk):  # what is only read are gradients
                self._ahead = self._pipeline.begin(self._last)

    def cancel_prefetch(self) -> None:
        """Let go of what was read ahead: it is about to change, or will not be used."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()

    def run(self, chunks: Sequence[Sequence[StoreTransfer]], compute: Callable[..., object]) -> None:
        """Stream chunks through memory, as `Pipeline.run` does. Returns while the last ones are still being written.

        What goes wrong from then on, `failure` tells.

        Raises:
            Exception: What `Pipeline.run` raises, or what a write of the last update has met.
        """
        run, self._ahead = self._ahead, None
        if run is not None and not run.continues(chunks):
            run.cancel()
            run = None
        if run is None:
            run = self._pipeline_for(chunks).begin(chunks)
        report = run.go(compute, finish=False)
        self._last = chunks
        self._storage.count(read=report.read_nbytes, written=report.written_nbytes)
        self._ledger.stalled["nvme"] += int(report.stall_seconds * 1e9)
        # Each read has waited for the last update's write of the same value. If that failed, what was read is older.
        self.check_written()

    def _pipeline_for(self, chunks: Sequence[Sequence[StoreTransfer]]) -> Pipeline:
        needed = max(slot_nbytes_of(chunks), self._reserved_slot)
        if self._pipeline is not None and self._pipeline.slot_nbytes < needed:
            pipeline, self._pipeline = self._pipeline, None
            pipeline.close()
        if self._pipeline is None:
            pinned = None if needed > self._reserved_slot else self._reserved
            self._pipeline = Pipeline(slot_nbytes=needed, depth=self._depth, pinned=pinned, name="offload")
            self._pipeline.reserve()  # as a forecast counts them, which knows no update's chunks
        return self._pipeline

    # -- what was written ------------------------------------------------------------------------------------------

    def failure(self) -> StorageError | None:
        """Return what a write of the last update has met, on this rank alone, as far as it is known. Never waits.

        From then on this rank has it to tell at every meeting, until a load.
        """
        found = None if self._pipeline is None else self._pipeline.failure()
        if found is None or isinstance(found, StorageError):
            return found
        what = f"{type(found).__name__}: {found} (rank {self._rank})"
        failure = StorageError(f"Expected to write what an update computed, got {what}. Go back to a checkpoint.")
        failure.__cause__ = found
        return failure

    def check_written(self) -> None:
        """Raise what a write of the last update has met, on this rank alone, as far as it is known. Never waits."""
        if (failed := self.failure()) is not None:
            raise failed

    def wait_written(self) -> StorageError | None:
        """Wait until the last update is written; return what went wrong, on this rank alone."""
        self.cancel_prefetch()
        if self._pipeline is not None:
            with contextlib.suppress(Exception), self._ledger.stall("nvme"):
                self._pipeline.finish()  # not-gpu: between the host and a disk
        return self.failure()

    def reset(self) -> None:
        """Forget the last update, and what a write of it has met."""
        self.cancel_prefetch()
        pipeline, self._pipeline = self._pipeline, None
        self._last = ()
        if pipeline is not None:
            with contextlib.suppress(Exception):  # told before, or of no use to anybody now
                pipeline.close()

    def close(self) -> None:
        """Forget the last update, and give the window back."""
        self.reset()
        self._window = None
