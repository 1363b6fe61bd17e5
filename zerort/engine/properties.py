"""`RuntimeProperties`: what a runtime says of itself: its ranks, its device, and how a step is shared out."""

from __future__ import annotations

from collections.abc import Sequence

from zerort.comm import Group
from zerort.engine.attachment import Attachment
from zerort.engine.context import Context
from zerort.engine.mesh import Mesh
from zerort.typing import Device

__all__ = ["RuntimeProperties"]


class RuntimeProperties:
    """What a `Runtime` says of itself. Nothing here communicates."""

    context: Context
    """What all parts of an open runtime share; for bindings."""

    @property
    def rank(self) -> int:
        """This rank's number among all that train together."""
        return self.context.rank

    @property
    def size(self) -> int:
        """How many ranks train together."""
        return self.world.size

    @property
    def world(self) -> Group:
        """All ranks that train together."""
        return self.context.world

    @property
    def group(self) -> Group:
        """All ranks that train together, for collectives of your own."""
        return self.context.world

    @property
    def mesh(self) -> Mesh:
        """Which ranks share shards, and which hold copies."""
        return self.context.mesh

    @property
    def device(self) -> Device:
        """Where gathered parameters and gradients are, and whose arrays loops compute with."""
        return self.context.device

    @property
    def updates(self) -> int:
        """Updates done so far."""
        return self.context.run.updates

    @property
    def micro_steps(self) -> int:
        """Calls of `Unit.reduce` per unit and step, on this rank."""
        return self.context.micro_steps

    @property
    def micro_batches(self) -> Sequence[int]:
        """Which of a step's `micro_batch_count` micro-batches this rank computes, in order: one for each micro-step.

        One `Unit.reduce` of every unit for each of them, then a `step`. With `virtual_shards` that ranks cannot share
        evenly, some repeat their last one: its gradients are dropped, and so is what `mean` is given for it.
        """
        return self.context.micro_batches

    @property
    def micro_batch_count(self) -> int:
        """How many micro-batches a step has, over all ranks."""
        return self.context.micro_batch_count

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss (or its gradient) by before backward; 1.0 without loss scaling."""
        return self.context.loss_scale

    @property
    def attachments(self) -> list[Attachment]:
        """Bindings that collect gradients on their own; asked before every step, and told after it."""
        return self.context.run.attachments
