"""Deltas and arrays of which much is zero over CuPy arrays, with the host's bytes (`delta.py`, `sparse.py`).

Kernels are queued on the current stream; only `find_changes` waits for them, since the host has to know how much there
is. They need room beside their arrays, 32 bytes for each 2,048 elements (`marks_nbytes`). They never write outside of
what they are given, but a payload is not checked: it comes from another GPU of the run, not from a file. The source is
`changes_cuda.cu` (decision 0188).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from zerort.device.cuda.kernel_module import KernelModule
from zerort.device.cuda.library import cupy
from zerort.errors import CallError
from zerort.native.reference.changes import STRETCH, marks_nbytes

__all__ = ["OPTIONS", "SOURCE", "apply_payload", "find_changes", "write_delta", "write_sparse"]

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--std=c++17",)

_THREADS: Final = 256
_HEADER_NBYTES: Final = 24
_NOTHING: Final = np.uintp(0)
"""A base of zeros."""
_BITMAP: Final = 1
_MODULE = KernelModule(SOURCE, OPTIONS)


def find_changes(base: Any, now: Any, *, room: Any = None) -> tuple[int, int]:
    """Return how many elements differ, and how many bytes their positions take as gaps; waits for the answer.

    Args:
        base: 1-D, contiguous, whole numbers of 1, 2, 4 or 8 bytes; None: zeros.
        now: The same dtype and length.
        room: uint8, `marks_nbytes` at least, at an address that 8 divides; new memory if None.
    """
    if not now.size:
        return 0, 0
    marks = _mark(base, now, room)
    first, _, count, nbytes = marks[-4:].get().tolist()
    return count, nbytes + (first // 255 + 1 if count else 0)


def write_delta(payload: Any, base: Any, now: Any, *, way: int, count: int, room: Any = None) -> None:
    """Write what differs into ``payload``, header included; see `encode_delta`.

    Args:
        payload: uint8, as long as was measured, at an address that 8 divides.
        base: As in `find_changes`.
        now: The same dtype and length.
        way: How positions are written.
        count: How many values there are.
        room: As in `find_changes`.
    """
    nbytes = payload.size - _HEADER_NBYTES - count * now.itemsize
    sizes = (np.int32(way), np.int64(count), np.int64(nbytes))
    width = np.int32(now.itemsize)
    _launch("begin_payload", max(now.size, nbytes, 1), np.int64(now.size), now, width, *sizes, payload)
    if nbytes:
        _write(payload[_HEADER_NBYTES:], base, now, way=way, count=count, nbytes=nbytes, room=room)


def write_sparse(payload: Any, elements: Any, *, room: Any = None) -> None:
    """Write what is not zero into ``payload``, as long as was measured; see `encode_sparse`."""
    nbytes = -(-elements.size // 8)
    count = (payload.size - nbytes) // elements.itemsize
    _write(payload, None, elements, way=_BITMAP, count=count, nbytes=nbytes, room=room)


def apply_payload(out: Any, payload: Any, *, is_delta: bool, room: Any = None) -> None:
    """Put the values of a payload to their places in ``out``; what no delta has a value for becomes zero.

    Args:
        out: 1-D, contiguous, whole numbers of 1, 2, 4 or 8 bytes.
        payload: Of as many such elements, at an address that 8 divides.
        is_delta: Whether it is one, with a header; else values and a bitmap.
        room: As in `find_changes`.
    """
    if not out.size:
        return
    marks, width = _marks(out, room), np.int32(out.itemsize)
    parts = (payload, np.int64(payload.size), width, np.int32(is_delta))
    _by_stretch("mark_positions", out.size, *parts, marks)
    _scan(marks, gaps=False)
    which = (np.int32(is_delta), np.int32(not is_delta))
    _by_stretch("apply_positions", out.size, out, payload, np.int64(payload.size), width, *which, marks)


def _write(values: Any, base: Any, now: Any, *, way: int, count: int, nbytes: int, room: Any) -> None:
    marks = _mark(base, now, room)
    sizes = (np.int64(count), np.int64(nbytes))
    _by_stretch("write_changes", now.size, *_pair(base, now), marks, np.int32(way), values, *sizes)


def _mark(base: Any, now: Any, room: Any) -> Any:
    """Return what comes before each stretch, and all of them at the end: four int64 each."""
    marks = _marks(now, room)
    _by_stretch("mark_changes", now.size, *_pair(base, now), marks)
    _scan(marks, gaps=True)
    return marks


def _pair(base: Any, now: Any) -> tuple[Any, Any, np.int32]:
    if base is not None and (base.dtype != now.dtype or base.shape != now.shape):
        raise CallError(f"Expected arrays alike, got {base.dtype}{list(base.shape)} and {now.dtype}{list(now.shape)}.")
    return _NOTHING if base is None else base, now, np.int32(now.itemsize)


def _marks(array: Any, room: Any) -> Any:
    nbytes = marks_nbytes(array.size)
    memory = cupy.empty(nbytes, np.uint8) if room is None else room
    if memory.size < nbytes:
        raise CallError(f"Expected room of {nbytes} bytes for {array.size} elements, got {memory.size}.")
    return memory[:nbytes].view(np.int64)


def _scan(marks: Any, *, gaps: bool) -> None:
    stretches = marks.size // 4 - 1
    _MODULE.get_function("scan_marks")((1,), (_THREADS,), (np.int64(stretches), marks, np.int32(gaps)))


def _by_stretch(name: str, numel: int, *arguments: Any) -> None:
    """Launch a warp for each stretch."""
    _launch(name, 32 * -(-numel // STRETCH), np.int64(numel), *arguments)


def _launch(name: str, threads: int, *arguments: Any) -> None:
    _MODULE.get_function(name)((-(-threads // _THREADS),), (_THREADS,), arguments)
