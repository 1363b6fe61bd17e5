"""State and frozen parameters that a checkpoint holds in another form than the runtime: coded or decoded as they load.

    stored floats, wanted in blocks      blocks are coded as soon as all their elements have come
    stored in blocks, wanted as floats   blocks are decoded; of those that a shard cuts, the part that is its own
    stored in blocks, wanted in others   both, one after the other

Extents of a checkpoint end anywhere, so pieces of blocks wait for the rest of them (`Recoded`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zerort.checkpoint import Manifest, Value
from zerort.checkpoint.format.casts import convert
from zerort.checkpoint.format.coded import parameter_kind
from zerort.codec import ROWS, BlockRows
from zerort.device import Done, Ticket
from zerort.engine.model.section import Section
from zerort.engine.step.state_entry import StateEntry
from zerort.layout import Extent, FlatLayout, Partition
from zerort.native import decode_moments, encode_moments
from zerort.native.dtypes import numpy_dtype
from zerort.optim import StateFormat
from zerort.optim.forms.moments import INT8, rounding_keys
from zerort.typing import Array

__all__ = ["Recoded", "recoded_parameters", "recoded_values"]


class Recoded:
    """What stored values are written into, by any thread, and which converts them block by block.

    Args:
        dtype: Of the stored values.
        size: How many of them.
        block: How many of them are a block.
        put: Converts whole blocks, given the number of the first, and puts them where they belong.
        then: What it puts them into, if that converts them once more.
    """

    def __init__(
        self, dtype: str, size: int, block: int, put: Callable[[int, Array], None], *, then: Recoded | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = numpy_dtype(dtype)
        self._then = then
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
        if self._then is not None:
            self._then.flush()


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
    begin = entry.partition.of(rank).first - entry.first_of(rank)

    def write(first: int, values: Array) -> None:
        # not-gpu: copies of pageable memory are done when they return
        entry.column.write(begin + first, values.astype(entry.column.dtype, copy=False)).wait()

    is_signed = _rounding(entry)[0]
    return _from_blocks(
        kind,
        _some(entry.layout, names),
        entry.layout,
        entry.partition,
        rank,
        INT8,
        decode=lambda values, payload: decode_moments(values, payload, is_signed=is_signed),
        write=write,
    )


def recoded_parameters(section: Section, value: Value, rank: int, manifest: Manifest) -> Iterator[Value]:
    """Yield ``value``, a section's parameters, in the forms in which a checkpoint holds them.

    Args:
        section: Whose.
        value: As this runtime saves them.
        rank: This one.
        manifest: The checkpoint.
    """
    names = {extent.name for extent in value.layout.extents} - manifest.tensors.get(value.kind, {}).keys()
    for rows in (None, *ROWS.values()):
        kind = parameter_kind(rows)
        if kind == value.kind or kind not in manifest.tensors:
            continue
        found = names & manifest.tensors[kind].keys()  # also if it is none: tensors that nobody asks for are told
        names -= found
        if rows is not None:
            yield _rows_of(section, value, rank, kind, found, rows)
        else:
            layout = replace(section.layout, extents=_some(section.layout, found))
            mine = _rows_sink(section, value, rank)
            yield Value(kind=kind, layout=layout, partition=section.partition, mine=mine)
    kept = manifest.tensors.get(value.kind, {}).keys() | names  # what is nowhere is missing in its own form
    yield replace(value, layout=replace(value.layout, extents=_some(value.layout, kept)))


def _rows_of(section: Section, value: Value, rank: int, kind: str, names: Collection[str], rows: BlockRows) -> Value:
    """Return a value of rows that become this rank's parameters, whatever form these have."""
    sink = None if section.parameters.rows is None else _rows_sink(section, value, rank)

    target = value.mine if sink is None else sink

    def write(first: int, values: Array) -> None:
        if isinstance(target, np.ndarray):
            convert(values, out=target[first : first + values.size])
        else:
            here = np.empty(values.size, target.dtype)
            convert(values, out=here)
            target.write(first, here).wait()  # not-gpu: copies of pageable memory are done when they return

    return _from_blocks(
        kind,
        _some(section.layout, names),
        section.layout,
        section.partition,
        rank,
        rows,
        decode=rows.decode,
        write=write,
        then=sink,
    )


