"""`Residual`: what coding has lost of the gradients that a rank codes, to be added to the next ones.

    step      a reduction begins ── loses, gains ──┬── the step has updated     keep()      what is lost now counts
                                                   └── skipped or discarded     restore()   as it was before the step

Without `restores` there is one array for each sender, and `restore` leaves what reductions made of it (decision 0147).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerort.codec.summands import kernels_for, pieces
from zerort.native import cast_into
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, Device

__all__ = ["Residual"]


class Residual:
    """What coding has lost of one section's gradients, of each sender that this rank codes for.

    Args:
        dtype: What it is kept in.
        senders: Their numbers among all that send, copies of the model included.
        stretch: The elements that this rank codes.
        device: Whose memory it is.
        restores: Whether a step that is not done leaves it as it was before: takes as much memory once more.
    """

    def __init__(self, dtype: str, senders: Sequence[int], stretch: slice, *, device: Device, restores: bool) -> None:
        self.dtype = numpy_dtype(dtype)
        self.senders = tuple(senders)
        self.device = device
        self.stretch = stretch
        numel = stretch.stop - stretch.start
        self.arrays: list[Array] = [device.zeros(numel, self.dtype) for _ in self.senders]
        """What was lost up to the last step, of each sender."""
        self._spare: list[Array] = [device.zeros(numel, self.dtype) for _ in self.senders] if restores else []
        self._changed: set[int] = set()  # senders whose spare is what this step has lost so far

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(array.nbytes for array in (*self.arrays, *self._spare))

    def begin(self, at: int) -> Array:
        """Return what a reduction reads and changes, of sender number ``at`` of this rank's."""
        if not self._spare:
            return self.arrays[at]
        if at not in self._changed:
            self._changed.add(at)
            self._spare[at][:] = self.arrays[at]
        return self._spare[at]

    def keep(self) -> None:
        """Take over what this step has lost."""
        for at in self._changed:
            self.arrays[at], self._spare[at] = self._spare[at], self.arrays[at]
        self._changed.clear()

    def restore(self) -> None:
        """Forget what a step has lost that was not done, or is done and kept."""
        self._changed.clear()

    def clear(self) -> None:
        """Let nothing be lost so far."""
        self._changed.clear()
        for array in self.arrays:
            array.view(np.uint8).fill(0)

    def scale(self, factor: float) -> None:
        """Multiply what was lost so far: gradients come with another factor from now on."""
        if factor == 1:
            return
        for array in self.arrays:
            kernels = kernels_for(array)
            for wide, part in pieces(array):
                kernels.cast_into(wide, array[part])
                wide *= np.float32(factor)
                kernels.cast_into(array[part], wide)

    def assign(self, values: Array) -> None:
        """Let each sender have lost ``values``, float32 and of the host, of this rank's stretch."""
        rounded = np.empty(values.size, self.dtype)
        cast_into(rounded, values)
        for array in self.arrays:
            self.device.put(rounded, out=array)
