"""Read extents out of data files, check every byte, and put what is wanted where it is wanted.

    file ── preadv ──> aligned block ── crc32c + copy or cast, 2 MiB at a time ──> this rank's range
    file ── preadv ──> this rank's range                                      where pages fall on pages ([Note: Phase])

A `Fetch` is one stored extent and the place for a part of it; neighbours in a file are read with one call. An extent is
read whole even if a part of it is wanted, since its checksum covers the whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zerort.checkpoint.files.directory import MOST_REPLACED, is_replaced, read_manifest, replaced_too_often
from zerort.checkpoint.format.casts import convert
from zerort.checkpoint.format.compression import decompressed, expect_reader
from zerort.checkpoint.format.extents import LARGE_NBYTES, PAGE_NBYTES, round_up
from zerort.checkpoint.format.manifest import SPARSE, DataFile, Manifest, StoredExtent
from zerort.checkpoint.value import OffloadedArray
from zerort.codec import decode_sparse
from zerort.errors import CorruptCheckpointError
from zerort.layout import itemsize
from zerort.native import address_of, crc32c
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files.blocks import BLOCK_NBYTES, BlockFile, run_workers
from zerort.typing import Array

__all__ = ["Damage", "Fetch", "ShardFiles", "damage_error", "deliver", "fetch_all", "open_checkpoint", "span_of"]


_STRIP_NBYTES = 2 * 1024**2
"""Summed up and copied in one go. From this size on copies go past the caches: a quarter less CPU, measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An extent whose bytes are not those that were written."""

    file: str
    """The data file's name."""
    kind: str
    tensor: str
    offset: int
    """The extent's first byte in the file."""
    nbytes: int
    """The extent's bytes."""
    reason: str
    """What was expected and what was found."""

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} {self.tensor!r}, {self.nbytes} bytes from offset {self.offset}: {self.reason}"


class Fetch(NamedTuple):
    """One stored extent, and where a part of it goes."""

    kind: str
    tensor: str
    dtype: str
    """Of the stored elements."""
    extent: StoredExtent
    skip: int = 0
    """The first wanted element, counted in the extent."""
    out: Array | None = None
    """Where the wanted elements go, 1-D; None only checks."""
    offloaded: tuple[OffloadedArray, int, int] | None = None
    """What is not in memory, and where in it the wanted elements go: first and how many; then there is no `out`."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that the extent takes in its file."""
        return self.extent.stored_nbytes or self.extent.numel * itemsize(self.dtype)

    @property
    def is_compressed(self) -> bool:
        """Whether the extent is a frame of zstd's."""
        return self.extent.stored_nbytes > 0 and self.extent.way != SPARSE

    def landed(self) -> Fetch:
        """Return the same fetch with memory for its elements, if they rest elsewhere."""
        if self.offloaded is None:
            return self
        values, _, numel = self.offloaded
        return self._replace(out=np.empty(numel, values.dtype))

    def put_away(self) -> None:
        """Put what has landed where it rests."""
        if self.offloaded is not None and self.out is not None:
            values, first, _ = self.offloaded
            values.write(first, self.out).wait()

    @property
    def in_phase(self) -> bool:
        """Whether whole pages of the file are whole pages of `out`, and enough of them."""
        if self.out is None or self.out.nbytes < LARGE_NBYTES or str(self.out.dtype) != self.dtype:
            return False
        if self.extent.stored_nbytes:
            return False
        return (self.extent.offset + self.skip * self.out.itemsize - address_of(self.out)) % PAGE_NBYTES == 0


class ShardFiles:
    """The data files of a checkpoint that some fetches need, open for reading.

    Args:
        path: The checkpoint's directory.
        manifest: What it holds.
        fetches: What will be read.
        on_damage: Told of every fetch whose file is missing or too short; those fetches are left out of `fetches`.

    Raises:
        OSError: A file that is there cannot be opened.
    """

    def __init__(
        self, path: str, manifest: Manifest, fetches: Sequence[Fetch], *, on_damage: Callable[[Damage], None]
    ) -> None:
        self.fetches: list[Fetch] = []
        self._files: dict[int, BlockFile] = {}
        self._names = manifest.files
        if any(fetch.is_compressed and (fetch.out is not None or fetch.offloaded) for fetch in fetches):
            expect_reader()
        reasons: dict[int, str] = {}
        with ExitStack() as stack:
            for index in sorted({fetch.extent.file for fetch in fetches}):
                expected = manifest.files[index]
                try:
                    file = stack.enter_context(BlockFile(os.path.join(path, expected.name)))
                except FileNotFoundError:
                    reasons[index] = f"Expected a file of {expected.nbytes} bytes, got none."
                    continue
                self._files[index] = file
                if file.nbytes != expected.nbytes:
                    reasons[index] = f"Expected a file of {expected.nbytes} bytes, got one of {file.nbytes}."
            for fetch in fetches:
                reason = reasons.get(fetch.extent.file)
                if reason is None:
                    self.fetches.append(fetch)
                else:
                    on_damage(damage_of(fetch, self._names, reason))
            self._stack = stack.pop_all()

    def read(self, index: int, out: Array, offset: int) -> int:
        """Fill ``out`` from a file, as `BlockFile.read` does."""
        return self._files[index].read(out, offset)

    def scatter(self, index: int, outs: Sequence[Array], offset: int) -> int:
        """Fill several arrays from a file, as `BlockFile.scatter` does."""
        return self._files[index].scatter(outs, offset)

    def damage_of(self, fetch: Fetch, reason: str) -> Damage:
        """Return what is wrong with a fetch."""
        return damage_of(fetch, self._names, reason)

    def close(self) -> None:
        """Close all files."""
        self._stack.close()