def _rows_sink(section: Section, value: Value, rank: int) -> Recoded:
    """Return what elements are written into that become this rank's rows."""
    rows = section.parameters.rows
    assert rows is not None

    def put(at: int, values: Array) -> None:
        octets = np.empty(rows.nbytes_of(values.size), np.uint8)
        rows.encode(octets, values)
        first = at * rows.nbytes
        if isinstance(value.mine, np.ndarray):
            value.mine[first : first + octets.size] = octets
        else:
            value.mine.write(first, octets).wait()  # not-gpu: copies of pageable memory are done when they return

    return Recoded(section.layout.dtype, section.partition.counts[rank], rows.numel, put)


def _from_blocks(
    kind: str,
    extents: Sequence[Extent],
    layout: FlatLayout,
    partition: Partition,
    rank: int,
    format: StateFormat | BlockRows,
    *,
    decode: Callable[[Array, Array], None],
    write: Callable[[int, Array], None],
    then: Recoded | None = None,
) -> Value:
    """Return a value of the stored blocks that overlap this rank's elements, which they become.

    Args:
        kind: Of the blocks in the checkpoint.
        extents: The tensors, as they lie here.
        layout: Of the elements here.
        partition: Who holds which of them.
        rank: This one.
        format: The blocks.
        decode: Writes the values of whole blocks, float32.
        write: Takes decoded elements, and where the first is in this rank's range.
        then: What that converts them with once more.
    """
    own, names = partition.of(rank), {extent.name for extent in extents}
    shapes = {one.name: (-(-one.numel // format.numel), format.nbytes) for one in extents}
    blocks = FlatLayout.build(shapes, dtype="uint8", alignment=1)
    wanted = [
        (blocks.of(one.extent.name).offset, format.bytes_of(_block_aligned(one.in_extent, format)))
        for one in layout.overlaps(*own)
        if one.extent.name in names
    ]
    nowhere = 0 if rank < partition.size - 1 else blocks.numel
    first = min((offset + rows.start for offset, rows in wanted), default=nowhere)
    last = max((offset + rows.stop for offset, rows in wanted), default=nowhere)

    def put(at: int, payload: Array) -> None:
        begin = first + at * format.nbytes
        for one in blocks.overlaps(begin, begin + payload.size):
            rows = slice(one.in_extent.start // format.nbytes, one.in_extent.stop // format.nbytes)
            values = np.empty((rows.stop - rows.start) * format.numel, np.float32)
            decode(values, payload[one.in_range])
            extent = layout.of(one.extent.name)
            start = extent.offset + rows.start * format.numel
            here = slice(max(start, own.first), min(start + values.size, extent.stop, own.stop))
            if here.start < here.stop:
                write(here.start - own.first, values[here.start - start : here.stop - start])

    counts = [0] * partition.size
    counts[0] += first
    counts[-1] += blocks.numel - last
    counts[rank] += last - first
    mine = Recoded("uint8", last - first, format.nbytes, put, then=then)
    return Value(kind=kind, layout=blocks, partition=Partition.of_counts(counts), mine=mine)


def _block_aligned(elements: slice, format: StateFormat | BlockRows) -> slice:
    return slice(elements.start // format.numel * format.numel, elements.stop)


def _rounding(entry: StateEntry) -> tuple[bool, tuple[int, int]]:
    """Return whether a moment has a sign, and the keys of its rounding: those of no update."""
    is_signed = not entry.spec.name.startswith("exp_avg_sq")
    return is_signed, rounding_keys(0)[0 if is_signed else 1]


def _some(layout: FlatLayout, names: Collection[str]) -> tuple[Extent, ...]:
    return tuple(extent for extent in layout.extents if extent.name in names)
