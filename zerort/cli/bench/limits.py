"""The memory limit that everything is held against: an in-place ``a += b`` by all ranks at once.

No loop that reads two streams and writes one of them moves more bytes here: 12 bytes per fp32 element, none of them in
a cache, and no line is read only to be overwritten.

A sum of n arrays reads n bytes for each that it writes, and a core that reads more and writes less moves fewer bytes:
what it can move at most is measured beside the limit.
"""

from __future__ import annotations

import numpy as np

from zerort import native

__all__ = ["MemoryLimit"]

_NBYTES = 64 * 1024**2
_MOST_NBYTES = 1024**3
_LEAST_NBYTES = 8 * 1024**2


class MemoryLimit:
    """Two private arrays, and the loop whose speed is the limit.

    Args:
        ranks: How many do this at once. Each has two arrays of 64 MiB; beyond 16 ranks smaller ones, 1 GiB each in all.
    """

    def __init__(self, *, ranks: int = 1) -> None:
        self._ranks = ranks
        numel = max(_LEAST_NBYTES, min(_NBYTES, _MOST_NBYTES // ranks)) // 4
        # Neither zero: some processors do not write a zero back over a zero.
        self._a = np.ones(numel, np.float32)
        self._b = np.full(numel, 2.0**-12, np.float32)
        # The same memory again, as n arrays: half of them in either.
        many = max(ranks, 2)
        part = numel // -(-many // 2) // 16 * 16
        halves = (self._a, self._b)
        self._parts = [halves[k % 2][k // 2 * part :][:part] for k in range(many)]

    def run(self) -> None:
        """Add once."""
        native.reduce_into(self._a, (self._a, self._b))

    def run_sum(self) -> None:
        """Sum as many private arrays as there are ranks, in place: a reduce_scatter without its meetings."""
        native.reduce_into(self._parts[0], self._parts)

    def gbs(self, seconds: float) -> float:
        """Return the GB/s of all ranks together when each took ``seconds`` for one `run`."""
        return self._ranks * 3 * self._a.nbytes / seconds / 1e9

    def sum_gbs(self, seconds: float) -> float:
        """Return the GB/s of all ranks together when each took ``seconds`` for one `run_sum`."""
        return self._ranks * (len(self._parts) + 1) * self._parts[0].nbytes / seconds / 1e9
