"""Which files of a store hold a value, so that a checkpoint can take them over as they are (`FileExtent`).

NvmeStore       one file holds the value
StripedStore    a file on each member holds its units, one behind the other
"""

from __future__ import annotations

from functools import partial

from zerort.device import Ticket
from zerort.storage.files.extents import FileExtent, Stretch
from zerort.storage.stores.nvme import NvmeStore
from zerort.storage.stores.store import Store
from zerort.storage.stores.striped import StripedStore
from zerort.typing import Array

__all__ = ["copied_parts", "extents_of"]


def extents_of(store: Store, name: str, *, nbytes: int, directory: str) -> list[FileExtent]:
    """Return the parts of a value that lie in files which can have a second name in a directory.

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
        FileExtent(
            one.name,
            tuple(stretches),
            link=partial(one.link, name),
            read=partial(_read, one, name),
        )
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


def _read(store: Store, name: str, out: Array, offset: int) -> Ticket[Array]:
    return store.read(name, out, offset=offset)
