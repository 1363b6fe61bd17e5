"""Look at a directory before anything is put there: room, rights, O_DIRECT, alignment, and how fast it is.

    inspect("/mnt/nvme", needed=n)   ->  DirectoryReport; too little room or no right is refused with the numbers
    measure("/mnt/nvme", nbytes=n)   ->  the same of a directory that is there, without a verdict

What is measured is a file of a few blocks, unlinked as soon as it is open: nothing is left behind, however this ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zerort.config import format_bytes
from zerort.errors import CallError
from zerort.storage.files.blocks import BLOCK_NBYTES, PAGE_NBYTES, BlockFile, aligned_buffer, run_workers
from zerort.storage.files.failures import free_nbytes, no_room, storage_error_from
from zerort.storage.files.mounts import Mount, expect_directory, mount_of
from zerort.typing import Array

__all__ = [
    "SAMPLE_NBYTES",
    "THREADS",
    "DirectoryReport",
    "inspect",
    "measure",
]

SAMPLE_NBYTES = 64 * 1024**2
"""Bytes that are written and read, twice, to measure a disk: a tenth of a second on a good one."""

THREADS = 4
"""That write and read the sample."""

_ALIGNMENTS = (512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryReport:
    """What a directory can do."""

    path: str
    free_nbytes: int | None
    """What this user can still write; None where the file system does not tell."""
    direct: bool
    """Whether files can go past the page cache."""
    alignment: int | None
    """What O_DIRECT asks of addresses, offsets and lengths, in bytes; None without it."""
    write_gbs: float
    read_gbs: float
    mount: Mount | None = None
    """The file system that it lies on; None where the kernel does not tell."""

    @property
    def gbs(self) -> float:
        """GB/s of a stream that reads and writes as much: what a striped store weighs its members by."""
        return 2 / (1 / self.write_gbs + 1 / self.read_gbs)

    def seconds(self, *, read: int, written: int) -> float:
        """Return how long this disk takes at least to read and write so many bytes."""
        return read / self.read_gbs / 1e9 + written / self.write_gbs / 1e9

    def __str__(self) -> str:
        free = "unknown" if self.free_nbytes is None else format_bytes(self.free_nbytes)
        how = f"O_DIRECT at {self.alignment} bytes" if self.direct else "no O_DIRECT: through the page cache"
        where = self.path if self.mount is None else f"{self.path} on {self.mount}"
        return f"{where}: {free} free, write {self.write_gbs:.2f} GB/s, read {self.read_gbs:.2f} GB/s, {how}"


def inspect(
    directory: str | os.PathLike[str],
    *,
    needed: int = 0,
    what: str = "offloaded values",
    rank: int | None = None,
    sample_nbytes: int = SAMPLE_NBYTES,
) -> DirectoryReport:
    """Find out what a directory can do, and refuse one that cannot take ``needed`` bytes.

    Args:
        directory: Where.
        needed: Bytes that will be put there, by all ranks that share the disk.
        what: What they are, as a noun phrase for the error.
        rank: Whose they are, for the error.
        sample_nbytes: How much to write and read, in whole blocks of 4 MiB; at least one.

    Raises:
        StorageError: There is too little room, or the directory is not there or cannot be written to.
    """
    path = os.path.abspath(os.fspath(directory))
    if needed < 0 or sample_nbytes < 1:
        raise CallError(f"Expected sizes in bytes, got needed={needed} and sample_nbytes={sample_nbytes}.")
    sample = max(sample_nbytes // BLOCK_NBYTES, 1) * BLOCK_NBYTES
    expect_directory(path, what=what, rank=rank)
    try:
        free = free_nbytes(path)
        if free is not None and free < max(needed, sample):
            raise no_room(path, what=what, needed=max(needed, sample), why="the disk is too full", rank=rank)
        return measure(path, nbytes=sample)
    except OSError as error:
        raise storage_error_from(error, path=path, what=what, needed=max(needed, sample), rank=rank) from error


def measure(path: str, *, nbytes: int) -> DirectoryReport:
    """Find out what a directory that is there can do.

    Args:
        path: The directory.
        nbytes: How much to write and read; whole blocks of 4 MiB.

    Raises:
        OSError: The file system refused; nothing is left behind.
    """
    free = free_nbytes(path)
    name = os.path.join(path, f".zerort-preflight-{secrets.token_hex(8)}")
    try:
        file = BlockFile(name, create_nbytes=nbytes)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    with file:
        page = np.random.default_rng(0).integers(0, 256, PAGE_NBYTES, np.uint8)  # a disk may not store zeros at all
        memory = aligned_buffer(min(THREADS * BLOCK_NBYTES, nbytes))
        memory.reshape(-1, PAGE_NBYTES)[:] = page

        def block(task: int) -> Array:
            at = task * BLOCK_NBYTES % memory.size
            return memory[at : at + BLOCK_NBYTES]

        def write() -> None:
            _run(nbytes, lambda task: file.write(block(task), task * BLOCK_NBYTES))
            file.sync()

        def read() -> None:
            file.forget()
            _run(nbytes, lambda task: file.read(block(task), task * BLOCK_NBYTES))

        write_gbs, read_gbs = (nbytes / _second_time(one) / 1e9 for one in (write, read))
        return DirectoryReport(
            path=path,
            free_nbytes=free,
            direct=file.direct,
            alignment=_alignment(file) if file.direct else None,
            write_gbs=write_gbs,
            read_gbs=read_gbs,
            mount=mount_of(path),
        )


def _run(nbytes: int, move: Callable[[int], object]) -> None:
    run_workers(nbytes // BLOCK_NBYTES, lambda task, buffer: move(task), threads=THREADS, buffer_nbytes=0)


def _second_time(work: Callable[[], None]) -> float:
    """Return the seconds of doing it again: blocks of a new file cost a disk more than those that are written over."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _alignment(file: BlockFile) -> int:
    """Return the smallest alignment at which a direct read works."""
    memory = aligned_buffer(2 * mmap.PAGESIZE)
    for alignment in _ALIGNMENTS:
        if file.takes(memory[alignment : 2 * alignment], alignment):
            return alignment
    return PAGE_NBYTES
