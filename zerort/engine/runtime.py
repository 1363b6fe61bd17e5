"""`Runtime`: the one owner of a model's parameters, gradients and optimizer state. `zerort.open` makes one.

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:
        block = rt.register("block0", params)        params → flat buffer → shards
        with block.gathered() as p: …                gather → compute → release
        block.reduce(gradients)                      reduce-scatter, while the caller computes on
        report = rt.step()                           shards updated

`Unit` gathers and reduces, `step.py` is the step, `snapshot.py` what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zerort import forks
from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.device import HostDevice
from zerort.engine.binding import Attachment, within
from zerort.engine.context import SectionSetup
from zerort.engine.ledger import Ledger
from zerort.engine.mesh import Mesh
from zerort.engine.model.prefetch import Prefetcher
from zerort.engine.model.registration import register_unit
from zerort.engine.model.slot_set import SlotSet
from zerort.engine.model.tensors import Frozen, TensorSpec
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.options import RuntimeOptions
from zerort.engine.report import MemoryReport, Restored, StepReport
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.stage import Stage
from zerort.engine.residence.tiers import Tiers
from zerort.engine.sizing.planner import Allotment, announce
from zerort.engine.sizing.working import offload_within
from zerort.engine.step.copies import reduced_alike
from zerort.engine.step.step import take_step
from zerort.engine.stopping import Stopping, unbroken
from zerort.errors import ClosedError, ZerortError
from zerort.layout import Placement
from zerort.optim import Optimizer, ParameterGroup, warn_of_unmatched
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerort.checkpoint.lease import Lease

__all__ = ["Runtime"]


class Runtime:
    """Owns a model's parameters, gradients and optimizer state on this rank. Every rank has one and calls it alike.

    Args:
        mesh: The ranks; closed with the runtime.
        plan: What lives where; with a budget, only how it lies over the ranks.
        budget: How much there is of each memory, instead of the plan's tiers.
        optimizer: How parameters are updated.
        groups: Other settings for some of them.
        options: How it trains.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        plan: Plan,
        budget: Budget | None = None,
        optimizer: Optimizer,
        groups: Sequence[ParameterGroup] = (),
        options: RuntimeOptions,
    ) -> None:
        self.mesh = mesh
        self.world = mesh.world
        self.device = mesh.shard.device
        """Where gathered parameters and gradients are, and whose arrays loops compute with."""
        self.plan = plan
        self.budget = budget
        self.optimizer = optimizer
        self.groups = tuple(groups)
        self.options = options
        self.updates = mesh.world.standing.updates = 0
        """Updates done so far."""
        self.is_new = True
        """Whether no step was taken yet, and no other run's state loaded."""
        self.lease: Lease | None = None
        """The right to keep steps in `last_step`, once it was asked for."""
        self.units = Units()
        self.attachments: list[Attachment] = []
        """Bindings that collect gradients on their own; asked before every step, and told after it."""
        self.ledger = Ledger()
        offload = OffloadOptions.from_environment() if options.offload is None else options.offload
        streamed = offload if budget is None else offload_within(budget.memory, offload)
        self.host = HostMemory(mesh.shard)
        """What rests on the host, where computing happens on a GPU."""
        self.tiers = Tiers(mesh.world, scratch=options.scratch, options=streamed, ledger=self.ledger, host=self.host)
        """What rests on a disk."""
        self.allotment: Allotment | None = None
        """What a budget gives to each section."""
        if budget is not None:
            self.allotment = Allotment.build(
                budget,
                mesh,
                plan=plan,
                optimizer=optimizer,
                groups=self.groups,
                options=options,
                offload=offload,
            )
        self._closed = self._stepped = self._is_inherited = False
        forks.follow(self)
        self.stopping = Stopping(f"rank {mesh.world.rank}")
        self.micro_steps = options.micro_steps_of(mesh.world.size)
        """Calls of `Unit.reduce` per unit and step, on this rank."""
        self.scaler = options.make_scaler()
        self.slots = SlotSet.build(mesh.shard)
        self.stage = Stage(self.device, self.host, options=self.tiers.options)
        """Where updates are computed."""
        self.meetings = 0
        """How often all ranks that share slots have met, as far as it matters to who may write to them."""
        self.prefetcher = Prefetcher(self.units, ahead=options.prefetch)
        self.setup = SectionSetup.build(
            mesh.shard,
            options,
            replicas=mesh.replicate,
            plan=plan,
            micro_steps=self.micro_steps,
            slots=self.slots,
            ledger=self.ledger,
            tiers=self.tiers,
            host=self.host,
            tiers_of=None if self.allotment is None else self.allotment.of,
        )

    # -- who and what ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number among all that train together."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many ranks train together."""
        return self.world.size

    @property
    def group(self) -> Group:
        """All ranks that train together, for collectives of your own."""
        return self.world

    @property
    def shards(self) -> range:
        """Which of a step's `shard_count` micro-batches this rank computes, in order.

        One `Unit.reduce` of every unit for each of them, then a `step`.
        """
        return range(self.rank * self.micro_steps, (self.rank + 1) * self.micro_steps)

    @property
    def shard_count(self) -> int:
        """How many micro-batches a step has, over all ranks."""
        return self.size * self.micro_steps

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss (or its gradient) by before backward; 1.0 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def denominator(self) -> int:
        """How many gradients a step averages over; 1 if they are summed."""
        return self.shard_count if self.options.reduction == "mean" else 1

    # -- the verbs -------------------------------------------------------------------------------------------------

    def expect(
        self,
        units: Mapping[str, Mapping[str, Array | TensorSpec]],
        *,
        frozen: Frozen | Mapping[str, Frozen] = False,
        lenders: Collection[str] = (),
    ) -> None:
        """Announce units that will be registered, so that a budget is shared out over all of them at once.

        Only with `Plan.fit` does this do anything. A unit that nobody has announced gets of what is left when it is
        registered: then the first units rest highest, instead of the hottest parts of all. Every rank calls this.

        Args:
            units: Tensors by name, by unit, as they will be registered; values are not looked at. One array under two
                names counts once. A `TensorSpec` does not say that: name what will be one array only once.
            frozen: Which parameters take no gradient: in all of these units, or by unit.
            lenders: Names of units that others will be tied to: they keep whole gradients.

        Raises:
            PlanError: They do not fit into the budget; on every rank.
        """
        self.check_open("expect")
        announce(self.world, self.allotment, units, frozen=frozen, lenders=lenders)

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
        self.check_open("register")
        with unbroken("register", self.mesh.groups):
            unit = register_unit(self, name, params, frozen=frozen, ties=ties or {}, broadcast=broadcast)
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
        self.check_whole("step")
        self.stopping.check()
        if not self._stepped and self.rank == 0:
            shapes = {e.name: e.shape for section in self.units.trained_sections() for e in section.layout.extents}
            warn_of_unmatched(self.groups, shapes)
        self._stepped = True
        with unbroken("step", self.mesh.groups), within(self.attachments):
            return take_step(self, progress=progress)

    def discard_gradients(self) -> None:
        """Forget this step's gradients, as if `reduce` had not been called. Every rank calls this."""
        self.check_open("discard_gradients")
        with within(self.attachments):
            self.complete_attachments("discard")
            if reduced_alike(self):
                self.units.wait_for_reductions()
            self.tiers.unforesee()
            self.forget_gradients()

    def save(self, path: str | Path, *, progress: Any = None) -> Path:
        """Write a checkpoint: all or nothing; what was at ``path`` before stays until the new one is complete.

        Args:
            path: A directory that all ranks see.
            progress: What this rank needs to go on, as JSON can carry it: the position in the data, a generator's
                ``rng.bit_generator.state``. `load` gives it back.

        Returns:
            The directory.
        """
        from zerort.engine.persist.saving import (
            save,  # here: it takes a third of the time that all of zerort takes to import
        )

        self.check_whole("save")
        with unbroken("save", self.mesh.groups), within(self.attachments):
            return save(self, path, progress=progress)

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

        self.check_open("load")
        with unbroken("load", self.mesh.groups), within(self.attachments):
            return load(self, path, optimizer=optimizer, strict=strict)

    def resume(self) -> Restored | None:
        """Go back to the last step that was kept (`last_step`), of this run or of the one before; None: there is none.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer; on every rank.
        """
        from zerort.engine.persist.last_step import resume

        self.check_open("resume")
        with unbroken("resume", self.mesh.groups), within(self.attachments):
            return resume(self)

    def memory(self) -> MemoryReport:
        """Return how many bytes this rank holds, counted from its arrays."""
        sections = list(self.units.sections())
        return MemoryReport(
            parameter=sum(section.parameters.nbytes for section in sections),
            gradient=sum(section.bucket.nbytes for section in sections if section.bucket is not None),
            state=sum(state.nbytes for state in self.units.states()),
            buckets=self.slots.buckets.nbytes + self.slots.summed.nbytes,
            gathered=self.slots.gathered.nbytes,
            gathered_peak=self.slots.gathered.peak_nbytes,
            streaming=self.tiers.memory_nbytes + self.stage.nbytes,
            nvme=self.tiers.resting_nbytes,
        )

    def close(self) -> None:
        """Finish what is under way and give everything back. Closing twice is fine; other verbs then raise."""
        if self._closed:
            return
        self._closed = True
        try:
            for wait in (self.units.wait_for_reductions, self.wait_for_gathers):
                with contextlib.suppress(ZerortError):  # it was raised where it belonged, or nobody asked
                    wait()  # not-gpu: the end: for errors, and for what the lines below give back
            self.units.close()
            self.slots.close()
        finally:
            self.units.clear()
            self.attachments.clear()
            with contextlib.ExitStack() as stack:  # whatever fails, the rest is closed, too
                stack.callback(self.stopping.end)
                stack.callback(self.mesh.close)
                stack.callback(self.host.close)
                stack.callback(self.tiers.close)
                stack.callback(self.stage.close)
                stack.callback(self._release)

    # -- what units and the step need ------------------------------------------------------------------------------

    def complete_attachments(self, verb: Literal["step", "discard"]) -> None:
        """Let bindings reduce what they have collected. Every rank calls this."""
        for one in self.attachments:
            one.complete(verb)

    def forget_gradients(self) -> None:
        """Start a new step's gradients."""
        self.units.forget_gradients()
        for one in self.attachments:
            one.forget()
        self.slots.trim()

    def wait_for_gathers(self) -> None:
        """Wait until no rank reads this one's parameters any more, and all is where it rests: they are to change."""
        self.prefetcher.drop()
        self.stage.finish()  # gpu-wait: a_checkpoint_is_of_what_was_written
        for section in self.units.trained_sections():
            section.parameters.wait()  # gpu-wait: values_are_assigned_behind_a_gather

    def sum_over_shards(self, values: Array) -> Array:
        """Return the sum of every rank's ``values``, if ranks hold different parts of the state."""
        if self.plan.state.placement is Placement.REPLICATED:
            return values
        return self.mesh.shard.all_reduce(values, name="statistics").wait()  # not-gpu: between arrays of the host

    def complain(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on as they do, and why."""
        if not isinstance(error, ClosedError):
            self.mesh.complain(str(error))

    def check_whole(self, verb: str) -> None:
        """Raise if the runtime is closed, or if a disk failed in the middle of an update."""
        self.check_open(verb)
        self.tiers.check_whole(verb)

    def disown(self) -> None:
        """In a forked child: be closed. What is there is its parent's, which goes on with it."""
        self._closed = self._is_inherited = True

    def check_open(self, verb: str) -> None:
        """Raise if the runtime is closed."""
        if self._is_inherited:
            raise forks.inherited(f"a runtime ({verb})")
        if self._closed:
            raise ClosedError(
                f"{verb}: Expected an open runtime, got a closed one. Stay inside `with zerort.open(…):`."
            )

    def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._is_inherited:
            return
        self.world.standing.take_exit(error)
        if kind is None:
            self.close()
        else:  # what the ranks have under way may never end: leave the memory to the group, and go
            self._closed = True
            try:
                self.mesh.close()  # first: the others may wait for this rank
            finally:
                self._release()
                self.stopping.end(again=False)
                with contextlib.suppress(ZerortError):  # of a GPU that cannot go on
                    self.stage.close()
                self.tiers.close()
                self.tiers.wait_for_others()
                self.host.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.units)} units, {self.updates} updates"
        plan = self.plan.describe(gpus=not isinstance(self.device, HostDevice))
        return f"Runtime(rank {self.rank} of {self.size}, {self.budget or plan}, {state})"
