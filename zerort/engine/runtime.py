"""`Runtime`: the one owner of a model's parameters, gradients and optimizer state. `zerort.open` makes one.

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:
        block = rt.register("block0", params)        params → flat buffer → shards
        with block.gathered() as p: …                gather → compute → release
        block.reduce(gradients)                      reduce-scatter, while the caller computes on
        report = rt.step()                           shards updated

A door: verbs and checks. `Unit` gathers and reduces, `step/step.py` is the step, `persist/` are checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerort import forks
from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.engine.binding import Attachment, within
from zerort.engine.context import Context
from zerort.engine.mesh import Mesh
from zerort.engine.model.gather import wait_for_gathers
from zerort.engine.model.prefetch import Prefetcher
from zerort.engine.model.registration import register_unit
from zerort.engine.model.tensors import Frozen, TensorSpec
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.options import RuntimeOptions
from zerort.engine.report import MemoryReport, Restored, StepReport
from zerort.engine.sizing.counted import memory_of
from zerort.engine.sizing.planner import announce
from zerort.engine.step.discard import discard_gradients
from zerort.engine.step.step import take_step
from zerort.engine.stopping import unbroken
from zerort.errors import ZerortError
from zerort.optim import Optimizer, ParameterGroup, warn_of_unmatched
from zerort.typing import Array, Device

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Runtime"]


class Runtime:
    """Owns a model's parameters, gradients and optimizer state on this rank. Every rank has one and calls it alike.

    Args:
        mesh: The ranks; closed with the runtime.
        plan: What lives where; with a budget, only how it lies over the ranks.
        budget: How much there is of each memory, instead of the plan's tiers.
        optimizer: How parameters are updated.
        param_groups: Other settings for some of them.
        options: How it trains.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        plan: Plan,
        budget: Budget | None = None,
        optimizer: Optimizer,
        param_groups: Sequence[ParameterGroup] = (),
        options: RuntimeOptions,
    ) -> None:
        self.units = Units()
        self.context = Context.build(
            mesh,
            plan=plan,
            budget=budget,
            optimizer=optimizer,
            param_groups=tuple(param_groups),
            options=options,
            prefetcher=Prefetcher(self.units, ahead=options.prefetch),
        )
        mesh.world.standing.updates = 0
        self._stepped = False
        forks.follow(self)

    # -- who and what ----------------------------------------------------------------------------------------------

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
    def micro_batches(self) -> range:
        """Which of a step's `micro_batch_count` micro-batches this rank computes, in order.

        One `Unit.reduce` of every unit for each of them, then a `step`.
        """
        return range(self.rank * self.micro_steps, (self.rank + 1) * self.micro_steps)

    @property
    def micro_batch_count(self) -> int:
        """How many micro-batches a step has, over all ranks."""
        return self.size * self.micro_steps

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss (or its gradient) by before backward; 1.0 without loss scaling."""
        return self.context.loss_scale

    @property
    def attachments(self) -> list[Attachment]:
        """Bindings that collect gradients on their own; asked before every step, and told after it."""
        return self.context.run.attachments

    # -- the verbs -------------------------------------------------------------------------------------------------

    def expect(
        self,
        units: Mapping[str, Mapping[str, Array | TensorSpec]],
        *,
        frozen: Frozen | Mapping[str, Frozen] = False,
        tied_owners: Collection[str] = (),
    ) -> None:
        """Announce units that will be registered, so that a budget is shared out over all of them at once.

        Only with `Plan.fit` does this do anything. A unit that nobody has announced gets of what is left when it is
        registered: then the first units rest highest, instead of the hottest parts of all. Every rank calls this.

        Args:
            units: Tensors by name, by unit, as they will be registered; values are not looked at. One array under two
                names counts once. A `TensorSpec` does not say that: name what will be one array only once.
            frozen: Which parameters take no gradient: in all of these units, or by unit.
            tied_owners: Names of units that others will be tied to: they keep whole gradients.

        Raises:
            PlanError: They do not fit into the budget; on every rank.
        """
        self.context.check_open("expect")
        announce(self.world, self.context.planner, units, frozen=frozen, tied_owners=tied_owners)

    def register(
        self,
        name: str,
        params: Mapping[str, Array | TensorSpec],
        *,
        frozen: Frozen = False,
        ties: Mapping[str, tuple[Unit, str]] | None = None,
        broadcast: bool = False,
    ) -> Unit:
        """Take parameters over: copy them into flat buffers that lie and rest as the plan says. Every rank calls this.

        Args:
            name: What the unit is called; unique.
            params: Arrays by name, the same on every rank, or `TensorSpec` for values that will be loaded. One array
                under two names is one parameter (tied).
            frozen: Which take no gradient: all (True), names by glob patterns, or a callable.
            ties: Parameters that another unit holds: ``{"w": (embedding, "table")}``. Gathered with this unit, too;
                gradients of both are summed.
            broadcast: Take rank 0's values instead of checking that all ranks have the same.

        Raises:
            CallError: A name or a value cannot be used, or differs between ranks; on every rank.
        """
        self.context.check_open("register")
        with unbroken("register", self.mesh.groups):
            unit = register_unit(
                self.context, self.units, name, params, frozen=frozen, ties=ties or {}, broadcast=broadcast
            )
        self.units[name] = unit
        return unit

    def step(self, *, progress: Any = None) -> StepReport:
        """Sum what is left to sum, update every parameter that has a gradient, and say what happened.

        Args:
            progress: What `save` takes, for a runtime that keeps its last step.

        Raises:
            UnitStateError: Gradients are missing, or a unit is still gathered; on every rank.
            NonFiniteError: A gradient holds NaN or infinity (``nonfinite="raise"``, no loss scaling); on every rank.
                Nothing was updated.
            StopRequested: The last report's ``stop`` was true; on every rank. Nothing was updated.
            StorageError: A disk failed, or is full; on every rank. `resume` goes back to the last step that was kept:
                the one before, or this one if nothing but tidying up was left to do.
        """
        self.context.check_whole("step")
        self.context.stopping.check()
        if not self._stepped and self.rank == 0:
            shapes = {e.name: e.shape for section in self.units.trained_sections() for e in section.layout.extents}
            warn_of_unmatched(self.context.param_groups, shapes)
        self._stepped = True
        with unbroken("step", self.mesh.groups), within(self.attachments):
            return take_step(self.context, self.units, progress=progress)

    def discard_gradients(self) -> None:
        """Forget this step's gradients, as if `reduce` had not been called. Every rank calls this."""
        self.context.check_open("discard_gradients")
        with within(self.attachments):
            discard_gradients(self.context, self.units)

    def save(self, path: str | Path, *, progress: Any = None) -> Path:
        """Write a checkpoint: all or nothing; what was at ``path`` before stays until the new one is complete.

        Args:
            path: A directory that all ranks see.
            progress: What this rank needs to go on, as JSON can carry it: the position in the data, a generator's
                ``rng.bit_generator.state``. `load` gives it back.

        Returns:
            The directory.
        """
        from zerort.engine.persist.saving import save  # here: checkpoints take their time to import

        self.context.check_whole("save")
        with unbroken("save", self.mesh.groups), within(self.attachments):
            return save(self.context, self.units, path, progress=progress)

    def load(self, path: str | Path, *, optimizer: bool = True, strict: bool = True) -> Restored:
        """Read a checkpoint, of any number of ranks and any plan, into the registered units.

        Args:
            path: What `save` was given.
            optimizer: Also read the optimizer's state, the count of updates and the loss scale.
            strict: Refuse a checkpoint that holds more tensors than are registered.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer; on every rank.
        """
        from zerort.engine.persist.saving import load

        self.context.check_open("load")
        with unbroken("load", self.mesh.groups), within(self.attachments):
            return load(self.context, self.units, path, optimizer=optimizer, strict=strict)

    def resume(self) -> Restored | None:
        """Go back to the last step that was kept (`last_step`), of this run or of the one before; None: there is none.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer; on every rank.
        """
        from zerort.engine.persist.last_step import resume

        self.context.check_open("resume")
        with unbroken("resume", self.mesh.groups), within(self.attachments):
            return resume(self.context, self.units)

    def memory(self) -> MemoryReport:
        """Return how many bytes this rank holds, counted from its arrays."""
        return memory_of(self.context, self.units)

    # -- open and closed -------------------------------------------------------------------------------------------

    def complain(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on as they do, and why."""
        self.context.complain(error)

    def disown(self) -> None:
        """In a forked child: be closed. What is there is its parent's, which goes on with it."""
        self.context.run.is_closed = self.context.run.is_inherited = True

    def close(self) -> None:
        """Finish what is under way and give everything back. Closing twice is fine; other verbs then raise."""
        context = self.context
        if context.run.is_closed:
            return
        context.run.is_closed = True
        try:
            with contextlib.suppress(ZerortError):  # it was raised where it belonged, or nobody asked
                self.units.wait_for_reductions()
            with contextlib.suppress(ZerortError):
                wait_for_gathers(context, self.units.trained_sections())
            self.units.close()
            context.slots.close()
        finally:
            self.units.clear()
            context.run.attachments.clear()
            with contextlib.ExitStack() as stack:  # whatever fails, the rest is closed, too
                stack.callback(context.stopping.end)
                stack.callback(context.mesh.close)
                stack.callback(context.host.close)
                stack.callback(context.tiers.close)
                stack.callback(context.stage.close)
                stack.callback(context.run.release_lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        context = self.context
        if context.run.is_inherited:
            return
        self.world.standing.take_exit(error)
        if kind is None:
            self.close()
        else:  # what the ranks have under way may never end: leave the memory to the group, and go
            context.run.is_closed = True
            try:
                context.mesh.close()  # first: the others may wait for this rank
            finally:
                context.run.release_lease()
                context.stopping.end(again=False)
                with contextlib.suppress(ZerortError):  # of a GPU that cannot go on
                    context.stage.close()
                context.tiers.close()
                context.tiers.wait_for_others()
                context.host.close()

    def __repr__(self) -> str:
        context = self.context
        state = "closed" if context.run.is_closed else f"{len(self.units)} units, {self.updates} updates"
        plan = context.plan.describe(gpus=not context.device.in_host_memory)
        return f"Runtime(rank {self.rank} of {self.size}, {context.budget or plan}, {state})"
