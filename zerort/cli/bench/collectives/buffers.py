"""`Buffers`: the arrays that a benchmark works on, made once per size and used for every operation.

The first touch of memory runs at 1–2 GB/s: what is measured is touched before. A size for which there is no room is
refused with the reason, on every rank alike, before anything is allocated: a tmpfs promises more than the machine has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerort.cli.machine import available_nbytes
from zerort.cli.world import World
from zerort.comm import Group
from zerort.config import format_bytes
from zerort.errors import SharedMemoryError
from zerort.typing import Array

__all__ = ["Buffers", "NoRoom", "Pair"]


class NoRoom(Exception):
    """There is not enough memory for a size; every rank raises it."""


class Pair(NamedTuple):
    """Two arrays of one full buffer each. 1-D, uint8."""

    full: Array
    other: Array


class Buffers:
    """A pair of arrays for our collectives and, if wanted, one for MPI's. Grows; a smaller size gets a part of it.

    Args:
        group: Whose windows are used.
        world: To agree on what there is room for.
        arrays: ``"window"`` for arrays from `Group.zeros`, ``"own"`` for plain NumPy arrays.
        compare: Whether MPI needs arrays too; plain ones.
        ranks_here: Ranks that share this machine's memory; those with this host's name if None.
    """

    def __init__(
        self, group: Group, world: World, *, arrays: str, compare: bool, ranks_here: int | None = None
    ) -> None:
        self._group = group
        self._world = world
        self._window = arrays == "window"
        self._compare = compare
        self._given_ranks_here = ranks_here
        self._ours: Pair | None = None
        self._theirs: Pair | None = None
        self._nbytes = 0

    def of(self, nbytes: int) -> tuple[Pair, Pair | None]:
        """Return the pairs for a full buffer of ``nbytes``: ours, and MPI's or None. Collective.

        Raises:
            NoRoom: There is not enough memory.
        """
        if nbytes > self._nbytes:
            self.free()
            self._check(nbytes)
            try:
                self._ours = self._pair(nbytes, window=self._window)
            except SharedMemoryError as error:
                self.free()
                raise NoRoom(str(error)) from None
            self._theirs = self._pair(nbytes, window=False) if self._compare else None
            self._nbytes = nbytes
        assert self._ours is not None
        return _part(self._ours, nbytes), None if self._theirs is None else _part(self._theirs, nbytes)

    def free(self) -> None:
        """Give everything back. Collective."""
        ours, self._ours, self._theirs, self._nbytes = self._ours, None, None, 0
        if ours is not None and self._window:
            for array in ours:
                self._group.free(array)

    def _check(self, nbytes: int) -> None:
        # Two arrays per rank, twice with MPI's, and MPI's own staging; one shared array more for the shared gather.
        needed = nbytes * (self._ranks_here() * (4 if self._compare else 2) + 1)
        available = self._world.first(available_nbytes())
        if needed > 0.9 * available:
            raise NoRoom(
                f"Expected {format_bytes(needed)} of memory for its arrays, got {format_bytes(available)} available. "
                "Use fewer ranks or smaller sizes."
            )

    def _ranks_here(self) -> int:
        if self._given_ranks_here is not None:
            return self._given_ranks_here
        import socket

        hosts = self._world.all(socket.gethostname())
        return max(hosts.count(host) for host in hosts)

    def _pair(self, nbytes: int, *, window: bool) -> Pair:
        if window:
            full = self._group.zeros(nbytes, np.uint8)
            try:
                pair = Pair(full, self._group.zeros(nbytes, np.uint8))
            except SharedMemoryError:
                self._group.free(full)
                raise
        else:
            pair = Pair(np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8))
        for array in pair:
            array[:] = 1
        return pair


def _part(pair: Pair, nbytes: int) -> Pair:
    return Pair(pair.full[:nbytes], pair.other[:nbytes])
