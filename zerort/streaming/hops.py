"""`Hop`: what a staging moves, as values: arrays where they rest, and which of them have to go elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zerort.errors import CallError
from zerort.storage.files.segments import round_up

__all__ = ["ALIGNMENT", "Hop", "Place", "check_hops_apart", "do_touch", "slot_nbytes_of", "spans_on_host"]

Place = Literal["device", "host"]
"""Where something is computed."""

ALIGNMENT = 256
"""Bytes. Arrays in a slot begin where CUDA's own allocations would."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One array of a chunk, where it rests."""

    array: Any
    """1-D and contiguous, on the host (NumPy; copies run beside other work if it is pinned) or on the device."""
    read: bool = True
    """Whether its values are needed."""
    write: bool = True
    """Whether it is changed."""

    def moves_to(self, place: Place) -> bool:
        """Say whether it rests elsewhere.

        >>> Hop(np.ones(3)).moves_to("device"), Hop(np.ones(3)).moves_to("host")
        (True, False)
        """
        return isinstance(self.array, np.ndarray) == (place == "device")


def slot_nbytes_of(chunks: Sequence[Sequence[Hop]], *, on: Place) -> int:
    """Return the memory that the largest of these chunks takes in a slot: its arrays that rest elsewhere.

    >>> slot_nbytes_of([[Hop(np.zeros(3)), Hop(np.zeros(100))], [Hop(np.zeros(4))]], on="device")
    1280
    """
    return max((_slot_nbytes(chunk, on) for chunk in chunks), default=0)


def _slot_nbytes(chunk: Sequence[Hop], on: Place) -> int:
    return sum(round_up(hop.array.nbytes, ALIGNMENT) for hop in chunk if hop.moves_to(on))


def check_hops_apart(chunks: Sequence[Sequence[Hop]]) -> None:
    """Raise if a hop touches what another one writes: it would be read before, or after, as copies happen to run.

    >>> values = np.zeros(10)
    >>> check_hops_apart([[Hop(values[:6])], [Hop(values[6:], write=False)]])
    >>> check_hops_apart([[Hop(values[:6])], [Hop(values[5:], write=False)]])
    Traceback (most recent call last):
    zerort.errors.CallError: Expected chunks that do not touch what others write, got 8 bytes of chunk 1 that ...
    """
    spans = sorted(
        (begin := _address(hop.array), begin + hop.array.nbytes, hop.write, number)
        for number, chunk in enumerate(chunks)
        for hop in chunk
        if hop.array.nbytes
    )
    furthest = written = 0
    for begin, end, write, number in spans:
        shared = min(furthest if write else written, end) - begin
        if shared > 0:
            raise CallError(
                f"Expected chunks that do not touch what others write, got {shared} bytes of chunk {number} that are "
                "another's, too."
            )
        furthest, written = max(furthest, end), max(written, end) if write else written


def spans_on_host(chunks: Sequence[Sequence[Hop]], *, written: bool) -> list[tuple[int, int]]:
    """Return the addresses on the host, ``(first, one past the last)``, that chunks write, or else read; in order."""
    return sorted(
        (begin := _address(hop.array), begin + hop.array.nbytes)
        for chunk in chunks
        for hop in chunk
        if (hop.write if written else hop.read) and hop.moves_to("device")
    )


def do_touch(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Say whether any of some spans has a byte of any of the others; both are in order.

    >>> do_touch([(0, 4), (8, 12)], [(4, 8), (12, 16)]), do_touch([(0, 4), (8, 12)], [(4, 9)])
    (False, True)
    """
    merged = sorted([(begin, end, 0) for begin, end in spans] + [(begin, end, 1) for begin, end in others])
    reach = [0, 0]  # how far either has come
    for begin, end, side in merged:
        if begin < min(reach[1 - side], end):
            return True
        reach[side] = max(reach[side], end)
    return False


def _address(array: Any) -> int:
    # Those of hosts and GPUs are apart: CUDA gives all of them one space.
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    address: int = interface["data"][0]
    return address
