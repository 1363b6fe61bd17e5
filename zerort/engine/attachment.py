"""`Attachment`: what a binding hangs on a runtime, to be asked before a step and told after it. Imports nothing."""

from __future__ import annotations

from typing import Literal, Protocol

__all__ = ["Attachment"]


class Attachment(Protocol):
    """Collects gradients for units of a runtime on its own, as a framework makes them ready."""

    def complete(self, verb: Literal["step", "discard"]) -> None:
        """Reduce what is not reduced yet: gradients are about to be used, or dropped. Every rank is asked at once."""

    def forget(self) -> None:
        """Start anew: the step is over, done or not."""
