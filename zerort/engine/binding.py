"""`Attachment`: what a framework binding adds to a runtime: asked before each step, told after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from zerort.engine.step.record import Record

if TYPE_CHECKING:
    from zerort.checkpoint import Value

__all__ = ["Attachment", "within"]


class Attachment:
    """What a framework needs beside units: gradients that it makes ready on its own, values of its own.

    Every rank has the same attachments, in the same order. Override what there is to do.
    """

    def around(self) -> AbstractContextManager[object]:
        """Return what the runtime's verbs run within, for a framework that has a current stream of its own."""
        return nullcontext()

    def complete(self, verb: Literal["step", "discard"]) -> None:
        """Reduce what is not reduced yet: gradients are about to be used, or dropped. Every rank is asked at once."""

    def agree(self, record: Record) -> None:
        """Add facts to those that all ranks exchange before a step: ``record.add("mine", count, "sum", then=take)``."""

    def forget(self) -> None:
        """Start anew: the step is over, done or not."""

    def nonfinite_hint(self) -> str:
        """Return a cause of NaN in gradients that this framework alone has, as a sentence; the same on every rank."""
        return ""

    def values(self, *, loading: bool = False) -> Iterable[Value]:
        """Return what a checkpoint holds beside units, or is loaded into, cut over the ranks that share the model.

        Args:
            loading: Whether values will be loaded into it, for `take_loaded`.
        """
        return ()

    def take_loaded(self) -> None:
        """Use what was loaded into what ``values(loading=True)`` returned last. Every rank is asked at once."""


@contextmanager
def within(attachments: Iterable[Attachment]) -> Iterator[None]:
    """Enter what every attachment wants a verb to run within."""
    with ExitStack() as stack:
        for one in attachments:
            stack.enter_context(one.around())
        yield
