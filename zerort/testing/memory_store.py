"""`MemoryStore`: values in a device's memory; reads and writes are copies on one stream, so they keep their order.

    MemoryStore()                        values on the host, for arrays of the host: what a test puts in a disk's place
    MemoryStore(gpu)                     values on the GPU, for arrays on either side
    MemoryStore(gpu, memory=pinned)      values on the host, in memory that the GPU reaches: arrays on either side

Where computing happens in the same memory, `view` spares the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerort import trace
from zerort.device import HostDevice, Ticket
from zerort.errors import ClosedError
from zerort.storage.files.extents import FileExtent
from zerort.storage.stores.store import Parts, as_bytes, check_new, check_range, move_each
from zerort.typing import Array, Device, Memory, Stream

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MemoryStore"]


class MemoryStore:
    """Values in memory.

    Args:
        device: Which copies; None takes the host. It is not closed with the store.
        memory: Where values lie, if not in the device's own memory: anything with `Device.empty`. What it cannot take
            back is not given back when a value is deleted.
        name: What it is called in errors and traces.

    >>> import numpy as np
    >>> with MemoryStore() as store:
    ...     store.create("a", 16)
    ...     _ = store.write("a", np.arange(2, dtype="float32"), offset=8)
    ...     store.read("a", np.empty(4, "float32")).wait()
    array([0., 0., 0., 1.], dtype=float32)
    """

    def __init__(self, device: Device | None = None, *, memory: Memory | None = None, name: str = "memory") -> None:
        self.name = name
        self._own = HostDevice(name) if device is None else None
        self._device: Device = self._own if self._own is not None else device  # type: ignore[assignment]
        self._memory: Memory = self._device if memory is None else memory
        self._stream: Stream = self._device.stream(f"{name} copy")
        self._values: dict[str, Array] = {}
        self._writes: list[Ticket[Array]] = []
        self._closed = False

    @property
    def nbytes(self) -> int:
        """The bytes of all values together."""
        return sum(value.nbytes for value in self._values.values())

    def create(self, name: str, nbytes: int, *, grain: int | None = None) -> None:
        """Make a value; see `Store.create`."""
        self._check_open()
        check_new(self, name, nbytes, known=name in self._values)
        value = self._memory.empty(int(nbytes), "uint8", alignment=4096)
        # gpu-wait: a_value_that_was_made_can_be_looked_at
        self._stream.submit(lambda: value.fill(0), name=f"create {name}").wait()
        self._values[name] = value

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Fill ``out`` from a value; see `Store.read`."""
        target = as_bytes(out, what="out", written=True)
        ticket = self._copy(self._range(name, offset, target.nbytes), target, result=out)
        trace.count("offload.read_bytes", target.nbytes)
        return ticket

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Put ``source`` into a value; see `Store.write`."""
        data = as_bytes(source, what="the source", written=False)
        ticket = self._copy(data, self._range(name, offset, data.nbytes), result=source)
        trace.count("offload.written_bytes", data.nbytes)
        self._writes = [one for one in self._writes if not one.done()]
        self._writes.append(ticket)
        return ticket

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Fill ``out`` from several ranges of a value; see `Store.read_parts`."""
        return move_each(self.read, name, out, parts)

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Put ``source`` into several ranges of a value; see `Store.write_parts`."""
        return move_each(self.write, name, source, parts)

    def view(self, name: str) -> Array:
        """Return a value itself: 1-D, uint8. It changes with every write, and is gone when the value is deleted."""
        self._check_open()
        check_range(self, name, 0, 0, nbytes=self._nbytes_of(name))
        return self._values[name]

    def flush(self) -> None:
        """Wait for all writes; see `Store.flush`."""
        self._check_open()
        while self._writes:
            self._writes.pop(0).wait()  # gpu-wait: what_was_flushed_can_be_looked_at

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return nothing: values are in no file; see `Store.file_extents`."""
        return []

    def copied_parts(self, directory: str) -> list[float]:
        """Return all of it; see `Store.copied_parts`."""
        return [1.0]

    def delete(self, name: str) -> None:
        """Forget a value; see `Store.delete`."""
        self._check_open()
        check_range(self, name, 0, 0, nbytes=self._nbytes_of(name))
        self._stream.synchronize()  # not-gpu: a stream holds the arrays of its work, also of a value that is gone
        del self._values[name]

    def close(self) -> None:
        """Finish the copies and drop the values."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._values.clear()
            if self._own is not None:
                self._own.close()

    def _copy(self, source: Array, target: Array, *, result: Array) -> Ticket[Array]:
        copied: Ticket[Array] = self._device.copy(source, out=target, stream=self._stream)
        return Ticket(copied.ready, result=result, keep=(copied,))

    def _range(self, name: str, offset: int, count: int) -> Array:
        self._check_open()
        check_range(self, name, offset, count, nbytes=self._nbytes_of(name))
        return self._values[name][int(offset) : int(offset) + count]

    def _nbytes_of(self, name: str) -> int | None:
        value = self._values.get(name)
        return None if value is None else value.nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"Store {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{len(self._values)} values of {self.nbytes} bytes"
        return f"MemoryStore({self.name!r}, {what})"
