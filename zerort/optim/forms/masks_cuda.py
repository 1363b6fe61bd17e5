"""Masks of pruned elements over CuPy arrays: what `masks.py` has for the host, with its results.

Kernels are queued on the current stream. Where only some of several equal magnitudes are pruned, the host asks for the
index of the last of them, and waits for the answer. The source is `masks_cuda.cu`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from zerort.device.cuda.kernel_module import KernelModule
from zerort.device.cuda.library import cupy
from zerort.optim.forms.masks import DIGIT

__all__ = ["OPTIONS", "SOURCE", "add_histogram", "mark_smallest", "mark_two_of_four", "zero_marked"]

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--std=c++17", f"-DBINS={1 << DIGIT}")

_THREADS: Final = 256
_BLOCKS: Final = 512
"""Blocks of threads that a histogram is counted by, at most."""
_MODULE = KernelModule(SOURCE, OPTIONS)


def add_histogram(counts: Any, values: Any, mask: Any, *, shift: int, width: int, prefix: int) -> None:
    """Count bits of magnitudes; see `masks.add_histogram`."""
    has_prefix = shift + width < 8 * values.itemsize
    _count(counts, values, mask, threshold=None, shift=shift, width=width, prefix=prefix if has_prefix else None)


def mark_smallest(mask: Any, values: Any, *, threshold: int, equal: int, of: int) -> None:
    """Mark elements below a threshold, and some that equal it; see `masks.mark_smallest`."""
    end = 0 if not equal else values.size
    if 0 < equal < of:
        end = _index_of(mask, values, threshold=threshold, number=equal) + 1
    arguments = (mask, values, np.int32(values.itemsize), np.uint64(threshold), np.int64(end))
    _launch("mark_smallest", values.size, *arguments, threads=-(-values.size // 8))


def mark_two_of_four(mask: Any, values: Any) -> None:
    """Mark the two smallest of every four neighbours; see `masks.mark_two_of_four`."""
    arguments = (mask, values, np.int32(values.itemsize))
    _launch("mark_two_of_four", values.size, *arguments, threads=-(-values.size // 8))


def zero_marked(values: Any, mask: Any) -> None:
    """Set elements that are pruned to zero: of 2, 4 or 8 bytes."""
    _launch("zero_marked", values.size, values, np.int32(values.itemsize), mask, threads=values.size)


def _index_of(mask: Any, values: Any, *, threshold: int, number: int) -> int:
    """Return where the ``number``th element of a magnitude is; waits for the answer."""
    counts, found, shift = cupy.empty(1 << DIGIT, np.int64), 0, int(values.size).bit_length()
    is_first = True
    while shift:
        width = min(DIGIT, shift)
        shift -= width
        counts.fill(0)
        prefix = None if is_first else found
        _count(counts, values, mask, threshold=threshold, shift=shift, width=width, prefix=prefix)
        sums = counts.get().cumsum()
        digit = int(np.searchsorted(sums, number))
        number -= int(sums[digit - 1]) if digit else 0
        found, is_first = found << width | digit, False
    return found


def _count(
    counts: Any, values: Any, mask: Any, *, threshold: int | None, shift: int, width: int, prefix: int | None
) -> None:
    arguments = (
        counts,
        values,
        np.int32(values.itemsize),
        mask,
        np.int32(threshold is not None),
        np.uint64(threshold or 0),
        np.int32(shift),
        np.int32(width),
        np.int32(prefix is not None),
        np.uint64(prefix or 0),
    )
    _launch("add_histogram", values.size, *arguments, threads=min(values.size, _BLOCKS * _THREADS))


def _launch(name: str, numel: int, *arguments: Any, threads: int) -> None:
    if numel:
        _MODULE.get_function(name)((-(-threads // _THREADS),), (_THREADS,), (np.int64(numel), *arguments))
