"""`discard_gradients`: a step's gradients are dropped, all of them on all ranks."""

from __future__ import annotations

from zerort.engine.attachment import complete_all
from zerort.engine.context import Context
from zerort.engine.model.gather import end_step_of_gathers
from zerort.engine.model.units import Units
from zerort.engine.step.copies import reduced_alike
from zerort.engine.step.facts.record import Record
from zerort.errors import ZerortError

__all__ = ["discard_gradients", "forget_gradients"]


def discard_gradients(context: Context, units: Units, *, keeps_batch: bool = False) -> None:
    """Drop this step's gradients, as if `reduce` had not been called. Every rank calls this.

    With ``Wire(feedback=True)`` residuals stay as its reductions have left them, unless steps may be skipped: then they
    are as before.

    Args:
        context: The runtime's.
        units: Of the runtime.
        keeps_batch: Whether this rank has none, and would go on with its batch of `Runtime.join`. If all ranks would,
            they do.
    """
    try:
        complete_all(context.world, context.run.attachments, "discard")
    except ZerortError:
        forget_gradients(context, units)  # as a step that fails does
        raise
    if reduced_alike(context, units):
        units.wait_for_reductions()
    context.update_stream.cancel_prefetch()
    forget_gradients(context, units)
    end_step_of_gathers(context, is_discarded=True)  # ranks have met: they gather alike again
    join = context.run.join
    if join.pulled:  # the loop goes on to its next batch, as after a step
        record = Record()
        record.add("more", join.has_more, "or")
        record.add("keeps batch", keeps_batch, "and")
        heard = record.exchange(context.world, name="discard")
        if heard["keeps batch"][0]:
            return
        join.anyone = bool(heard["more"][0])
    join.end_step()


def forget_gradients(context: Context, units: Units) -> None:
    """Start a new step's gradients. No communication: the last ones have arrived, or failed."""
    units.forget_gradients()
    for one in context.run.attachments:
        one.forget()
    context.slots.trim()
