"""`PinnedMemory`: host memory of ours that the GPU reads and writes by itself, at the bus's speed, beside other work.

CuPy's own pinned pool rounds up to a power of two: 9 GiB take 16. Here memory that exists already, as a rule the node's
shared window, is registered with CUDA where it lies, in chunks: one huge registration fails as a whole, and holds up
the driver meanwhile. Arrays are then cut from it to the byte.

[Note: seams]
CUDA does not promise to copy across two registrations at once. So a copy is cut where a chunk begins (`seams`); nobody
else need know that there are chunks.
"""

from __future__ import annotations

import bisect
import contextlib
from typing import TYPE_CHECKING

from zerort.device.cuda.library import cupy
from zerort.errors import CallError, ClosedError, DeviceMemoryError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, DtypeLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CHUNK_NBYTES", "PinnedMemory", "seams"]

CHUNK_NBYTES = 256 * 1024**2
"""Bytes that are registered at once."""

_LINE = 64

_starts: list[int] = []  # of every registered chunk of this process, in order


def seams(address: int, nbytes: int) -> list[int]:
    """Return where, in bytes behind ``address``, a copy of ``nbytes`` from or to there must be cut."""
    first, end = bisect.bisect_right(_starts, address), bisect.bisect_left(_starts, address + nbytes)
    return [start - address for start in _starts[first:end]]


class PinnedMemory:
    """Host memory registered with CUDA, and arrays cut from it.

    Args:
        memory: 1-D, uint8, contiguous, starting on a page. Held until `close`.
        pin: Whether to register it; False is the slow form of the same, for ranks that agreed not to.
        chunk_nbytes: Bytes to register at once; a multiple of the page size.

    Raises:
        DeviceMemoryError: CUDA refuses; nothing is registered then.
    """

    def __init__(self, memory: Array, *, pin: bool = True, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._memory = memory
        self._taken = 0
        self._closed = False
        self._registered: list[int] = []
        if pin:
            try:
                for first in range(0, memory.size, chunk_nbytes):
                    self._register(memory[first : first + chunk_nbytes])
            except DeviceMemoryError:
                self._unregister()
                raise

    @property
    def pinned(self) -> bool:
        """Whether the GPU can reach it by itself."""
        return bool(self._registered)

    @property
    def nbytes(self) -> int:
        """Bytes, of which `taken` are in use."""
        return self._memory.size

    @property
    def taken(self) -> int:
        """Bytes that were cut off so far, with what alignment cost."""
        return self._taken

    def empty(self, numel: int, dtype: DtypeLike, *, alignment: int = _LINE) -> Array:
        """Cut a 1-D array off, in turn; there is no way back but `close`.

        Raises:
            DeviceMemoryError: Not that much is left.
        """
        if self._closed:
            raise ClosedError("Expected open pinned memory, got closed. Cut arrays before closing it.")
        if numel < 0 or alignment < 1 or alignment & (alignment - 1):
            raise CallError(f"Expected numel ≥ 0 and an alignment that is a power of two, got {numel} and {alignment}.")
        kind = numpy_dtype(dtype)
        first = self._taken + (-(self._memory.ctypes.data + self._taken) % alignment)
        nbytes = numel * kind.itemsize
        if first + nbytes > self._memory.size:
            raise DeviceMemoryError(
                f"Expected {nbytes:,} bytes of pinned memory, got {max(0, self._memory.size - first):,} left of "
                f"{self._memory.size:,}. Open it with more."
            )
        self._taken = first + nbytes
        return self._memory[first : first + nbytes].view(kind)

    def close(self) -> None:
        """Unregister it. Arrays stay readable; copies under way must have ended. Closing twice is fine."""
        self._closed = True
        self._unregister()

    def _register(self, chunk: Array) -> None:
        try:
            cupy.cuda.runtime.hostRegister(chunk.ctypes.data, chunk.size, 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceMemoryError(
                f"Expected to pin {self._memory.size:,} bytes of host memory, got: {error}, at chunk "
                f"{len(self._registered) + 1}. Ask for less, or free memory: what is pinned stays there. A container's "
                "limit counts it (docker run --memory), WSL 2 allows a part of the machine's memory; ulimit -l, which "
                "is for mlock, does not matter."
            ) from error
        self._registered.append(chunk.ctypes.data)
        bisect.insort(_starts, chunk.ctypes.data)

    def _unregister(self) -> None:
        with contextlib.ExitStack() as last_first:  # all of them, whatever CUDA says to one
            while self._registered:
                start = self._registered.pop()
                _starts.remove(start)
                last_first.callback(cupy.cuda.runtime.hostUnregister, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._taken:,} bytes taken"
        return f"PinnedMemory({self._memory.size:,} bytes, {'pinned' if self.pinned else 'pageable'}, {state})"
