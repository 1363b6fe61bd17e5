"""`Share`: this rank's parts of a batch, as ranges of it.

    Share(parts=3, mine=range(1, 2))                        7 samples    ├ 3 ┼[2]┼ 2 ┤       as even as can be
    Share(parts=3, mine=range(1, 2), weights=(1, 2, 4))     7 samples    ├1┼[2]┼ 4 ┤         by capacity
    Share(parts=8, mine=(2, 5, 5))                          leaves 2 and 5 of 8, whole, the last one twice

Even parts are those of `numpy.array_split`, the larger ones first. So ``np.array_split(indices, rt.micro_steps)`` of a
rank's leaves, in order, gives the very leaves, whichever rank has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerort.errors import CallError

__all__ = ["Share", "check_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which of a batch's parts are this rank's.

    >>> Share(parts=3, mine=range(3), weights=(1, 2, 4)).of(7)
    [(0, 1), (1, 3), (3, 7)]
    """

    parts: int
    """Into how many parts a batch is cut."""

    mine: Sequence[int]
    """Which of them are this rank's, in order."""

    weights: tuple[float, ...] | None = None
    """How large each part is, in proportion; None: alike."""

    def of(self, count: int) -> list[tuple[int, int]]:
        """Return where each of this rank's parts of ``count`` samples begins and ends."""
        return [(self._bound(count, part), self._bound(count, part + 1)) for part in self.mine]

    def _bound(self, count: int, part: int) -> int:
        if self.weights is None:
            each, larger = divmod(count, self.parts)
            return part * each + min(part, larger)
        return round(count * (math.fsum(self.weights[:part]) / math.fsum(self.weights)))


def check_weights(weights: Sequence[float], *, parts: int, what: str) -> tuple[float, ...]:
    """Return the weights of parts, or raise if they are not as many as ``parts``, negative, or all zero.

    Args:
        weights: How large each part is, in proportion.
        parts: How many there have to be.
        what: What to call them.
    """
    numbers = tuple(weights) if isinstance(weights, Sequence) and not isinstance(weights, str) else ()
    good = all(isinstance(one, (int, float)) and math.isfinite(one) and one >= 0 for one in numbers)
    if len(numbers) != parts or not good or not math.fsum(numbers) > 0:
        raise CallError(
            f"Expected {what} to be {parts} numbers of at least 0, one for each rank, not all 0; got {weights!r}."
        )
    return numbers
