"""`refresh`: after an update, every rank sees the parameters that all of them have written."""

from __future__ import annotations

from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.residence.copied import announce_changes
from zerort.layout import Collective, Placement, transition

__all__ = ["refresh"]


def refresh(context: Context, sections: list[Section]) -> None:
    """Let every rank see what all of them have written."""
    if transition(context.plan.state.placement, to=context.plan.parameter.placement) is Collective.ALL_GATHER:
        for section in sections:
            if section.parameter_placement is Placement.SHARDED:
                continue  # a table: whoever gathers its rows asks their owners
            section.parameters.changed()
            section.parameters.start()  # travels while the next step begins; its first gather waits for it
    elif context.plan.parameter.placement is Placement.SHARDED:
        for section in sections:
            section.parameters.changed()
        announce_changes(context.mesh.shard, [section.parameters for section in sections], traffic=context.ledger.moved)
        if not context.mesh.shard.one_memory:
            return
        # not-gpu: ranks that share memory
        context.mesh.shard.barrier(name="refresh").wait()  # one for all units: their gathers need none any more
