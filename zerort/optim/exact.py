"""Sums whose bits do not depend on the order of what is summed, nor on who sums which part.

    numbers below 2^top    ├ digit 0 ┼ digit 1 ┼ digit 2 ┼ …       each of `bits` bits, as a whole number in float64
    sums of a digit        whole numbers below 2^53: every one of them is exact, in any order

What lies below the last digit is cut off each number by itself. `PLAIN` has the same verbs and sums as it comes. Why
not a fixed tree: decision 0112.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from zerort import native
from zerort.typing import Array

__all__ = ["MARKS", "PLAIN", "Digits", "Summation", "largest_square", "mark_of"]

_EXACT = 53  # bits of whole numbers that float64 holds
_COVERED = 112  # bits below the largest number: twice a float32's square, and what `mark_of` leaves open
_STEP = 16  # exponents that one mark stands for
_LEAST = -1088  # no exponent of a float64 is below

MARKS: Final = (1024 - _LEAST) // _STEP + 1
"""Length of `mark_of`."""


class Summation(Protocol):
    """How numbers of at least 0 are summed: as they are, or digit by digit."""

    @property
    def count(self) -> int:
        """Sums that stand for one."""

    def split(self, values: Array) -> Iterator[Array]:
        """Yield what is summed of each number, in float64, for each of the sums."""

    def square_sums(self, array: Array) -> Array:
        """Return the sums of the squares of a 1-D array."""

    def join(self, sums: Array) -> Array:
        """Return the numbers that sums stand for, one row for each of them."""


class _Plain:
    """Numbers as they are: one sum, whose last bits depend on the order."""

    count = 1

    def split(self, values: Array) -> Iterator[Array]:
        yield values

    def square_sums(self, array: Array) -> Array:
        return np.array([native.square_sum(array)])

    def join(self, sums: Array) -> Array:
        first: Array = sums[0]
        return first


PLAIN: Final[Summation] = _Plain()
"""Sums as they come."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Numbers below 2^top as digits whose sums are exact.

    >>> digits = Digits.of(mark_of(9.0), terms=1000)
    >>> values = np.array([9.0, 1e-9, 1.0 / 3.0])
    >>> sums = [np.array([digit[order].sum() for digit in digits.split(values)]) for order in ([0, 1, 2], [2, 1, 0])]
    >>> (sums[0] == sums[1]).all(), float(digits.join(sums[0])) == 9.0 + 1e-9 + 1.0 / 3.0
    (np.True_, True)
    """

    top: int
    """No number is 2^top or more."""
    bits: int
    """Of a digit."""

    @classmethod
    def of(cls, marks: Array, *, terms: int) -> Digits:
        """Return the digits for numbers of which all ranks' `mark_of` were summed.

        Args:
            marks: The sums.
            terms: How many numbers a sum has, at most, over all ranks.
        """
        found = np.flatnonzero(marks)
        top = _LEAST + _STEP * (int(found[-1]) + 1) if found.size else 0
        return cls(top, max(_EXACT - max(terms, 1).bit_length(), 1))

    @property
    def count(self) -> int:
        """How many digits a number has."""
        return -(-_COVERED // self.bits)

    def split(self, values: Array) -> Iterator[Array]:
        """Yield each digit of all numbers, the highest first."""
        rest = np.ldexp(values, self.bits - self.top)
        for _ in range(self.count):
            digit = np.floor(rest)
            yield digit
            rest -= digit
            rest *= 2.0**self.bits

    def square_sums(self, array: Array) -> Array:
        """Return the sums of each digit of the squares."""
        return np.array([digit.sum() for digit in self.split(np.square(array, dtype=np.float64))])

    def join(self, sums: Array) -> Array:
        """Return the numbers that sums of digits stand for."""
        total = np.zeros(sums.shape[1:])
        for at in reversed(range(self.count)):  # the smallest first
            total = total + np.ldexp(sums[at], self.top - self.bits * (at + 1))
        return total


def largest_square(arrays: Iterable[Array]) -> float:
    """Return the largest square of any element; 0.0 if there is none."""
    return max((float(np.abs(array).max()) for array in arrays if array.size), default=0.0) ** 2


def mark_of(largest: float) -> Array:
    """Return an array with a 1 where the exponent of ``largest`` belongs: of sums over ranks the last mark is the max.

    >>> int(np.flatnonzero(mark_of(1.0) + mark_of(2.0**40))[-1]) == int(np.flatnonzero(mark_of(2.0**40))[0])
    True
    """
    marks = np.zeros(MARKS)
    if largest > 0.0:
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 1024
        marks[max(exponent - 1 - _LEAST, 0) // _STEP] = 1.0
    return marks


def sums_of(parts: Sequence[Array], summation: Summation) -> Array:
    """Return the sums over several parts, given those of each."""
    return np.array([math.fsum(column) for column in zip(*parts, strict=True)]) if parts else np.zeros(summation.count)
