"""State that a checkpoint holds in another form than the runtime: coded or decoded while it is loaded.

    stored float32, wanted in blocks     blocks are coded as soon as all their elements have come
    stored in blocks, wanted float32     blocks are decoded; of those that a shard cuts, the part that is its own

Extents of a checkpoint end anywhere, so pieces of blocks wait for the rest of them (`Recoded`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from zerort.checkpoint import Manifest, Value
from zerort.device import Done, Ticket
from zerort.engine.model.section import Section
from zerort.engine.step.state_entry import StateEntry
from zerort.layout import FlatLayout, Partition
from zerort.native import decode_moments, encode_moments
from zerort.optim import StateFormat
from zerort.optim.moments import INT8, rounding_keys
from zerort.typing import Array

__all__ = ["Recoded", "recoded_values"]


class Recoded:
    """What stored values are written into, by any thread, and which converts them block by block.

    Args:
        dtype: Of the stored values.
        size: How many of them.
        block: How many of them are a block.
        put: Converts whole blocks, given the number of the first, and puts them where they belong.
    """

    def __init__(self, dtype: str, size: int, block: int, put: Callable[[int, Array], None]) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.size = size
        self._block = block
        self._put = put
        self._pieces: dict[int, tuple[Array, int]] = {}  # blocks that are not whole, and how much of them has come
        self._lock = threading.Lock()

    def read(self, first: int, out: Array) -> Ticket[Array]:
        """Refuse: a load only writes."""
        raise NotImplementedError

    def write(self, first: int, source: Array) -> Ticket[Array]:
        """Take stored values from ``first`` on."""
        block, last = self._block, first + source.size
        begin, end = -(-first // block), last // block
        if begin < end:
            self._put(begin, source[begin * block - first : end * block - first])
        for at in dict.fromkeys((first // block, end)):
            start, stop = max(first, at * block), min(last, (at + 1) * block)
            if start < stop and not begin <= at < end:
                self._add(at, start - at * block, source[start - first : stop - first])
        return Done(source)

    def _add(self, at: int, offset: int, piece: Array) -> None:
        with self._lock:
            values, count = self._pieces.pop(at, (np.zeros(self._block, self.dtype), 0))
            values[offset : offset + piece.size] = piece
            if count + piece.size < self._block:
                self._pieces[at] = values, count + piece.size
                return
        self._put(at, values)

    def flush(self) -> None:
        """Convert what is left when all has come: the ends of tensors, with zeros behind them."""
        for at, (values, _) in self._pieces.items():
            self._put(at, values)
        self._pieces.clear()


def recoded_values(section: Section, entry: StateEntry, rank: int, manifest: Manifest) -> Iterator[Value]:
    """Yield values for the tensors whose state of this kind a checkpoint holds in another form."""
    format = entry.spec.format
    kind = entry.spec.name
    other = f"{kind}.{INT8.name}" if format is None else kind.removesuffix(f".{format.name}")
    stored, elsewhere = manifest.tensors.get(kind, {}), manifest.tensors.get(other, {})
    names = {extent.name for extent in entry.layout.extents if extent.name in elsewhere and extent.name not in stored}
    if names:
        make = _decoded if format is None else _coded
        yield make(section, entry, rank, other, names)


def _coded(section: Section, entry: StateEntry, rank: int, kind: str, names: Collection[str]) -> Value:
    """Return a value of float32 elements that become this rank's blocks."""
    format = entry.spec.format
    assert format is not None
    own = section.partition.of(rank)
    offset = format.nbytes_of(own.first) - entry.first_of(rank)

    def put(at: int, values: Array) -> None:
        payload = np.empty(format.nbytes_of(values.size), np.uint8)
        is_signed, keys = _rounding(entry)
        encode_moments(payload, values, start=own.first + at * format.numel, is_signed=is_signed, keys=keys)
        # not-gpu: copies of pageable memory are done when they return
        entry.column.write(offset + at * format.nbytes, payload).wait()

    layout = replace(section.layout, dtype="float32", extents=_some(section.layout, names))
    mine = Recoded("float32", own.numel, format.numel, put)
    return Value(kind=kind, layout=layout, partition=section.partition, mine=mine)


def _decoded(section: Section, entry: StateEntry, rank: int, kind: str, names: Collection[str]) -> Value:
    """Return a value of the blocks that overlap this rank's elements, which they become."""
    own = entry.partition.of(rank)
    shapes = {e.name: (-(-e.numel // INT8.numel), INT8.nbytes) for e in entry.layout.extents if e.name in names}
    blocks = FlatLayout.build(shapes, dtype="uint8", alignment=1)
    wanted = [
        (blocks.of(one.extent.name).offset, INT8.bytes_of(_block_aligned(one.in_extent, INT8)))
        for one in entry.layout.overlaps(*own)
        if one.extent.name in names
    ]
    nowhere = 0 if rank < entry.partition.size - 1 else blocks.numel
    first = min((offset + rows.start for offset, rows in wanted), default=nowhere)
    last = max((offset + rows.stop for offset, rows in wanted), default=nowhere)

    def put(at: int, payload: Array) -> None:
        begin = first + at * INT8.nbytes
        for one in blocks.overlaps(begin, begin + payload.size):
            rows = slice(one.in_extent.start // INT8.nbytes, one.in_extent.stop // INT8.nbytes)
            values = np.empty((rows.stop - rows.start) * INT8.numel, np.float32)
            decode_moments(values, payload[one.in_range], is_signed=_rounding(entry)[0])
            extent = entry.layout.of(one.extent.name)
            start = extent.offset + rows.start * INT8.numel
            here = slice(max(start, own.first), min(start + values.size, extent.last, own.last))
            if here.start < here.stop:
                part = values[here.start - start : here.stop - start].astype(entry.column.dtype, copy=False)
                # not-gpu: copies of pageable memory are done when they return
                entry.column.write(here.start - entry.first_of(rank), part).wait()

    counts = [0] * entry.partition.size
    counts[0] += first
    counts[-1] += blocks.numel - last
    counts[rank] += last - first
    mine = Recoded("uint8", last - first, INT8.nbytes, put)
    return Value(kind=kind, layout=blocks, partition=Partition.of_counts(counts), mine=mine)


def _block_aligned(elements: slice, format: StateFormat) -> slice:
    return slice(elements.start // format.numel * format.numel, elements.stop)


def _rounding(entry: StateEntry) -> tuple[bool, tuple[int, int]]:
    """Return whether a moment has a sign, and the keys of its rounding: those of no update."""
    is_signed = not entry.spec.name.startswith("exp_avg_sq")
    return is_signed, rounding_keys(0)[0 if is_signed else 1]


def _some(layout: FlatLayout, names: Collection[str]) -> tuple[Any, ...]:
    return tuple(extent for extent in layout.extents if extent.name in names)
