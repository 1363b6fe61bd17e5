"""How a runtime ends: `close` finishes what is under way, `abandon` leaves it, after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerort.engine.context import Context
from zerort.engine.model.gather import wait_for_gathers
from zerort.engine.model.units import Units
from zerort.errors import ZerortError

if TYPE_CHECKING:
    from zerort.publish import Feed

__all__ = ["abandon", "close"]


def close(context: Context, units: Units, feeds: Sequence[Feed]) -> None:
    """Finish what is under way and give everything back. Every rank calls this."""
    context.run.is_closed = True
    try:
        with contextlib.suppress(ZerortError):  # it was raised where it belonged, or nobody asked
            units.wait_for_reductions()
        with contextlib.suppress(ZerortError):
            wait_for_gathers(context, units.trained_sections())
        units.close()
        context.slots.close()
    finally:
        units.clear()
        context.run.attachments.clear()
        with contextlib.ExitStack() as stack:  # whatever fails, the rest is closed, too
            stack.callback(context.stopping.end)
            stack.callback(context.mesh.close)
            stack.callback(context.host.close)
            stack.callback(context.close_storage)
            stack.callback(context.staging.close)
            stack.callback(context.run.release_lease)
            for feed in feeds:
                stack.callback(feed.close)


def abandon(context: Context, feeds: Sequence[Feed]) -> None:
    """Give back what is this rank's own, and wait for nothing that all ranks do: it may never end.

    Memory that ranks share is left to the group.
    """
    context.run.is_closed = True
    try:
        context.mesh.close()  # first: the others may wait for this rank
    finally:
        context.run.release_lease()
        for feed in feeds:
            feed.close()
        context.stopping.end(again=False)
        with contextlib.suppress(ZerortError):  # of a GPU that cannot go on
            context.staging.close()
        context.close_storage()
        context.storage.wait_for_others()
        context.host.close()