def open_checkpoint(
    path: str, fetches_of: Callable[[Manifest], Sequence[Fetch]], *, on_damage: Callable[[Damage], None]
) -> tuple[Manifest, ShardFiles]:
    """Read a manifest and open the files that some of its extents are in.

    A saver beside us may replace the checkpoint in between, and delete files. Then it is read once more.

    Args:
        path: The checkpoint's directory.
        fetches_of: Returns what will be read.
        on_damage: Told of what cannot be, as in `ShardFiles`.

    Raises:
        CheckpointError: There is none that can be read.
        OSError: A file that is there cannot be opened.
    """
    for _ in range(MOST_REPLACED):
        manifest = read_manifest(path)
        damages: list[Damage] = []
        with ExitStack() as stack:
            files = ShardFiles(path, manifest, fetches_of(manifest), on_damage=damages.append)
            stack.callback(files.close)
            if damages and is_replaced(path, manifest):
                continue
            for damage in damages:
                on_damage(damage)
            stack.pop_all()
            return manifest, files
    raise replaced_too_often(path)


def damage_of(fetch: Fetch, files: Sequence[DataFile], reason: str) -> Damage:
    """Return what is wrong with a fetch."""
    return Damage(
        file=files[fetch.extent.file].name,
        kind=fetch.kind,
        tensor=fetch.tensor,
        offset=fetch.extent.offset,
        nbytes=fetch.nbytes,
        reason=reason,
    )


def damage_error(path: str, damage: Damage, *, touched: bool) -> CorruptCheckpointError:
    """Return the error for one damaged extent.

    Args:
        path: The checkpoint.
        damage: What is wrong.
        touched: Whether values may already have been overwritten.
    """
    state = "The values being loaded are partly overwritten and not usable" if touched else "Nothing was changed"
    return CorruptCheckpointError(
        f"{damage.reason} {damage.kind} {damage.tensor!r} is damaged: {damage.nbytes} bytes from offset "
        f"{damage.offset} of {os.path.join(path, damage.file)}. {state}: load another "
        f"checkpoint. `zerort ckpt verify {path}` lists all that is damaged."
    )


