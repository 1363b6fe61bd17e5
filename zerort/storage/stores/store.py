"""`Store`: bytes at a tier, by name. What every store can do, and the checks that all of them make alike.

    create("block0/exp_avg", n)                   a value of n bytes, zeros at first
    write("block0/exp_avg", array, offset=k)      -> Ticket of the array; it belongs to the store until then
    read("block0/exp_avg", array, offset=k)       -> Ticket of the array, filled
    read_parts, write_parts                       the same of several ranges of a value at once
    flush()                                       all writes have happened, and would survive the machine's end
    delete("block0/exp_avg")
    close()

[Note: Order] Reads and writes of one value whose bytes overlap take effect in the order in which they were asked for;
all others may overtake each other. So a read sees what was written before it, whether or not somebody waited.

A store exists when it passes `zerort.testing.contracts.store.StoreContract`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from zerort.device import Ticket, joined
from zerort.errors import CallError
from zerort.storage.files.extents import FileExtent
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Parts", "Store", "as_bytes", "check_new", "check_range", "move_each"]

Parts: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of a value: offset and size of each, in bytes, ascending and apart."""


class Store(Protocol):
    """Bytes at a tier, by name. Owned by one thread; the tickets may be waited for by any."""

    name: str
    """What it is called in errors and traces."""

    @property
    def nbytes(self) -> int:
        """The bytes of all values together."""

    def create(self, name: str, nbytes: int, *, grain: int | None = None) -> None:
        """Make a value of ``nbytes`` bytes, all zero, and reserve its room.

        Args:
            name: Any text that is not empty; no other value of this store has it.
            nbytes: Its size; 0 is a size.
            grain: Bytes that are read, checked and written together, for a value of which parts are: whole pages, of
                which a block is a multiple. None: as is best for long ranges.

        Raises:
            CallError: There is such a value, or the size makes no sense.
            StorageError: There is no room, or the file system refused.
        """

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Fill ``out`` from byte ``offset`` of a value on.

        Args:
            name: The value.
            out: 1-D, contiguous, of any dtype; the store's until the Ticket is done.
            offset: In bytes.

        Raises:
            CallError: There is no such value, or the range is not within it.
            StorageError: From the Ticket: the file system refused, with file, offset and rank.
            CorruptStorageError: From the Ticket: the bytes are not those that were written.
        """

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Put ``source`` at byte ``offset`` of a value. An error that nobody waits for is raised by `flush`.

        Args:
            name: The value.
            source: 1-D, contiguous, of any dtype; nobody changes it until the Ticket is done.
            offset: In bytes.

        Raises:
            CallError: There is no such value, or the range is not within it.
            StorageError: From the Ticket: the file system refused, with file, offset and rank.
        """

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Fill ``out`` from several ranges of a value, one behind the other; see `read`."""

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Put ``source`` into several ranges of a value, one behind the other; see `write`."""

    def flush(self) -> None:
        """Return when everything written so far is where it rests for good.

        Raises:
            StorageError: A write failed and nobody has waited for it, or the disk could not be synced.
        """

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return the parts of a value that lie in files which can have a second name in a directory.

        A checkpoint there takes these files over as they are.
        """

    def copied_parts(self, directory: str) -> list[float]:
        """Return which part of its bytes lies in files that can have no second name in a directory.

        Returns:
            For each disk its part of all bytes; 0 if its files can have one.
        """

    def delete(self, name: str) -> None:
        """Forget a value and give its room back, after what was asked of it before.

        Raises:
            CallError: There is no such value.
            StorageError: The file system refused.
        """

    def close(self) -> None:
        """Finish what was asked for, then give everything back, files too. Closing twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def check_new(store: Store, name: str, nbytes: int, *, known: bool) -> None:
    """Raise unless a value of this name and size can be made."""
    if not isinstance(name, str) or not name:
        raise CallError(f"Expected the name of a value as a text that is not empty, got {name!r}.")
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 0:
        raise CallError(f"Expected the size of {name!r} in bytes, 0 or more, got {nbytes!r}.")
    if known:
        raise CallError(f"Expected a new name in store {store.name!r}, got {name!r}, which exists. Delete it first.")


def check_range(store: Store, name: str, offset: int, count: int, *, nbytes: int | None) -> None:
    """Raise unless ``count`` bytes from ``offset`` on lie within a value of ``nbytes`` bytes; None: there is none."""
    if nbytes is None:
        raise CallError(f"Expected a value of store {store.name!r}, got {name!r}. Create it first.")
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise CallError(f"Expected an offset in bytes, got {offset!r}.")
    if offset < 0 or offset + count > nbytes:
        raise CallError(
            f"Expected a range within the {nbytes} bytes of {name!r} in store {store.name!r}, got {count} bytes from "
            f"offset {offset} on."
        )


def as_bytes(array: Array, *, what: str, written: bool) -> Array:
    """Return the bytes of an array: 1-D, uint8, the same memory.

    Args:
        array: 1-D and contiguous.
        what: What to call it in the error.
        written: Whether the store will change it.
    """
    if not hasattr(array, "dtype") or array.ndim != 1 or not array.flags.c_contiguous or array.dtype.hasobject:
        shape = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise CallError(f"Expected {what} as a 1-D contiguous array of plain elements, got {shape}. Use array.ravel().")
    if written and not getattr(array.flags, "writeable", True):  # CuPy's all are, and do not say so
        raise CallError(f"Expected {what} as an array that can be written to, got a read-only one.")
    return array.view(np.uint8)


def move_each(move: Callable[..., Ticket[Array]], name: str, array: Array, parts: Parts) -> Ticket[Array]:
    """Read or write several ranges of a value one by one: for stores that have nothing better.

    Args:
        move: `Store.read` or `Store.write`.
        name: The value.
        array: Their bytes, one behind the other.
        parts: The ranges.
    """
    data, at, tickets = array.view(np.uint8), 0, []
    for offset, count in parts:
        tickets.append(move(name, data[at : at + count], offset=offset))
        at += count
    return joined(tickets, result=array)
