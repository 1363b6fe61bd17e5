"""`NodeMemory`: the windows of one rank on a node, and its staging slabs.

[Note: two slabs]
A rank stages into two halves of its slab in turn. When it comes back to a half, everybody has met at least once since,
and so has done reading it: a staged collective needs one meeting and no parting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zerort import native, trace
from zerort.comm.guard.call import Call
from zerort.comm.transports.node.shelf import Shelf
from zerort.comm.transports.node.window import SharedFile, Window, ask_for_huge_pages, map_file, page_aligned
from zerort.config import GroupOptions
from zerort.config.group import STAGING_NBYTES
from zerort.errors import CallError, SharedMemoryError
from zerort.native.rendezvous import PRIVATE
from zerort.typing import Array

__all__ = ["STAGING", "NodeMemory", "slab_nbytes"]

STAGING = 0
"""The number of the window that holds the staging slabs."""

_MOST_SLABS_NBYTES = 64 * 1024**2
"""Of all slabs of a group on a host: with many ranks there each has less, unless the user said how much."""

_LEAST_NBYTES = 64 * 1024
"""Of half a slab, at least: what a small array is staged in."""


def slab_nbytes(staging_nbytes: int, ranks: int) -> int:
    """Return the bytes of half a slab where a host has so many ranks; a multiple of 64.

    >>> slab_nbytes(4 * 1024**2, 8), slab_nbytes(4 * 1024**2, 64)
    (4194304, 524288)
    >>> slab_nbytes(8 * 1024**2, 64)  # not the default
    8388608
    """
    if staging_nbytes != STAGING_NBYTES:
        return staging_nbytes
    share = _MOST_SLABS_NBYTES // (2 * ranks) // 64 * 64
    return min(staging_nbytes, max(share, _LEAST_NBYTES))


class NodeMemory:
    """What one rank of a node has mapped.

    Args:
        rank: This rank.
        size: Ranks on the node.
        options: Sizes, and where shared memory is.
        link: The rendezvous, which must know where windows are mapped.
        tell: Exchanges texts with the other ranks.
        named: Give files a name until all have mapped them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        options: GroupOptions,
        link: Any,
        tell: Callable[[str], list[str]],
        named: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self._options = options
        self._link = link
        self._tell = tell
        self._named = named
        self._shelf = Shelf()
        self._stage: Window | None = None  # all ranks' slabs
        self.slab_nbytes = slab_nbytes(options.staging_nbytes, size)
        """Of half a slab."""

    def start(self) -> None:
        """Make the slabs; every rank of the node does so at once."""
        self._stage = self._make_window([2 * self.slab_nbytes] * self.size)

    # -- windows ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's segment of a new window."""
        sizes = [int(text) for text in self._tell(str(nbytes))]
        # At least a byte each: an empty array, too, must be known by where it lies.
        return self._make_window([max(size, 1) for size in sizes]).segment(self.rank)[:nbytes]

    def allocate_shared(self, nbytes: int) -> Array:
        """Return the whole of a new window: one copy for the node."""
        return self._make_window([max(nbytes, 1)] + [0] * (self.size - 1)).segment(0)[:nbytes]

    def window_of(self, array: Array) -> int:
        """Return the number of the window in which ``array`` lies.

        Raises:
            CallError: It lies in none that a user was given.
        """
        window, _ = self._shelf.find(native.address_of(array), array.nbytes)
        if window in (PRIVATE, STAGING):
            raise CallError("free: Expected an array from this group's zeros or zeros_shared, got one from elsewhere.")
        return window

    def release(self, array: Array) -> None:
        """Forget the window in which ``array`` lies; its memory goes when the last array in it does, on every rank."""
        window = self.window_of(array)
        self._shelf.drop(window)
        self._link.unmap_window(window)

    def clear(self) -> None:
        """Forget all windows; arrays in them keep theirs."""
        self._shelf.clear()
        self._stage = None

    def places_of(self, call: Call) -> tuple[int, int, int, int]:
        """Return (window, offset) of the source, then of the out; PRIVATE and the address for one in no window."""
        places = call.places
        if places is None or places[0] != self._shelf.version:
            places = call.places = (
                self._shelf.version,
                *self._find(call.source, call.source_address),
                *self._find(call.out, call.out_address),
            )
        found: tuple[int, int, int, int] = places[1:]
        return found

    def _find(self, array: Array | None, address: int) -> tuple[int, int]:
        if array is None or array.size == 0:
            return STAGING, 0  # nobody will read it: anywhere will do
        return self._shelf.find(address, array.nbytes)

    def _make_window(self, sizes: list[int]) -> Window:
        segments = page_aligned(sizes)
        nbytes = segments[-1][0] + segments[-1][1]
        file, story = None, ""
        try:
            if self.rank == 0:
                try:
                    file = SharedFile(self._options.shm_dir, nbytes, named=self._named)
                    story = file.path
                except SharedMemoryError as error:
                    story = f"!{error}"
            path = self._tell(story)[0]
            if path.startswith("!"):
                raise SharedMemoryError(path[1:])
            window, complaint = None, ""
            try:
                window = Window(map_file(path), segments)
            except SharedMemoryError as error:
                complaint = f"{error} (rank {self.rank})"
            complaints = [text for text in self._tell(complaint) if text]
        finally:
            if file is not None:
                file.close()
        if complaints:
            raise SharedMemoryError(complaints[0])
        assert window is not None
        if self._stage is not None:  # not the slabs: they are in every group, and used little
            ask_for_huge_pages(window.bytes, part=self.rank, parts=self.size)
        self._link.map_window(self._shelf.put(window), window.address)
        trace.count("shared.bytes", sizes[self.rank])
        return window

    # -- slabs -----------------------------------------------------------------------------------------------------

    def stage(self, array: Array) -> tuple[int, int]:
        """Copy ``array`` to where the other ranks can read it, and return where that is."""
        assert self._stage is not None
        self._link.half ^= 1
        first = self.slab_offset() + self._link.half * self.slab_nbytes
        self._stage.bytes[first : first + array.nbytes] = array.view(np.uint8)
        return STAGING, first

    def slab_offset(self) -> int:
        """Return where this rank's slab begins in the staging window."""
        assert self._stage is not None
        return self._stage.segments[self.rank][0]

    def is_shared(self, window: int) -> bool:
        """Say whether ``window`` is one array for all ranks, not one for each."""
        return self._shelf.is_shared(window)

    def start_rounds(self) -> None:
        """Take the slabs' halves in step with the other ranks. All have just met, so both halves are free."""
        self._link.half = 0

    def next_slab(self, dtype: np.dtype[Any]) -> Array:
        """Return the half of this rank's slab whose turn it is: everybody has done reading it."""
        self._link.half ^= 1
        return self.slab_of(self.rank, dtype)

    def slab_of(self, rank: int, dtype: np.dtype[Any]) -> Array:
        """Return the half of rank's slab that all ranks use in this round."""
        assert self._stage is not None
        half = self.slab_nbytes
        raw = self._stage.segment(rank)[self._link.half * half :][: half // dtype.itemsize * dtype.itemsize]
        return raw.view(dtype)
