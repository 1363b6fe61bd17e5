"""`HostMemory`: what a runtime on GPUs keeps on the host. All ranks pin it, or none: see `comm.transports.nccl.pinned`.

On a runtime without GPUs nobody needs it: there the host is the device.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from zerort.comm import Group
from zerort.device import HostDevice
from zerort.errors import ZerortError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, DtypeLike

if TYPE_CHECKING:
    from zerort.device.cuda.pinned import PinnedMemory

__all__ = ["HostMemory"]

_PAGE = 4096

_LAST_COPY = 2.0
"""Seconds that copies which are under way get to end when the memory goes."""


class HostMemory:
    """This rank's memory on the host that its GPU reaches. Every rank makes one.

    Args:
        group: The ranks that agree on pinning.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_beside_device = not group.device.in_host_memory
        self._arenas: dict[int, PinnedMemory] = {}  # by the address of the array that was cut from it

    def zeros(self, numel: int, dtype: DtypeLike) -> Array:
        """Return a 1-D array of zeros that starts on a page. Every rank calls this; ``numel`` may differ."""
        kind = numpy_dtype(dtype)
        if not self._is_beside_device:
            return HostDevice().zeros(numel, kind)
        from zerort.comm.transports.nccl.pinned import open_pinned

        arena = open_pinned(self._group, numel * kind.itemsize, shared=False, name="host memory")
        if not numel:
            return np.empty(0, kind)
        array = arena.empty(numel, kind, alignment=_PAGE)
        self._arenas[array.ctypes.data] = arena
        return array

    def free(self, array: Array) -> None:
        """Let go of an array from here, as it came: no copy is under way. It stays readable."""
        arena = self._arenas.pop(array.ctypes.data, None)
        if arena is not None:
            arena.close()

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for and are held."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def close(self) -> None:
        """Let go of it, once no copy is under way. Arrays stay readable."""
        if self._arenas:
            for name in ("copy in", "copy out"):
                # What was to come before a copy may never end; then it is the GPU's end as well.
                with contextlib.suppress(ZerortError, TimeoutError):
                    # not-gpu: the emulated device keeps memory that copies use; CUDA does not promise that
                    self._group.device.named_stream(name).submit(lambda: None, name="close").wait(_LAST_COPY)
        with contextlib.ExitStack() as stack:
            while self._arenas:
                stack.callback(self._arenas.popitem()[1].close)
