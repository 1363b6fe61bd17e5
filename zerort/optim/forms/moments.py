"""`Blocks`: moments in 8 bits as an update gets them; `INT8`, their format; how they are rounded.

    block    256 elements as 260 bytes: the largest magnitude, and a logarithmic code for each element
    rounding by chance, so that small changes add up; the chance depends on the update and the global index alone

The code is defined in `native.reference.moments`. Tensors of fewer than `LEAST_NUMEL` elements are kept in float32.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from zerort.codec.rounding import Stochastic
from zerort.native.reference.moments import MOMENT_BLOCK, MOMENT_NBYTES
from zerort.optim.optimizer import StateFormat
from zerort.typing import Array

__all__ = ["INT8", "LEAST_NUMEL", "Blocks", "format_of", "rounding_keys"]

INT8: Final = StateFormat(name="int8", numel=MOMENT_BLOCK, nbytes=MOMENT_NBYTES)

LEAST_NUMEL: Final = 4096
"""Elements of the smallest tensor whose moments are coded: biases and norms are few, and sensitive."""


class Blocks(NamedTuple):
    """Whole blocks of one kind of state."""

    payload: Array
    """1-D, uint8."""
    start: int
    """Index of the first element, the same however the tensor is cut."""


def format_of(moments: str, shape: tuple[int, ...]) -> StateFormat | None:
    """Return the format of a tensor's moments; None: float32."""
    return INT8 if moments == "int8" and math.prod(shape) >= LEAST_NUMEL else None


def rounding_keys(step: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how the two moments of an update are rounded: independently of each other and of other updates."""
    return Stochastic(0, update=step, sender=0).keys, Stochastic(0, update=step, sender=1).keys
