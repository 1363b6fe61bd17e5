"""`StoredRows`: rows of a table of which parameters, state, or both rest on a disk.

    elements   ├─ page ─┼─ page ─┼─ page ─┼─ page ─┼─ page ─┼ …        whatever the width of a row
    rows              [  3  ]                   [ 11  ][ 12  ]
    window     │ page │ page │ page │ page │ row 3 │ row 11 │ row 12 │  read, changed, written back: only these

What rows need of each array comes as pages into a window of bounded size, in one operation of the store, and their rows
from there to its other half, where they are computed with. Rows that are only looked at are brought up to date there,
and nothing is written (decision 0186), nor kept for the update (decision 0199). Arrays that are in memory have their
rows copied there from where they lie.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np

from zerort.device import joined
from zerort.engine.residence.chunked_array import LEAST_NUMEL, ChunkedArray
from zerort.engine.rows.exchange import unique_rows
from zerort.native import put_rows, take_rows
from zerort.optim import ElementwiseOptimizer
from zerort.optim.kernels import kernels_for
from zerort.optim.late import LateUpdates
from zerort.typing import Array

__all__ = ["PAGE_NBYTES", "StoredRows", "window_nbytes", "window_numel"]

PAGE_NBYTES: Final = 4096
"""What a disk reads, checks and writes at least; cuts of chunks are multiples of it for every dtype."""

_BLOCK: Final = 1 << 15
"""Elements that are copied through temporaries at once, so that these are in no need of being counted."""


def granule_of(itemsizes: Sequence[int]) -> int:
    """Return the elements that are read and written together, given the widths of the arrays that are on a disk.

    >>> granule_of([4, 4, 4]), granule_of([2, 4])
    (1024, 2048)
    """
    return PAGE_NBYTES // min(itemsizes)


def window_numel(numel: int, width: int, itemsizes: Sequence[int], *, chunk_numel: int) -> int:
    """Return the elements of each array that a window holds: those of a chunk, or all; of one row at least.

    Args:
        numel: Elements of this rank's range.
        width: Elements of a row.
        itemsizes: Bytes per element of each array that is on a disk.
        chunk_numel: Elements of a chunk, at most.

    >>> window_numel(5000, 64, [4], chunk_numel=2048), window_numel(5000, 64, [4], chunk_numel=1 << 20)
    (2048, 5120)
    """
    granule = granule_of(itemsizes)
    row = (width // granule + 2) * granule
    most = chunk_numel // LEAST_NUMEL * LEAST_NUMEL  # whatever the dtypes: fewer arrays never need a larger window
    return min(max(most, row), -(-numel // granule) * granule)


def window_nbytes(stored: Sequence[int], copied: Sequence[int], *, numel: int) -> int:
    """Return the bytes of a window: pages of arrays that are on a disk, and rows of all that are computed with.

    Args:
        stored: Bytes per element of each array that is on a disk.
        copied: Those of each whose rows are copied.
        numel: Elements of each: `window_numel`.
    """
    return numel * (sum(stored) + sum(copied))  # rows are apart: no more elements than their pages have


class _Pages(NamedTuple):
    """The pages that some rows need."""

    which: slice
    """The rows."""
    parts: list[tuple[int, int]]
    """Elements: where stretches of pages begin and end."""
    numel: int
    """Elements of all of them."""
    offsets: Array
    """Where each row begins in the window."""


class StoredRows:
    """Rows one after the other, in arrays that are on a disk as a whole or in part.

    Args:
        parameter: This rank's range of the parameters.
        state: The same of every kind of state, and of master weights (``master``) if there are any.
        width: Elements of a row.
        optimizer: What updates them.
        window: Lends memory that starts at a page, for so many bytes.
        chunk_numel: Elements of a chunk, at most.
    """

    in_place = False
    """Whether rows that are looked at are brought up to date where they lie."""

    def __init__(
        self,
        parameter: ChunkedArray,
        state: Mapping[str, ChunkedArray],
        *,
        width: int,
        optimizer: ElementwiseOptimizer,
        window: Callable[[int], AbstractContextManager[Array]],
        chunk_numel: int,
    ) -> None:
        self._columns = {"parameter": parameter, **state}
        self._exact = "master" if "master" in state else "parameter"  # what an update changes
        self._state = [kind for kind in state if kind != "master"]
        self._width = width
        self._optimizer = optimizer
        self._window = window
        self._stored = [kind for kind, column in self._columns.items() if column.is_stored]
        sizes = [self._columns[kind].dtype.itemsize for kind in self._stored]
        self._granule = granule_of(sizes)
        self._numel = window_numel(parameter.size, width, sizes, chunk_numel=chunk_numel)
        for column in self._columns.values():
            column.grain = PAGE_NBYTES

    @property
    def most(self) -> int:
        """Rows that are best changed at once, if all are."""
        return max(self._numel // self._width, 1)

    def take(self, rows: Array, *, late: LateUpdates | None, ages: Array | None) -> Array:
        """Return the parameters of some rows, up to date, in any order, also twice: a row for each, in new memory.

        Args:
            rows: Counted from this rank's first, int64.
            late: What makes up for updates that they have missed; nothing is written.
            ages: How many each has missed; None: none.
        """
        wanted, places = unique_rows(rows)
        found = np.empty((wanted.size, self._width), self._columns["parameter"].dtype)
        old = np.zeros(wanted.size, np.int64)
        if ages is not None:
            old[slice(None) if places is None else places] = ages
        current, behind = np.flatnonzero(old == 0), np.flatnonzero(old)
        for which, columns in self._blocks(wanted[current], ["parameter"]):
            found[current[which]] = columns["parameter"]
        for which, columns in self._blocks(wanted[behind], [self._exact, *self._state]):
            here = behind[which]
            assert late is not None
            self._catch_up(columns, late, old[here])
            if self._exact == "parameter":
                found[here] = columns["parameter"]
                continue
            for some in self._few(here.size):
                exact = columns["master"][some].reshape(-1)
                values = np.empty(exact.size, found.dtype)
                kernels_for(exact).round_master(values, exact)
                found[here[some]] = values.reshape(-1, self._width)
        return found if places is None else found[places]

    def change(
        self,
        rows: Array,
        *,
        late: LateUpdates | None = None,
        ages: Array | None = None,
        gradients: Array | None = None,
        **settings: Any,
    ) -> None:
        """Bring rows up to date, then update them: read once, written once.

        Args:
            rows: Counted from this rank's first, int64, ascending, each once.
            late: What makes up for updates that they have missed.
            ages: How many each has missed; None: none.
            gradients: A row for each; None: they are not updated.
            **settings: ``lr``, ``step`` and ``grad_scale`` of the update.

        Raises:
            StorageError: The file system refused; what was changed before is written.
        """
        if gradients is None and ages is not None:
            rows, ages = rows[ages != 0], ages[ages != 0]
        for which, columns in self._blocks(rows, list(self._columns), write=True):
            if ages is not None and late is not None:
                self._catch_up(columns, late, ages[which])
            exact = columns[self._exact].reshape(-1)
            if gradients is not None:
                wide = gradients[which].astype(exact.dtype, copy=False).reshape(-1)
                state = {kind: columns[kind].reshape(-1) for kind in self._state}
                self._optimizer.update_(exact, wide, state, **settings, copy_out=None)
            if self._exact == "master":
                kernels_for(exact).round_master(columns["parameter"].reshape(-1), exact)

    def _catch_up(self, columns: Mapping[str, Array], late: LateUpdates, ages: Array) -> None:
        """Bring copies of rows up to date, those that have missed something."""
        behind = np.flatnonzero(ages)
        exact, state = columns[self._exact], {kind: columns[kind] for kind in self._state}
        if behind.size == ages.size:
            late.catch_up_(exact, state, ages)
            return
        for few in self._few(behind.size):
            which = behind[few]
            some, old = exact[which], {kind: one[which] for kind, one in state.items()}
            late.catch_up_(some, old, ages[which])
            exact[which] = some
            for kind, one in old.items():
                state[kind][which] = one

    def _blocks(
        self, rows: Array, kinds: Sequence[str], *, write: bool = False
    ) -> Iterator[tuple[slice, dict[str, Array]]]:
        """Yield which of ``rows``, and copies of them of each kind, 2-D; written back when the next are asked for."""
        stored = [kind for kind in kinds if kind in self._stored]
        if not rows.size:
            return
        if not stored:
            yield slice(0, rows.size), {kind: self._taken(kind, rows) for kind in kinds}
            assert not write, "rows in memory alone are changed where they lie"
            return
        widths = [[self._columns[kind].dtype.itemsize for kind in some] for some in (stored, kinds)]
        with self._window(window_nbytes(*widths, numel=self._numel)) as memory:
            ends = np.cumsum([self._numel * width for width in (*widths[0], *widths[1])])
            places = [
                one.view(self._columns[kind].dtype)
                for kind, one in zip((*stored, *kinds), np.split(memory, ends[:-1]), strict=True)
            ]
            rooms = dict(zip(stored, places, strict=False))
            copies = dict(zip(kinds, places[len(stored) :], strict=True))
            for pages in self._pages(rows):
                some = rows[pages.which]
                windows = {kind: room[: pages.numel] for kind, room in rooms.items()}
                joined(
                    [self._columns[kind].read_parts(pages.parts, one) for kind, one in windows.items()], result=0
                ).wait()
                found = {kind: one[: some.size * self._width].reshape(-1, self._width) for kind, one in copies.items()}
                for kind, one in found.items():
                    if kind not in windows:
                        take_rows(one.reshape(-1), self._in_memory(kind), some, self._width)
                        continue
                    for few in self._few(some.size):
                        one[few] = self._at_any(windows[kind])[pages.offsets[few]]
                yield pages.which, found
                if write:
                    for kind, values in found.items():
                        if kind in windows:
                            self._at_any(windows[kind])[pages.offsets] = values
                        else:
                            put_rows(self._in_memory(kind), values.reshape(-1), some, self._width)
                    back = [self._columns[kind].write_parts(pages.parts, one) for kind, one in windows.items()]
                    joined(back, result=0).wait()

    def _taken(self, kind: str, rows: Array) -> Array:
        """Return copies of rows of an array that is in memory."""
        found = np.empty((rows.size, self._width), self._columns[kind].dtype)
        take_rows(found.reshape(-1), self._in_memory(kind), rows, self._width)
        return found

    def _few(self, count: int) -> Iterator[slice]:
        """Yield slices of so many rows, a few at a time."""
        most = max(_BLOCK // self._width, 1)
        return (slice(first, min(first + most, count)) for first in range(0, count, most))

    def _in_memory(self, kind: str) -> Array:
        """Return the rows of an array that is in memory, without what evens ranges out."""
        memory: Array = self._columns[kind].memory
        return memory[: memory.size // self._width * self._width]

    def _at_any(self, window: Array) -> Array:
        """Return a window as rows that begin at any of its elements: 2-D, in place."""
        return np.lib.stride_tricks.sliding_window_view(window, self._width, writeable=True)

    def _pages(self, rows: Array) -> Iterator[_Pages]:
        """Yield the pages of some rows after the other, as many as the window holds."""
        granule, size = self._granule, self._columns["parameter"].size
        first = rows * self._width // granule
        last = ((rows + 1) * self._width - 1) // granule
        new = last - np.maximum(first, np.append(-1, last[:-1]) + 1) + 1  # pages that no row before has
        counted = np.cumsum(new)
        most = self._numel // granule - (self._width // granule + 2)  # what a row has of one before it is not counted
        begin = 0
        while begin < rows.size:
            before = int(counted[begin] - new[begin])
            end = max(int(np.searchsorted(counted, before + most, side="right")), begin + 1)
            which = slice(begin, end)
            counts = new[which].copy()
            counts[0] = last[begin] - first[begin] + 1
            starts = np.cumsum(counts) - counts
            pages = np.arange(counts.sum()) + np.repeat(last[which] - counts + 1 - starts, counts)
            offsets = (
                np.searchsorted(pages, first[which]) * granule + rows[which] * self._width - first[which] * granule
            )
            breaks = np.flatnonzero(np.diff(pages) != 1) + 1
            heads, tails = pages[np.append(0, breaks)], pages[np.append(breaks - 1, pages.size - 1)]
            parts = [(int(a) * granule, min((int(b) + 1) * granule, size)) for a, b in zip(heads, tails, strict=True)]
            yield _Pages(which, parts, sum(b - a for a, b in parts), offsets)
            begin = end
