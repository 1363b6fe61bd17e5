"""`GradientCollector`: the gradients of a micro-step, written where they belong in one flat layout.

    add(name, gradient) … add(name, gradient)      in the layout's dtype; NaN and infinity are looked for on the way
    end_micro_step()                               what has no gradient counts as zero

They are collected in a slot, which is another bucket's afterwards, or in an array that stays and sums micro-steps.
Nothing here is communicated: `GradientBucket` reduces what was collected.
"""

from __future__ import annotations

from typing import SupportsInt

import numpy as np

from zerort.buffer.kernels import BucketKernels
from zerort.buffer.tree import TreeSum
from zerort.device.slots import Slot, Slots
from zerort.layout import FlatLayout
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, Device

__all__ = ["GradientCollector"]


class GradientCollector:
    """This rank's gradients of one flat layout, from backward to their reduction.

    Args:
        layout: Where each gradient lies; its dtype is the one they are summed in.
        device: Where they are computed.
        slots: Where gradients are collected, unless they are resident.
        resident: An array of the whole layout in which micro-steps are summed; None: each is collected in a slot.
        tree: Takes resident micro-steps one by one and sums them in a fixed order; None: they are added up.
        kernels: Those of the device.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        device: Device,
        slots: Slots,
        resident: Array | None,
        tree: TreeSum | None,
        kernels: BucketKernels,
    ) -> None:
        self.layout = layout
        self.dtype = numpy_dtype(layout.dtype)
        self._device = device
        self._slots = slots
        self._resident = resident
        self._tree = tree
        self._kernels = kernels
        self._gaps = _gaps_of(layout)
        self._slot: Slot | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget all gradients that were collected, but not the slot that may still be read."""
        self._present: set[str] = set()  # in this micro-step
        self._closed: set[str] = set()  # in the one before
        self._unseen = False  # gradients came that nobody has looked at
        self.seen: set[str] = set()
        """Names that had a gradient in any micro-step since the last reset."""
        self.micro_steps = 0
        """Rounds of gradients that are complete."""
        self._nonfinite: list[tuple[str, SupportsInt]] = []  # tensors, or "" for all; where, or the promise of it
        if self._tree is not None:
            self._tree.clear()

    @property
    def nonfinite(self) -> str | None:
        """The first tensor in which a gradient of this rank's own holds NaN or infinity."""
        for name, promise in self._nonfinite:
            at = int(promise)
            if at >= 0:
                return name or self.layout.overlaps(at, at + 1)[0].extent.name
        return None

    def views(self) -> dict[str, Array]:
        """Return writable arrays for all gradients of this micro-step: copied later only if it is added to others."""
        whole = self._apart() if self._sums_micro_steps() else self._collecting()
        self._present = {extent.name for extent in self.layout.extents}
        self._unseen = True
        return {extent.name: whole[extent.slice].reshape(extent.shape) for extent in self.layout.extents}

    def add(self, name: str, gradient: Array, *, donate: bool = False) -> None:
        """Take one gradient of this micro-step; one that comes twice is summed (a tensor that was used twice).

        Args:
            name: Whose it is.
            gradient: The whole of it.
            donate: The array is the bucket's from now on, which may use it where it lies instead of copying it.
        """
        flat = self._device.flat(gradient)
        found: int | None
        if donate and self._is_all(flat):
            self._slot = self._slots.lease(flat.nbytes, memory=flat.view(np.uint8))
            found = self._kernels.check(flat)
        elif name in self._present or self._sums_micro_steps():
            place = self._collecting()[self.layout.of(name).slice]
            self._add(place, flat)
            found = self._kernels.check(place)
        else:
            found = self._kernels.copy_checked(self._collecting()[self.layout.of(name).slice], flat)
        if found is None:
            self._unseen = True
        elif found >= 0:
            self._nonfinite.append((name, found))
        self._present.add(name)

    @property
    def filling(self) -> bool:
        """Whether gradients of a micro-step that is not closed are here."""
        return bool(self._present)

    def drop_micro_step(self) -> None:
        """Forget the gradients that were written through `views` in this micro-step: they count as zero."""
        self._present, self._unseen = set(), False
        if self._slot is not None and self._resident is not None:
            self._slot.release()
            self._slot = None

    def end_micro_step(self) -> None:
        """Close this micro-step: what has no gradient counts as zero. Nothing is communicated."""
        if self._slot is not None and self._resident is not None:  # written through views, beside the sum so far
            apart = self._apart()
            for gap in self._gaps:  # the slot may hold another bucket's gradients there
                apart[gap].view(np.uint8).fill(0)
            self._find_nonfinite(apart)
            self._kernels.add_into(self._resident, apart)
            self._slot.release()
            self._slot = None
        elif not self._sums_micro_steps():
            whole = self._collecting()
            for extent in self.layout.extents:
                if extent.name not in self._present:
                    whole[extent.slice].view(np.uint8).fill(0)
            for gap in self._gaps:
                whole[gap].view(np.uint8).fill(0)
            if self._unseen:
                self._find_nonfinite(whole)
        elif self._unseen:
            self._find_nonfinite(self._collecting())
        if self._tree is not None:
            assert self._resident is not None
            self._tree.add(self._resident)
        self.seen |= self._present
        self._closed, self._present, self._unseen = self._present, set(), False
        self.micro_steps += 1

    def _is_all(self, flat: Array) -> bool:
        """Say whether ``flat`` is as good as a slot that it would be copied into."""
        in_slot = self._resident is None and self._slot is None and not self._slots.persistent
        return in_slot and flat.size == self.layout.numel and flat.dtype == self.dtype

    def _sums_micro_steps(self) -> bool:
        """Say whether this micro-step's gradients go on top of those before."""
        return self.micro_steps > 0 and self._tree is None and self._resident is not None

    def _collecting(self) -> Array:
        """Return where gradients go: the whole of this micro-step's, or of all micro-steps' sum."""
        return self._apart() if self._resident is None else self._resident

    def _apart(self) -> Array:
        if self._slot is None:
            self._slot = self._slots.lease(self.layout.nbytes)
        return self._slot.array(self.layout.numel, self.dtype)

    def _find_nonfinite(self, whole: Array) -> None:
        self._nonfinite.append(("", self._kernels.look_for_nonfinite(whole)))

    def _add(self, place: Array, gradient: Array) -> None:
        """Add a gradient of whatever precision to what is there."""
        if gradient.dtype.itemsize > place.dtype.itemsize:
            wide, gradient = gradient, self._device.scratch(place.size, place.dtype)
            self._kernels.cast_into(gradient, wide)
        self._kernels.add_into(place, gradient)


def _gaps_of(layout: FlatLayout) -> tuple[slice, ...]:
    """Return the ranges that belong to no tensor: a slot may hold another bucket's gradients there."""
    gaps, end = [], 0
    for extent in layout.extents:
        if extent.offset > end:
            gaps.append(slice(end, extent.offset))
        end = max(end, extent.stop)
    if layout.numel > end:
        gaps.append(slice(end, layout.numel))
    return tuple(gaps)
