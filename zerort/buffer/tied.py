"""`TiedRange`: gradients of a tied tensor, reduced into its range of the sum of the unit that holds it."""

from __future__ import annotations

from zerort.buffer.bucket import GradientBucket
from zerort.buffer.sinks import ReduceInto
from zerort.device import Ticket
from zerort.typing import Array

__all__ = ["TiedRange"]


class TiedRange:
    """A tensor's range in the sum of the bucket that holds it: the sink of another unit's gradients of it.

    Args:
        home: The bucket that holds the tensor.
        within: Which elements of this rank's range are the tensor's.
    """

    array = None
    nbytes = 0
    sums_copies = False

    def __init__(self, home: GradientBucket, within: slice) -> None:
        self._home = home
        self._within = within

    def put(self, reduce_into: ReduceInto, *, within: slice | None = None) -> Ticket[Array]:
        """Add a reduction to the sum; see `GradientSink.put`."""
        assert within is None
        return self._home.reduce_within(reduce_into, self._within)

    def total(self, summed: Array, *, name: str) -> Array:
        """Return what was summed; see `GradientSink.total`."""
        return summed

    def reset(self) -> None:
        """Do nothing: the sum is the other bucket's."""
