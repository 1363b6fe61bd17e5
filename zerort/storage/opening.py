"""The disks under a `StorageSession`: cleaned up, looked at, opened as this rank's store, and found large enough."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

from zerort.comm import Group
from zerort.comm.agreed import agreed
from zerort.config.offload import OffloadOptions
from zerort.storage.files.blocks import BLOCK_NBYTES, GRAIN_NBYTES, PAGE_NBYTES
from zerort.storage.files.failures import free_nbytes, no_room
from zerort.storage.files.mounts import disk_of
from zerort.storage.files.preflight import DirectoryReport, inspect
from zerort.storage.files.segments import round_up
from zerort.storage.scratch import clean_up
from zerort.storage.stores.bridged import BridgedStore
from zerort.storage.stores.nvme import NvmeOptions, NvmeStore
from zerort.storage.stores.store import Store
from zerort.storage.stores.striped import UNIT_NBYTES, StripedStore
from zerort.typing import Device, HostMemorySource

__all__ = ["expect_room", "look_at", "open_together"]

_SAMPLE_NBYTES = 16 * 1024**2
"""Written and read by the first rank of a host to see how fast its disk is."""

_BRIDGE_DEPTH = 3
"""Blocks that pass at once between a disk and a GPU, each way."""


def look_at(directories: Sequence[str], *, what: str, rank: int) -> tuple[DirectoryReport, ...]:
    """Delete what dead runs left in directories, and return what these can do; warn of those that are no disks.

    Raises:
        StorageError: One of them cannot be used.
    """
    for one in directories:  # now: what is asked for next needs their room
        clean_up(one)
    found = tuple(inspect(one, what=what, rank=rank, sample_nbytes=_SAMPLE_NBYTES) for one in directories)
    for report in found:
        if report.mount is not None and report.mount.is_memory:
            warnings.warn(
                f"Expected a disk for what rests on NVME, got {report.path}, which is memory ({report.mount.kind}). "
                'Nothing is saved by it. Name a disk: zr.open(scratch="/mnt/nvme"), or ZERORT_SCRATCH=/mnt/nvme.',
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def expect_room(directories: Sequence[str], needed: int, *, what: str) -> None:
    """Raise unless directories have room for ``needed`` bytes together; those on one disk share what it has.

    Raises:
        StorageError: They have not, with the numbers.
    """
    free = {disk_of(one): free_nbytes(one) for one in directories}
    if None not in free.values() and sum(filter(None, free.values())) < needed:
        raise no_room(
            " + ".join(directories), what=what, needed=needed, why="all ranks of this host together need more"
        )


def open_together(
    world: Group, directories: Sequence[str], options: OffloadOptions, *, host: HostMemorySource
) -> tuple[Store, Store]:
    """Open this rank's store in one directory, or over several. On all ranks, or on none.

    Args:
        world: All ranks.
        directories: Where files go.
        options: How values stream.
        host: What passes through the host on its way to a GPU.

    Returns:
        The store for arrays of the host only, and the one for those of the group's device, too.

    Raises:
        StorageError: A rank cannot open its files; on every rank.
    """
    with contextlib.ExitStack() as unless_all_have:
        with agreed(world, "offload"):
            files = _open_files(directories, options, rank=world.rank)
            unless_all_have.callback(files.close)
        with agreed(world, "offload"):
            store = _bridge(files, world.device, host, options)
            unless_all_have.callback(store.close)
        unless_all_have.pop_all()
    return files, store


def _open_files(directories: Sequence[str], options: OffloadOptions, *, rank: int) -> NvmeStore | StripedStore:
    settings = NvmeOptions(
        threads=options.threads, checksum=options.checksum, direct=options.direct, retries=options.retries
    )
    if len(directories) == 1:
        return NvmeStore(directories[0], rank=rank, options=settings)
    # Two units to a chunk: what a member has of it is then one piece, and is written as a whole. Such a write replaces
    # a file that a checkpoint shares; one in part would have to copy it first.
    unit = max(UNIT_NBYTES, round_up(options.chunk_nbytes // 2, GRAIN_NBYTES))
    return StripedStore.open(
        directories, rank=rank, name="nvme", options=settings, sample_nbytes=_SAMPLE_NBYTES, unit_nbytes=unit
    )


def _bridge(files: Store, device: Device, host: HostMemorySource, options: OffloadOptions) -> Store:
    """Return a store that a device's arrays can be read from and written to. Every rank calls this."""
    if device.in_host_memory:
        return files
    slot = min(BLOCK_NBYTES, round_up(options.chunk_nbytes, PAGE_NBYTES))
    pinned = host.zeros(2 * _BRIDGE_DEPTH * slot, "uint8")
    return BridgedStore(files, device, slot_nbytes=slot, depth=_BRIDGE_DEPTH, pinned=pinned)
