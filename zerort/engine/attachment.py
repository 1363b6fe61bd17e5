"""`Attachment`: what a framework binding adds to a runtime: asked before each step, told after it.

announce   each attachment adds facts of this rank            nothing is exchanged yet
exchange   all facts of all attachments at once               one small all_gather, none without facts
complete   each attachment does what the facts ask for        the same on every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import numpy as np

from zerort.comm import Group
from zerort.engine.step.facts.record import Record
from zerort.errors import UnitStateError
from zerort.typing import Array

if TYPE_CHECKING:
    from zerort.checkpoint import Value

__all__ = ["Attachment", "Verb", "complete_all", "within"]

Verb = Literal["step", "discard"]
"""What a step's gradients are completed for."""


class Attachment:
    """What a framework needs beside units: gradients that it makes ready on its own, values of its own.

    Every rank has the same attachments, in the same order. Override what there is to do.
    """

    def around(self) -> AbstractContextManager[object]:
        """Return what the runtime's verbs run within, for a framework that has a current stream of its own."""
        return nullcontext()

    def announce(self, verb: Verb, record: Record) -> None:
        """Add facts that all ranks exchange before `complete`: ``record.add("mine", count, "sum", then=take)``.

        Args:
            verb: What becomes of the gradients: a step uses them, or they are dropped.
            record: What is exchanged.
        """

    def complete(self, verb: Verb) -> None:
        """Reduce what is not reduced yet, as all ranks' facts say. Every rank is asked at once."""

    def agree(self, record: Record) -> None:
        """Add facts to the step's own agreement, which comes when all gradients are reduced; see `announce`."""

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


def complete_all(group: Group, attachments: Iterable[Attachment], verb: Verb) -> None:
    """Complete a step's gradients, after one agreement of all attachments. Every rank calls this."""
    record = Record()
    for one in attachments:
        one.announce(verb, record)
    if record:
        record.add("discard", verb == "discard", "each", then=_expect_one_verb)
        record.exchange(group, name="attachments")
    for one in attachments:
        one.complete(verb)


def _expect_one_verb(drops: Array) -> None:
    """Raise if some ranks drop the gradients that others take a step with; on every rank."""
    ranks = np.flatnonzero(drops)
    if 0 < len(ranks) < len(drops):
        raise UnitStateError(
            f"Expected all ranks to take a step, or to drop its gradients, got rank {', '.join(map(str, ranks))} of "
            f"{len(drops)} to drop them. Call rt.discard_gradients() on every rank. An optimizer's zero_grad() does so "
            "on a rank that has gradients, or where it was called since the last step."
        )
