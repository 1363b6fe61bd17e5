"""`Sparsity`: how many elements of a tensor are pruned by when, and in which pattern; how a mask is kept.

    zr.ParameterGroup("*.weight", sparsity=zr.Sparsity(0.5, start=100, end=1000))

    update    …  99 │ 100 ────────────── 1000 │ 1001 …
    pruned       0  │ more and more, cubic    │ 0.5

A mask is one kind of optimizer state: a bit per element, set where it is pruned (decision 0151).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from zerort.errors import CallError
from zerort.optim.forms import masks
from zerort.typing import is_on_gpu

__all__ = ["MASK", "Sparsity", "check_sparsity", "masks_for"]

MASK: Final = "mask"
"""What the state is called."""

_EVENTS: Final = 100
"""How often a tensor is pruned from start to end, at most: each time all ranks look for the smallest elements."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Which share of a tensor's elements is zero, from when on. Those with the smallest magnitudes are chosen.

    >>> Sparsity(0.5, start=100, end=1100).share_at(600)
    0.4375
    """

    share: float
    """The share that is pruned in the end: above 0 and below 1."""

    _: KW_ONLY

    pattern: Literal["2:4"] | None = None
    """``"2:4"``: two of every four neighbours along the last axis, which 4 has to divide. None: any of the tensor."""

    start: int = 1
    """The update that prunes first, from 1."""

    end: int | None = None
    """The update that prunes last; from `start` to there the share grows, fast at first, in at most 100 steps. None:
    all at once."""

    def __post_init__(self) -> None:
        if type(self.share) is not float or not 0 < self.share < 1:
            raise CallError(
                f"Expected the share of a Sparsity to be a float above 0 and below 1, got {self.share!r}. "
                "zr.Sparsity(0.5) prunes half of each tensor."
            )
        if self.pattern not in (None, "2:4"):
            raise CallError(f"Expected pattern to be None or '2:4', got {self.pattern!r}.")
        for name, value, least in (("start", self.start, 1), ("end", self.end, self.start)):
            if not (name == "end" and value is None) and (type(value) is not int or value < least):
                raise CallError(f"Expected {name} of a Sparsity to be an int of at least {least}, got {value!r}.")
        if self.pattern is not None and (self.share != 0.5 or self.end is not None):
            raise CallError(
                f"Expected a share of 0.5, all at once, with pattern='2:4', got {self.share!r} and end={self.end!r}. "
                "zr.Sparsity(0.5, pattern='2:4', start=100)."
            )

    def share_at(self, update: int) -> float:
        """Return the share that is pruned once an update is done."""
        if update < self.start:
            return 0.0
        if self.end is None or update >= self.end:
            return self.share
        passed = (update - self.start) * _EVENTS // (self.end - self.start) / _EVENTS
        return self.share * (1 - (1 - passed) ** 3)

    def count_at(self, update: int, numel: int) -> int:
        """Return how many of ``numel`` elements that is: rounded to the nearest."""
        return round(self.share_at(update) * numel)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that cannot have the pattern.

        Raises:
            CallError: 4 does not divide its last axis, or it has none.
        """
        if self.pattern == "2:4" and (not shape or shape[-1] % 4):
            raise CallError(
                f"Expected a last axis that 4 divides with pattern='2:4', got {name!r} of shape {list(shape)}. Leave "
                "it out of the ParameterGroup, or use pattern=None."
            )


def check_sparsity(value: object) -> None:
    """Raise CallError unless an optimizer can have this for its sparsity."""
    if not isinstance(value, (Sparsity, type(None))):
        raise CallError(f"Expected sparsity to be one such as zr.Sparsity(0.5), got {value!r}.")


def masks_for(array: Any) -> Any:
    """Return the module that decides about masks and applies them where an array lies: `masks`, or `masks_cuda`."""
    if is_on_gpu(array):
        from zerort.optim.forms import masks_cuda

        return masks_cuda
    return masks
