"""Freed arrays: what CuPy's memory pool takes back must no longer be in use, and is poisoned."""

from __future__ import annotations

import ctypes

import cupy
from cupy.cuda import BaseMemory, MemoryPointer

from cusim.start import started


class PoisonedMemory(BaseMemory):  # type: ignore[misc] # CuPy has no types
    """Memory of a pool that is overwritten when its last array goes."""

    def __init__(self, inner: MemoryPointer, size: int) -> None:
        self.inner = inner
        self.ptr = inner.ptr
        self.size = size
        self.device_id = inner.device_id
        self.stream = cupy.cuda.get_current_stream()  # kept: the pool reuses the memory in this stream's order
        self.freed = started().cusim_freed

    def __del__(self) -> None:
        self.freed(self.ptr, self.size, self.device_id, self.stream.ptr)  # no names of modules: they may be gone


def poison_freed_arrays() -> None:
    """Let CuPy allocate as before, and overwrite what it frees."""
    allocate = cupy.cuda.get_allocator()
    started().cusim_freed.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    def allocate_poisoned(size: int) -> MemoryPointer:
        inner = allocate(size)
        return inner if size == 0 else MemoryPointer(PoisonedMemory(inner, size), 0)

    cupy.cuda.set_allocator(allocate_poisoned)
