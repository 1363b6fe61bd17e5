"""What a gather costs a node, in bytes: proportional set size (PSS) counts each shared page once over all processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from zerort.cli.world import World
from zerort.comm import Group

__all__ = ["Footprint", "measure_footprint", "pss_nbytes"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sum of PSS over all ranks: how much it grew by gathering an array of ``nbytes``. Bytes."""

    nbytes: int
    ranks: int
    nodes: int
    shared_nbytes: int
    """Into an array from `Group.zeros_shared`."""
    copied_nbytes: int
    """Into an array of each rank's own."""

    def as_json(self) -> dict[str, int]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


def pss_nbytes() -> int:
    """Return this process's proportional set size."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024


def measure_footprint(group: Group, world: World, *, nbytes: int = 64 * 1024**2) -> Footprint:
    """Gather an array of about ``nbytes`` shared and copied out, and look what that costs. Collective.

    Raises:
        SharedMemoryError: There is no room for one such array.
        OSError: This kernel does not tell PSS.
    """
    share = nbytes // group.size
    before = _together(group, world)
    shards = group.zeros_shared([share] * group.size, np.uint8)
    shards.mine[:] = group.rank + 1
    group.all_gather(shards.mine, out=shards.full).wait()
    _read(shards.full)  # only pages that a rank has looked at are mapped in it
    shared = _together(group, world)
    copied = np.empty(share * group.size, np.uint8)
    group.all_gather(shards.mine, out=copied).wait()
    _read(copied)
    after = _together(group, world)
    group.free(shards.full)
    nodes = len(set(world.all(_host())))
    return Footprint(share * group.size, group.size, nodes, shared - before, after - shared)


def _together(group: Group, world: World) -> int:
    """Sum PSS while every rank stands still: it depends on who has mapped what at the moment."""
    group.barrier().wait()
    pss = pss_nbytes()
    group.barrier().wait()
    return world.total(pss)


def _read(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    assert array[::4096].min() > 0, "every rank gathers what no rank has written as zero"


def _host() -> str:
    import socket

    return socket.gethostname()
