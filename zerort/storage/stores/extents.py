"""`Share`: what of a value lies in one file, so that whoever keeps it can take the file over as it is.

NvmeStore       one file holds the value
StripedStore    a file on each member holds its units, one behind the other
"""

from __future__ import annotations

from typing import NamedTuple

from zerort.device import Ticket
from zerort.storage.stores.chunk_file import LinkedFile
from zerort.storage.stores.nvme import NvmeStore
from zerort.storage.stores.store import Store
from zerort.storage.stores.striped import StripedStore
from zerort.typing import Array

__all__ = ["Share", "Stretch", "copied_parts", "shares_of"]


class Stretch(NamedTuple):
    """Bytes of a value that lie one behind the other in a file."""

    first: int
    """The first of them, counted in the value."""
    last: int
    """One past the last."""
    offset: int
    """Where the first lies in the file."""


class Share(NamedTuple):
    """What of a value lies in one file."""

    store: NvmeStore
    """Whose file it is."""
    name: str
    """The value."""
    stretches: tuple[Stretch, ...]
    """In the order of the file, which they fill from its beginning."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value in the file."""
        return sum(one.last - one.first for one in self.stretches)

    def link(self, path: str) -> LinkedFile:
        """Give the file another name, as `NvmeStore.link` does."""
        return self.store.link(self.name, path)

    def read(self, out: Array, offset: int) -> Ticket[Array]:
        """Fill ``out`` with the file's bytes from ``offset`` on."""
        return self.store.read(self.name, out, offset=offset)


def shares_of(store: Store, name: str, *, nbytes: int, directory: str) -> list[Share]:
    """Return what of a value lies in files that can have a second name in a directory.

    Args:
        store: Which holds the value.
        name: The value.
        nbytes: Of the value.
        directory: Where the second names would be.
    """
    if isinstance(store, StripedStore):
        laid: dict[int, list[Stretch]] = {}
        for member, offset, first, last in store.stripes_of(name).pieces(0, nbytes):
            laid.setdefault(member, []).append(Stretch(first, last, offset))
        files = [(store.members[member], stretches) for member, stretches in laid.items()]
    else:
        files = [(store, [Stretch(0, nbytes, 0)])]
    return [
        Share(one, name, tuple(stretches))
        for one, stretches in files
        if isinstance(one, NvmeStore) and one.can_link(directory)
    ]


def copied_parts(store: Store, directory: str) -> list[float]:
    """Return which part of a store's bytes lies in files that can have no second name in a directory.

    Args:
        store: The store.
        directory: Where the second names would be.

    Returns:
        For each member, or for the store itself: its part of all bytes; 0 if its files can have one.
    """
    stores, weights = (store.members, store.weights) if isinstance(store, StripedStore) else ((store,), (1.0,))
    return [
        0.0 if isinstance(one, NvmeStore) and one.can_link(directory) else weight / sum(weights)
        for one, weight in zip(stores, weights, strict=True)
    ]
