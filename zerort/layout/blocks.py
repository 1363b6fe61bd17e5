"""`layout_of_blocks`: where tensors lie once their elements are blocks of bytes, and who holds them."""

from __future__ import annotations

from typing import Protocol

from zerort.layout.extent import Extent
from zerort.layout.flat import FlatLayout
from zerort.layout.partition import Partition

__all__ = ["BlockSize", "layout_of_blocks"]


class BlockSize(Protocol):
    """How many elements and bytes a block has."""

    @property
    def numel(self) -> int:
        """Elements of a block."""

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""

    def nbytes_of(self, numel: int) -> int:
        """Return the bytes of some elements, in whole blocks."""


def layout_of_blocks(layout: FlatLayout, partition: Partition, block: BlockSize) -> tuple[FlatLayout, Partition]:
    """Return where the blocks of all tensors lie, in bytes, and who holds them: each tensor is a row for each block.

    Args:
        layout: Of elements; tensors begin with a block.
        partition: Of elements; shards begin with a block.
        block: The size of one.
    """
    extents = tuple(
        Extent(
            name=extent.name,
            shape=(-(-extent.numel // block.numel), block.nbytes),
            offset=block.nbytes_of(extent.offset),
            numel=block.nbytes_of(extent.numel),
        )
        for extent in layout.extents
    )
    blocks = FlatLayout(dtype="uint8", extents=extents, numel=block.nbytes_of(layout.numel), alignment=1)
    return blocks, Partition.of_counts(map(block.nbytes_of, partition.counts))
