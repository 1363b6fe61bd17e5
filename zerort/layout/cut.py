"""`Cut`: how flat buffers are laid out and cut over ranks, by one rule for everything that is sharded.

    Cut(size=3, granule=64)                 4 granules      ├ 2 ┼ 1 ┼ 1 ┤        as fair as granules allow
    Cut(size=3, granule=64, equal=True)     4, padded to 6  ├ 2 ┼ 2 ┼ 2·┤        · = padding, at the end only

Runtimes and forecasts ask the same value, so that they cannot differ by an element (decision 0078).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerort.layout.flat import ALIGNMENT, FlatLayout
from zerort.layout.partition import Partition

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How flat buffers are cut over ranks.

    >>> layout, partition = Cut(size=3, equal=True).of({"w": (200,)})
    >>> partition.counts, layout.end, layout.numel
    ((128, 128, 128), 256, 384)
    """

    size: int
    """The number of ranks."""

    granule: int = ALIGNMENT
    """Elements. A rank's range starts at a multiple of it: what is computed over granules is never cut."""

    alignment: int = ALIGNMENT
    """Elements. Every tensor starts at a multiple of it; it divides the granule."""

    weights: tuple[float, ...] | None = None
    """How much of every buffer each rank takes; None: alike."""

    equal: bool = False
    """Whether buffers end with padding that makes all ranges equally long. Weights that differ are not evened out."""

    def with_weights(self, weights: tuple[float, ...] | None) -> Cut:
        """Return the same rule with other weights."""
        return replace(self, weights=weights)

    def of(self, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "float32") -> tuple[FlatLayout, Partition]:
        """Return where the elements of some tensors lie, and which rank holds which of them.

        Args:
            shapes: By name, in the order in which they should lie.
            dtype: Of all of them.
        """
        pads = self.equal and self.weights is None and self.size > 1
        layout = FlatLayout.build(
            shapes, dtype=dtype, alignment=self.alignment, multiple=self.size * self.granule if pads else 1
        )
        return layout, Partition.build(layout.numel, self.size, weights=self.weights, alignment=self.granule)
