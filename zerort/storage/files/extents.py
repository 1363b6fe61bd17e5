"""`FileExtent`: the part of a value that lies in one file, for a checkpoint that takes the file over as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zerort.device import Ticket
from zerort.typing import Array

__all__ = ["SUFFIX", "FileExtent", "LinkedFile", "Stretch"]

SUFFIX = ".chunk"
"""How names of a store's files end."""


class LinkedFile(NamedTuple):
    """What a linked file holds."""

    nbytes: int
    """Its size: whole pages."""
    grain: int
    """Bytes that one checksum covers."""
    sums: Array
    """The crc32c of each grain."""


class Stretch(NamedTuple):
    """Bytes of a value that lie one behind the other in a file."""

    first: int
    """The first of them, counted in the value."""
    stop: int
    """One past the last."""
    offset: int
    """Where the first lies in the file."""


class FileExtent(NamedTuple):
    """The part of a value that lies in one file."""

    store: str
    """The name of the store whose file it is."""
    stretches: tuple[Stretch, ...]
    """In the order of the file, which they fill from its beginning."""
    link: Callable[[str], LinkedFile]
    """Gives the file another name, a path, under which it stays as it is now."""
    read: Callable[[Array, int], Ticket[Array]]
    """Fills an array with the file's bytes from an offset on."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value in the file."""
        return sum(one.stop - one.first for one in self.stretches)
