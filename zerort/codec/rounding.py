"""`Stochastic`: how values are rounded up or down by chance, alike on every machine and every number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zerort.errors import CallError

__all__ = ["Stochastic"]

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Stochastic:
    """Round up with the probability of what rounding down loses: the mean of many roundings is the value.

    The chance of an element depends on these three numbers and the element's global index, on nothing else.

    Args:
        seed: The run's.
        update: Number of the update, so that errors of successive updates are independent.
        sender: Virtual shard or rank that encodes, so that the errors of a sum are independent.
    """

    seed: int
    update: int = 0
    sender: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "update", "sender"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _WORD:
                raise CallError(f"Expected {name} to be a whole number from 0 to 2**64 - 1, got {value!r}.")

    @property
    def keys(self) -> tuple[int, int]:
        """Two numbers of 32 bits: what the kernels take.

        >>> Stochastic(7, update=3).keys == Stochastic(7, update=3).keys != Stochastic(7, update=4).keys
        True
        """
        state = 0
        for number in (self.seed, self.update, self.sender):
            state = _mixed((state ^ number) + 0x9E3779B97F4A7C15 & _WORD)
        return state & 0xFFFFFFFF, state >> 32


def _mixed(word: int) -> int:
    """Return 64 bits of which each depends on every bit of ``word``."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
