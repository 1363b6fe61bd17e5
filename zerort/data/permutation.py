"""`permute`: a seeded permutation of ``range(length)``, evaluated where it is asked for, in O(1) memory.

    position p = left · b + right            left < a, right < b, a · b just above the length
    six times: (left, right) ← (right, (left + hash(right)) mod a)          a Feistel network; a and b change places
    a result at or above the length goes in once more (cycle walking)

Each round is undone by subtracting the same hash, so the network is a bijection of ``range(a · b)``, and walking its
cycles makes it one of ``range(length)``. With a and b near the square root fewer than one in a square root of the
results has to walk on. A hash multiplies, folds and multiplies, with two keys of its own; keys come from NumPy's
`SeedSequence`, whose numbers are the same in every release (decision 0117).
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST", "permute"]

LARGEST: Final = 2**62
"""The longest permutation: both halves of a position are below 2^31, so that products stay within 64 bits."""

_ROUNDS: Final = 6
_HALF: Final = np.uint64(32)
_BLOCK: Final = 1 << 14
"""Positions that are computed at a time: their few arrays stay in the cache."""


def permute(positions: NDArray[np.int64], *, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return what stands at some positions of a permutation of ``range(length)``.

    >>> permute(np.arange(6), length=6, seed=7, epoch=0).tolist()
    [4, 0, 5, 2, 3, 1]

    Args:
        positions: From 0 to ``length - 1``, in any order; 1-D.
        length: Of the permutation.
        seed: Which family of permutations.
        epoch: Which of the family.
    """
    left = math.isqrt(length - 1) + 1
    right = -(-length // left)
    keys = _keys(seed, epoch)
    found = np.empty(positions.size, np.int64)
    for first in range(0, positions.size, _BLOCK):
        block = positions[first : first + _BLOCK].astype(np.uint64)
        _mix(block, left, right, keys)
        beyond = np.flatnonzero(block >= length)
        while beyond.size:
            walking = block[beyond]
            _mix(walking, left, right, keys)
            block[beyond] = walking
            beyond = beyond[walking >= length]
        found[first : first + _BLOCK] = block
    return found


@functools.lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[tuple[np.uint64, np.uint64], ...]:
    """Return what each round adds and multiplies by."""
    words = np.random.SeedSequence((seed, epoch)).generate_state(2 * _ROUNDS, np.uint64)
    return tuple((words[at], words[at + 1] | np.uint64(1)) for at in range(0, words.size, 2))


def _mix(values: NDArray[np.uint64], left: int, right: int, keys: tuple[tuple[np.uint64, np.uint64], ...]) -> None:
    """Put values from ``range(left * right)`` through the network, in place."""
    size, other = np.uint64(left), np.uint64(right)
    high, low = np.divmod(values, other)
    hashed, spare = np.empty_like(values), np.empty_like(values)
    for addend, factor in keys:
        np.add(low, addend, out=hashed)
        np.multiply(hashed, factor, out=hashed)
        np.right_shift(hashed, _HALF, out=spare)
        np.bitwise_xor(hashed, spare, out=hashed)  # or equal steps of `low` would be equal steps of the hash
        np.multiply(hashed, factor, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)  # 32 bits, then that part of `size`: no division
        np.multiply(hashed, size, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)
        np.add(high, hashed, out=high)
        np.subtract(high, size, out=hashed)  # wraps round to a large number where `high` is below `size`
        np.minimum(high, hashed, out=high)
        high, low, size, other = low, high, other, size
    np.multiply(high, other, out=values)
    np.add(values, low, out=values)
