"""`Careful`: a compute that is not called again once it has failed; what was queued behind it raises the same.

So no chunk is computed after one that failed, although all of them may have been queued before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Careful"]


class Careful:
    """A compute for a stream, of which nobody knows when it is called.

    Args:
        compute: Called as ``compute(number, array, array, …)``.
    """

    def __init__(self, compute: Callable[..., object]) -> None:
        self._compute = compute
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether it has."""
        return self._failure is not None

    def call(self, number: int, arrays: list[Any]) -> Callable[[], None]:
        """Return the work for one chunk. The stream holds it, and so the arrays, until the GPU is done."""

        def work() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                self._compute(number, *arrays)
            except BaseException as error:
                self._failure = error
                raise

        return work
