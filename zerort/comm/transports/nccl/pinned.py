"""Pinned memory for the ranks of an NCCL group: the node's shared window, or each rank's own, registered with its GPU.

A node holds what is shared once, whatever the number of its ranks, and each of them can copy from and to all of it. If
one rank cannot pin it, none does: ranks at different speeds would be worse than slow ones (decision 0042). That warns,
on rank 0, with the cure.

[Note: fork]
A process that forks, for the workers of a DataLoader say, gets private pages copied when one side writes, and pinned
ones at once: gigabytes, and a moment in which GPU and host may look at different pages. So pinned memory is never
private: a rank's own is a shared mapping that it shares with nobody but its children.
"""

from __future__ import annotations

import mmap
import warnings

import numpy as np

from zerort.comm.group import Group
from zerort.comm.guard import checks
from zerort.comm.guard.call import Call
from zerort.comm.guard.checks import Given
from zerort.comm.transports.nccl.transport import NcclTransport
from zerort.device.cuda.pinned import CHUNK_NBYTES, PinnedMemory
from zerort.errors import CallError, DeviceMemoryError
from zerort.typing import Array

__all__ = ["open_pinned"]


def open_pinned(
    group: Group, nbytes: int, *, shared: bool = True, chunk_nbytes: int = CHUNK_NBYTES, name: str = "pinned"
) -> PinnedMemory:
    """Return ``nbytes`` of host memory that the ranks of a node share and their GPUs can reach. Every rank calls this.

    Args:
        group: Of kind ``"nccl"``.
        nbytes: On every rank the same, if they share it.
        shared: Whether the ranks of a node share it; False: each has memory of its own.
        chunk_nbytes: Bytes to register at once; a multiple of the page size.
        name: What to call this in errors and traces.

    Returns:
        The memory; not pinned, on all ranks, if one of them could not.

    Raises:
        SharedMemoryError: There is not that much shared memory; on every rank.
        CallError: No such number of bytes, or chunks that are no pages; on every rank.
    """
    transport = group._transport
    if not isinstance(transport, NcclTransport):
        raise CallError(f"Expected a group of kind 'nccl', got one of kind {group.kind!r}.")

    def fill(call: Call, rank: int, size: int, given: Given) -> None:
        checks.check_numel(call, nbytes)
        if not isinstance(chunk_nbytes, int) or chunk_nbytes < 1 or chunk_nbytes % mmap.PAGESIZE:
            raise CallError(
                f"{call.op}: Expected chunk_nbytes to be a multiple of the page size, {mmap.PAGESIZE}, "
                f"got {chunk_nbytes!r}."
            )
        call.numel = nbytes if shared else 0

    def make() -> tuple[PinnedMemory, list[str]]:
        memory = _room(transport, max(nbytes, 1), shared=shared)[:nbytes]
        pinned, story = None, ""
        try:
            pinned = PinnedMemory(memory, chunk_nbytes=chunk_nbytes)
        except DeviceMemoryError as error:
            story = f"rank {transport.rank}: {error}"
        stories = [text for text in transport.exchange_texts(story) if text]
        if not stories and pinned is not None:
            return pinned, stories
        if pinned is not None:
            pinned.close()
        return PinnedMemory(memory, pin=False), stories

    made, stories = group._together("empty_pinned", name, fill, make)
    if stories and transport.rank == 0:  # said here, not in `make`: a warning may be an error, which is this caller's
        warnings.warn(
            f"{len(stories)} of {transport.size} ranks could not pin host memory, so no rank does: copies between "
            f"host and GPU are slower and hold up the GPU's other work. {stories[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
    return made


def _room(transport: NcclTransport, nbytes: int, *, shared: bool) -> Array:
    """Return memory that a forked child does not copy: the node's window, or a mapping of this rank's own."""
    if shared and transport.host.kind in ("node", "hierarchical"):
        return transport.host.allocate_shared(nbytes)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # MAP_SHARED, as Python maps what is in no file
