"""Say where one parameter lies in a flat buffer, and which part of it a range of the buffer covers.

buffer   0 ─────────── offset ═══════════ stop ───── numel
                       └── one Extent ──┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from zerort.errors import CallError
from zerort.layout.integers import prove_int

__all__ = ["Extent", "Overlap"]


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of one parameter: `numel` elements from `offset` on, in row-major order.

    >>> Extent(name="weight", shape=(2, 3), offset=64, numel=6).stop
    70
    """

    name: str
    """The parameter's name, unique within a layout."""

    shape: tuple[int, ...]
    """The parameter's shape; ``()`` is a scalar of one element, and any 0 in it makes it empty."""

    offset: int
    """The first element, counted in the buffer."""

    numel: int
    """The number of elements, which is the product of the shape."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise CallError(f"Expected a parameter's name to be a non-empty str, got {self.name!r}.")
        if not isinstance(self.shape, tuple):
            raise CallError(f"Expected the shape of {self.name!r} to be a tuple of ints, got {self.shape!r}.")
        for axis, extent in enumerate(self.shape):
            prove_int(extent, what=f"axis {axis} of the shape of {self.name!r}")
        prove_int(self.offset, what=f"the offset of {self.name!r}")
        prove_int(self.numel, what=f"the numel of {self.name!r}")
        if self.numel != math.prod(self.shape):
            raise CallError(
                f"Expected {math.prod(self.shape)} elements for {self.name!r} of shape {self.shape}, got {self.numel}."
            )

    @property
    def stop(self) -> int:
        """Return one past the last element, counted in the buffer."""
        return self.offset + self.numel

    @property
    def slice(self) -> slice:
        """Return the place as an index into the 1-D buffer."""
        return slice(self.offset, self.stop)


class Overlap(NamedTuple):
    """The part of one parameter that lies in a range of the buffer.

    ``parameter.reshape(-1)[overlap.in_extent]`` and ``buffer[first:stop][overlap.in_range]`` are the same elements.
    """

    extent: Extent
    """The parameter's place."""

    in_extent: slice
    """The shared elements, counted from the parameter's first."""

    in_range: slice
    """The shared elements, counted from the range's first."""
