"""`GatherOrder`: remembers in which order units were gathered, and says which come next.

The first step is watched; from the second on, the order of the step before is the forecast. A gather that was not
foreseen is looked for further on, so that a branch that was not taken costs one late gather, not the whole step's. It
depends on nothing but the program's own order, so all ranks foresee the same. Imports nothing of zerort.
"""

from __future__ import annotations

__all__ = ["GatherOrder"]


class GatherOrder:
    """The order of gathers in the last step, and where this step stands in it.

    >>> order = GatherOrder(ahead=1)
    >>> [order.note(name) for name in ("a", "b", "b", "a")]
    [[], [], [], []]
    >>> order.end_step()
    >>> [order.note(name) for name in ("a", "b", "b", "a")]
    [['b'], ['b'], ['a'], []]
    """

    def __init__(self, *, ahead: int) -> None:
        self._ahead = ahead
        self._before: list[str] = []
        self._now: list[str] = []
        self._at = 0  # where in _before the next gather is expected

    def note(self, name: str) -> list[str]:
        """Note that ``name`` is gathered now and return which are expected next."""
        self._now.append(name)
        try:
            self._at = self._before.index(name, self._at) + 1
        except ValueError:
            return []  # not foreseen: stay where we were
        return self._before[self._at : self._at + self._ahead]

    def end_step(self) -> None:
        """Make this step's order the forecast for the next."""
        if self._now:
            self._before, self._now = self._now, []
        self._at = 0