def fetch_all(
    files: ShardFiles,
    *,
    threads: int,
    on_damage: Callable[[Damage], None],
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read, check and deliver every fetch of ``files``.

    Args:
        files: What to read from.
        threads: How many read at once.
        on_damage: Told of every damaged extent, on any of the threads; may raise to stop everything.
        on_read: Told of bytes that have been checked, on any of the threads.

    Raises:
        OSError: The file system refused.
    """
    runs = _runs(files.fetches)
    largest = max((end - begin for begin, end in map(span_of, runs)), default=0)

    def work(task: int, buffer: Array) -> None:
        run = [fetch.landed() for fetch in runs[task]]
        deliver(files, run, buffer, on_damage=on_damage)
        for fetch in run:
            fetch.put_away()
        on_read(sum(fetch.nbytes for fetch in runs[task]))

    run_workers(len(runs), work, threads=threads, buffer_nbytes=largest)


def deliver(files: ShardFiles, run: Sequence[Fetch], buffer: Array, *, on_damage: Callable[[Damage], None]) -> None:
    """Read neighbours with one call, check each, and put what is wanted where it is wanted.

    Args:
        files: What to read from.
        run: Neighbours in one file, in its order.
        buffer: Page-aligned, as large as `span_of` says.
        on_damage: Told of every damaged extent.
    """
    if len(run) == 1 and run[0].in_phase:
        found = _read_into_place(files, run[0], buffer)
        if found == run[0].extent.crc32c:
            return
        # Short or damaged: read it once more, in the way that says which.
    begin, end = span_of(run)
    count = files.read(run[0].extent.file, buffer[: end - begin], begin)
    for fetch in run:
        at = fetch.extent.offset - begin
        if at + fetch.nbytes > count:
            on_damage(files.damage_of(fetch, f"Expected {fetch.nbytes} bytes, got {max(0, count - at)}."))
            continue
        stored = buffer[at : at + fetch.nbytes]
        found = crc32c(stored) if fetch.extent.stored_nbytes else _sum_and_deliver(stored, fetch)
        if found != fetch.extent.crc32c:
            on_damage(files.damage_of(fetch, f"Expected checksum {fetch.extent.crc32c:08x}, got {found:08x}."))
        elif fetch.extent.stored_nbytes and fetch.out is not None:
            try:
                _decompress(stored, fetch, fetch.out)
            except ValueError as error:
                on_damage(files.damage_of(fetch, f"Expected {error}."))


def span_of(run: Sequence[Fetch]) -> tuple[int, int]:
    """Return the first and one past the last byte of the pages that hold neighbours."""
    first, last = run[0].extent.offset, run[-1].extent.offset + run[-1].nbytes
    return first // PAGE_NBYTES * PAGE_NBYTES, round_up(last, PAGE_NBYTES)


def _runs(fetches: Sequence[Fetch]) -> list[list[Fetch]]:
    """Put neighbours together that one read of a block can serve."""
    runs: list[list[Fetch]] = []
    file, begin, end = -1, 0, 0
    for fetch in sorted(fetches, key=lambda fetch: fetch.extent[:2]):
        extent = fetch.extent
        last = extent.offset + fetch.nbytes
        if (
            not fetch.in_phase
            and runs
            and extent.file == file
            and extent.offset - end < PAGE_NBYTES
            and last - begin <= BLOCK_NBYTES
        ):
            runs[-1].append(fetch)
        else:
            runs.append([fetch])
            file, begin = extent.file, extent.offset
        end = last
    return runs


def _read_into_place(files: ShardFiles, fetch: Fetch, buffer: Array) -> int | None:
    """Read all whole pages of a fetch straight into place, its ends by way of the buffer. Return the checksum.

    pages of the file   │ other, wanted │ wanted … wanted │ wanted, other │
    go to               │ buffer        │ out             │ buffer        │
    """
    assert fetch.out is not None
    out = fetch.out.view(np.uint8)
    begin, end = span_of([fetch])
    first = fetch.extent.offset + fetch.skip * fetch.out.itemsize
    last = first + out.size
    low, high = round_up(first, PAGE_NBYTES), last // PAGE_NBYTES * PAGE_NBYTES
    body = out[low - first : high - first]
    before, behind = buffer[: low - begin], buffer[low - begin : low - begin + end - high]
    parts = [part for part in (before, body, behind) if part.size]
    if files.scatter(fetch.extent.file, parts, begin) != end - begin:
        return None
    checksum = crc32c(before[fetch.extent.offset - begin :])
    checksum = crc32c(body, checksum)
    checksum = crc32c(behind[: fetch.extent.offset + fetch.nbytes - high], checksum)
    out[: low - first] = before[first - begin :]
    out[high - first :] = behind[: last - high]
    return checksum


def _decompress(stored: Array, fetch: Fetch, out: Array) -> None:
    """Deliver the wanted elements of a compressed or sparse extent whose checksum was right."""
    dtype, numel = numpy_dtype(fetch.dtype), fetch.extent.numel
    if fetch.is_compressed:
        expect_reader()
        elements = decompressed(stored, dtype=dtype, numel=numel)
    else:
        elements = np.empty(numel, dtype)
        decode_sparse(elements, stored)
    convert(elements[fetch.skip : fetch.skip + out.size], out=out)


def _sum_and_deliver(stored: Array, fetch: Fetch) -> int:
    """Return the checksum of an extent's bytes, and deliver the wanted elements strip by strip on the way."""
    checksum = 0
    width = itemsize(fetch.dtype)
    dtype = numpy_dtype(fetch.dtype)
    wanted, last = fetch.skip, fetch.skip + (0 if fetch.out is None else fetch.out.size)
    for at in range(0, stored.size, _STRIP_NBYTES):
        strip = stored[at : at + _STRIP_NBYTES]
        checksum = crc32c(strip, checksum)
        first, end = max(wanted, at // width), min(last, (at + strip.size) // width)
        if fetch.out is not None and first < end:
            source = stored[first * width : end * width].view(dtype)
            convert(source, out=fetch.out[first - fetch.skip : end - fetch.skip])
    return checksum
