"""How far two computations of the same numbers may be apart, derived from how floating-point numbers round.

    bits        where the order of sums is fixed: compare bytes, nothing of this file
    OVER_STEPS  training in float64, over steps
    rounding    one pass over data, such as the first step of a training, in any precision

**One pass.** Let u be half the distance from 1 to the next number. A value that goes through n roundings is off by at
most a factor (1 + u)^n, about n·u; roundings go up and down, so λ·√n·u is exceeded with a probability of at most
2·exp(-λ²/2) (Higham and Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis"), which for λ = 8 is
3e-14. Two computations are off on either side: 2·λ·√n·u. Where terms cancel, that is relative to the sum of their
magnitudes; `condition` is how many times larger that is than the sum.

**Over steps.** An update passes a difference on, and training is chaotic: differences grow by a factor per step that no
formula gives. AdamW may even turn noise into a whole step: where a gradient is nothing but rounding, its update is
lr·g/(|g| + eps), which is about lr for g of 1e-8, float32's noise, but lr·1e-8 for g of 1e-16, float64's. So float32
over steps says how a CPU sums, and is not compared. In float64 u is 1e-16: OVER_STEPS leaves a factor of a million to
20 steps, and is still five orders below what any wrong sum, scale or update gives (decision 0063).
"""

from __future__ import annotations

import math
from typing import Final

import ml_dtypes

from zerort.native.dtypes import numpy_dtype

__all__ = ["OVER_STEPS", "rounding"]

OVER_STEPS: Final = 1e-10
"""Relative difference of losses and parameters over up to 20 steps of training in float64."""

_LAMBDA: Final = 8.0


def rounding(dtype: str, roundings: int, *, condition: float = 1.0) -> float:
    """Return how far two computations in ``dtype`` may be apart, relative to the result.

    Args:
        dtype: What is computed in.
        roundings: How many follow each other on the longest way from an input to the result: terms of sums, mostly.
        condition: Sum of the magnitudes of what is added, over the magnitude of its sum.

    >>> f"{rounding('float32', 100):.0e} {rounding('float64', 100):.0e}"
    '1e-05 2e-14'
    """
    unit = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) / 2  # type: ignore[no-untyped-call]
    return 2 * _LAMBDA * math.sqrt(roundings) * unit * condition
