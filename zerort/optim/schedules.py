"""Learning rates over the updates. Any callable from the update's number (from 1) to a number will do; these are usual.

    constant        ──────────      rises over `warmup` updates, if asked to, and stays
    warmup_linear   ╱╲___           rises over `warmup`, falls in a line to `floor` at update `total`
    warmup_cosine   ╱‾╲__           the same, falling along half a cosine

What they return are frozen values: they compare, print and pickle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from zerort.errors import CallError
from zerort.optim.checks import check_count, check_number

__all__ = ["WarmupDecay", "constant", "warmup_cosine", "warmup_linear"]

_SHAPES: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType(
    {
        "none": lambda progress: 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
)
"""What is left of the way from floor to peak, by how much of the decay is done (0 to 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay:
    """A learning rate that rises in a line to its peak and then decays to its floor.

    >>> schedule = WarmupDecay(peak=1.0, warmup=2, total=6, decay="linear")
    >>> [schedule(update) for update in range(1, 8)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    peak: float
    """The rate at update `warmup`."""

    warmup: int = 0
    """Updates that it takes to reach the peak; the first one runs at ``peak / warmup``."""

    total: int = 0
    """The update from which on the rate is `floor`; unless `decay` is ``"none"``."""

    floor: float = 0.0
    """The rate at the end; at most `peak`."""

    decay: str = "cosine"
    """``"cosine"``, ``"linear"`` or ``"none"``."""

    def __post_init__(self) -> None:
        check_number("peak", self.peak)
        check_count("warmup", self.warmup, minimum=0)
        check_number("floor", self.floor)
        if self.floor > self.peak:
            raise CallError(f"Expected floor to be at most peak={self.peak!r}, got {self.floor!r}. Lower it.")
        if self.decay not in _SHAPES:
            raise CallError(f"Expected decay to be one of {', '.join(_SHAPES)}; got {self.decay!r}. Use one of these.")
        if self.decay != "none":
            check_count("total", self.total, minimum=1)
            if self.total < self.warmup:
                raise CallError(
                    f"Expected total to be at least warmup={self.warmup}, got {self.total}. "
                    "It counts all updates, those of the warmup included."
                )

    def __call__(self, update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        if update <= self.warmup:
            return self.peak * update / self.warmup
        span = self.total - self.warmup
        progress = min(1.0, (update - self.warmup) / span) if span > 0 else 1.0
        return self.floor + (self.peak - self.floor) * _SHAPES[self.decay](progress)


def constant(peak: float, *, warmup: int = 0) -> WarmupDecay:
    """Return a schedule that stays at `peak`, after `warmup` updates on the way to it.

    >>> [constant(0.1, warmup=2)(update) for update in (1, 2, 100)]
    [0.05, 0.1, 0.1]
    """
    return WarmupDecay(peak=peak, warmup=warmup, decay="none")


def warmup_linear(peak: float, *, warmup: int, total: int, floor: float = 0.0) -> WarmupDecay:
    """Return a schedule that rises to `peak` at update `warmup` and falls in a line to `floor` at update `total`.

    >>> [warmup_linear(1.0, warmup=1, total=5, floor=0.5)(update) for update in (1, 3, 5, 99)]
    [1.0, 0.75, 0.5, 0.5]
    """
    return WarmupDecay(peak=peak, warmup=warmup, total=total, floor=floor, decay="linear")


def warmup_cosine(peak: float, *, warmup: int, total: int, floor: float = 0.0) -> WarmupDecay:
    """Return a schedule that rises to `peak` at update `warmup` and falls along a cosine to `floor` at update `total`.

    >>> [round(warmup_cosine(1.0, warmup=4, total=8)(update), 3) for update in (1, 4, 6, 8)]
    [0.25, 1.0, 0.5, 0.0]
    """
    return WarmupDecay(peak=peak, warmup=warmup, total=total, floor=floor, decay="cosine")
