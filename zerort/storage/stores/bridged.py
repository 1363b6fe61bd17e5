"""`BridgedStore`: arrays on a GPU, values in another store: blocks pass through pinned slots, both ways at once.

    read    disk ──> slot 0 ──> GPU          write    GPU ──> slot 0 ──> disk
                disk ──> slot 1 ──> GPU                   GPU ──> slot 1 ──> disk
                    disk ──> slot 2 ──> GPU                   GPU ──> slot 2 ──> disk

[Note: threads] A feeder each way hands blocks on as slots become free. Reads are asked for by the feeder, and the
copies' stream waits for them; writes are asked for by a third thread, once their block has come from the GPU. So nobody
who calls a verb waits, and the disk has its next block before the GPU has got the last one (decision 0048).

[Note: order] The other store keeps the order in which it is asked. So an operation is held back only until those before
it that touch the same bytes have been asked for. Each waits for earlier ones alone: no deadlock.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zerort import forks
from zerort.device import Done, HostDevice, HostStream, Ticket
from zerort.device.slots import Slot, Slots, cut_from
from zerort.errors import CallError, ClosedError
from zerort.storage.files.blocks import BLOCK_NBYTES, PAGE_NBYTES
from zerort.storage.files.extents import FileExtent
from zerort.storage.files.segments import round_up
from zerort.storage.stores.operation import Span, StoreOperation
from zerort.storage.stores.store import Parts, Store, as_bytes, check_new, check_range, move_each
from zerort.typing import Array, Device

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BridgedStore"]


class BridgedStore:
    """Values of another store, for arrays on a GPU, and for those of the host as before.

    Args:
        inner: Where values lie. It is closed with this store.
        device: The GPU's.
        slot_nbytes: Bytes that pass at once; a multiple of the page size.
        depth: Slots each way.
        pinned: Host memory for the slots: 1-D, uint8, ``2 * depth * slot_nbytes`` bytes or more, from a page on, as a
            rule pinned. None takes pageable memory, from and to which copies are slow and hold up others.
    """

    def __init__(
        self,
        inner: Store,
        device: Device,
        *,
        slot_nbytes: int = BLOCK_NBYTES,
        depth: int = 3,
        pinned: Array | None = None,
    ) -> None:
        if slot_nbytes < PAGE_NBYTES or slot_nbytes % PAGE_NBYTES or depth < 1:
            raise CallError(
                f"Expected at least one slot of whole pages ({PAGE_NBYTES} bytes), got {depth} of {slot_nbytes}."
            )
        room = 2 * depth * slot_nbytes
        if pinned is None:
            pinned = HostDevice(inner.name).empty(room, "uint8", alignment=PAGE_NBYTES)
        if pinned.dtype != np.uint8 or pinned.ndim != 1 or pinned.size < room:
            raise CallError(
                f"Expected pinned memory as 1-D uint8 of at least {room:,} bytes, {2 * depth} slots of "
                f"{slot_nbytes:,}, got {pinned.dtype}{list(pinned.shape)}."
            )
        self.inner = inner
        self.name = inner.name
        self._gpu = cast(Any, device)  # which has more to offer than every device
        self._slot_nbytes = slot_nbytes
        allocate = cut_from(pinned)
        self._in_slots, self._out_slots = (
            Slots(f"slots of store {self.name!r}, {way}", allocate=allocate) for way in ("in", "out")
        )
        for slots in (self._in_slots, self._out_slots):
            slots.reserve(slot_nbytes, count=depth)
        # None of them helps: who waits for an operation does not wait for these.
        self._in, self._out, self._calls = (
            self._gpu.stream(f"{self.name} {what}", helping=False) for what in ("in", "out", "calls")
        )
        self._feed_in, self._feed_out, self._landing = (
            HostStream(f"{self.name} {what}", helping=False) for what in ("feed in", "feed out", "land")
        )
        self._nbytes: dict[str, int] = {}
        self._operations: list[StoreOperation] = []
        self._lock = threading.Lock()
        self._closed = self._is_inherited = False
        forks.follow(self)

    @property
    def nbytes(self) -> int:
        """The bytes of all values together."""
        return self.inner.nbytes

    def create(self, name: str, nbytes: int, *, grain: int | None = None) -> None:
        """Make a value; see `Store.create`."""
        with self._lock:
            self._check_open()
            check_new(self, name, nbytes, known=name in self._nbytes)
            self.inner.create(name, nbytes, grain=grain)
            self._nbytes[name] = int(nbytes)

    def read(self, name: str, out: Any, *, offset: int = 0) -> Ticket[Any]:
        """Fill ``out``, on the GPU or on the host, from a value; see `Store.read`."""
        data = as_bytes(out, what="out", written=True)
        with self._lock:
            operation, called = self._begin(name, offset, data, writes=False)

            def pass_on() -> None:
                if isinstance(data, np.ndarray):
                    operation.parts.append(self.inner.read(name, data, offset=int(offset)))
                    return
                for begin, part in self._blocks(int(offset), data):
                    slot = _next_free(self._in_slots)
                    place = slot.memory[: part.size]
                    come = self.inner.read(name, place, offset=begin)
                    # gpu-wait: what_the_caller_has_queued_comes_first [called, come -> come]
                    # gpu-wait: TestBehindABridge [called, come -> called]
                    slot.busy = self._gpu.copy(place, out=part, stream=self._in, after=[called, come], eager=False)
                    operation.parts.append(slot.busy)

            def feed() -> None:
                operation.follow_asked()
                operation.attempt(pass_on)
                operation.asked.set()

            self._feed_in.submit(feed, name=f"feed {name}")
        return Ticket(operation, result=out, keep=(out,))

    def write(self, name: str, source: Any, *, offset: int = 0) -> Ticket[Any]:
        """Put ``source``, on the GPU or on the host, into a value; see `Store.write`."""
        data = as_bytes(source, what="the source", written=False)
        with self._lock:
            operation, called = self._begin(name, offset, data, writes=True)

            def land(begin: int, place: Array, come: Ticket[Any]) -> Ticket[Any]:
                come.wait()  # gpu-wait: TestBehindABridge
                operation.parts.append(self.inner.write(name, place, offset=begin))
                return operation.parts[-1]

            def pass_on() -> None:
                if isinstance(data, np.ndarray):
                    self._land(operation, partial(land, int(offset), data, called))
                    return
                for begin, part in self._blocks(int(offset), data):
                    slot = _next_free(self._out_slots)
                    place = slot.memory[: part.size]
                    # gpu-wait: what_the_caller_has_queued_comes_first
                    come = self._gpu.copy(part, out=place, stream=self._out, after=[called])
                    slot.busy = self._land(operation, partial(land, begin, place, come))

            def feed() -> None:
                operation.follow_asked()
                operation.attempt(pass_on)
                self._landing.submit(operation.asked.set, name=f"landed {name}")

            self._feed_out.submit(feed, name=f"feed {name}")
        return Ticket(operation, result=source, keep=(source,))

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Fill ``out`` from several ranges of a value; see `Store.read_parts`."""
        return move_each(self.read, name, out, parts)

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Put ``source`` into several ranges of a value; see `Store.write_parts`."""
        return move_each(self.write, name, source, parts)

    def _begin(self, name: str, offset: int, data: Any, *, writes: bool) -> tuple[StoreOperation, Ticket[Any]]:
        """Note an operation, and what of its caller's own stream it comes after."""
        self._check_open()
        check_range(self, name, offset, data.nbytes, nbytes=self._nbytes.get(name))
        self._operations = [one for one in self._operations if not one.done() or one.unseen_error() is not None]
        span = Span(name, int(offset), int(offset) + data.nbytes, writes=writes)
        after = [one for one in self._operations if one.conflicts(span)]
        # gpu-wait: a_read_comes_after_the_write_before_it
        self._operations.append(operation := StoreOperation(span, after=after))
        called: Ticket[Any] = Done(None)
        if not isinstance(data, np.ndarray):
            # gpu-wait: what_the_caller_has_queued_comes_first [eager=True -> eager=True, after=()]
            called = self._calls.submit(_nothing, name=f"call {name}", eager=True)
        return operation, called

    def _blocks(self, begin: int, data: Any) -> Iterator[tuple[int, Any]]:
        """Cut a range at multiples of a slot in the value, which are whole grains of a disk's checksums."""
        end, size = begin + data.nbytes, self._slot_nbytes
        marks = [begin, *range(round_up(begin + 1, size), end, size), end] if begin < end else []
        for first, last in itertools.pairwise(marks):
            yield first, data[first - begin : last - begin]

    def _land(self, operation: StoreOperation, land: Callable[[], Ticket[Any]]) -> Ticket[Any]:
        return self._landing.submit(partial(operation.attempt, land), name=f"land: {operation.span}")

    def flush(self) -> None:
        """Wait for all writes, and flush the other store; see `Store.flush`."""
        self._check_open()
        for operation in list(self._operations):
            if operation.writes and operation.unseen_error() is not None:
                operation.wait()  # gpu-wait: a_write_that_failed_is_told
        self.inner.flush()

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return the files of the other store, for arrays of the host; see `Store.file_extents`."""
        return self.inner.file_extents(name, directory)

    def copied_parts(self, directory: str) -> list[float]:
        """Return what of the other store cannot be linked; see `Store.copied_parts`."""
        return self.inner.copied_parts(directory)

    def delete(self, name: str) -> None:
        """Forget a value; see `Store.delete`."""
        with self._lock:
            self._check_open()
            check_range(self, name, 0, 0, nbytes=self._nbytes.get(name))
            for operation in self._operations:
                if operation.is_of(name):
                    operation.asked.wait()  # gpu-wait: a_value_goes_after_what_was_asked_of_it
            self.inner.delete(name)
            del self._nbytes[name]

    def close(self) -> None:
        """Finish what was asked for, and close the other store; see `Store.close`.

        Warns of a write that failed if nobody waited for it: the error would be lost.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for feeder in (self._feed_in, self._feed_out, self._landing):
            feeder.close()
        lost = [error for one in self._operations if (error := one.unseen_error()) is not None]
        try:
            for stream in (self._in, self._out, self._calls):
                self._gpu.drop(stream)
        finally:
            self.inner.close()
        if lost:
            warnings.warn(
                f"Store {self.name!r}: {len(lost)} writes failed and nobody waited for them; one with "
                f"{type(lost[0]).__name__}: {lost[0]}. Call wait() on every ticket, or flush().",
                RuntimeWarning,
                stacklevel=2,
            )

    def disown(self) -> None:
        """In a forked child, which cannot use its parent's GPU: be closed."""
        self._closed = self._is_inherited = True
        self._lock = threading.Lock()  # a thread of the parent may have had it

    def _check_open(self) -> None:
        if self._is_inherited:
            raise forks.inherited(f"store {self.name!r}")
        if self._closed:
            raise ClosedError(f"Store {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"BridgedStore({self._gpu.name}, {'closed' if self._closed else self.inner!r})"


def _next_free(slots: Slots) -> Slot:
    """Return the next slot in turn, once the block before has left it: its `busy` is done, and a write that it began.

    It goes back into the line at once, so that a block that is refused does not keep it; a feeder fills one at a time.
    """
    slot = slots.take()
    if slot.busy is not None:
        with contextlib.suppress(Exception):  # told to whoever waits for the block's operation
            asked = slot.busy.wait()  # gpu-wait: TestBehindABridge [-> None]
            if isinstance(asked, Ticket):
                asked.wait()  # gpu-wait: a_slot_is_not_filled_while_a_disk_reads_it
    slot.release()
    return slot


def _nothing() -> None:
    return None
