"""`discard_gradients`: a step's gradients are dropped, all of them on all ranks."""

from __future__ import annotations

from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.engine.step.copies import reduced_alike

__all__ = ["discard_gradients", "forget_gradients"]


def discard_gradients(context: Context, units: Units) -> None:
    """Drop this step's gradients, as if `reduce` had not been called. Every rank calls this."""
    for one in context.run.attachments:
        one.complete("discard")
    if reduced_alike(context, units):
        units.wait_for_reductions()
    context.tiers.cancel_prefetch()
    forget_gradients(context, units)


def forget_gradients(context: Context, units: Units) -> None:
    """Start a new step's gradients. No communication: the last ones have arrived, or failed."""
    units.forget_gradients()
    for one in context.run.attachments:
        one.forget()
    context.slots.trim()
