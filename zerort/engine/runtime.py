"""`Runtime`: the one owner of a model's parameters, gradients and optimizer state. `zerort.open` makes one.

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:
        block = rt.register("block0", params)        params → flat buffer → shards
        with block.gathered() as p: …                gather → compute → release
        block.reduce(gradients)                      reduce-scatter, while the caller computes on
        report = rt.step()                           shards updated

The entry point: methods and checks. `Persistence` has those of checkpoints and feeds, `RuntimeProperties` its numbers,
closing.py its end. `Unit` gathers and reduces, `step/step.py` is the step, `persist/` are checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from zerort import forks
from zerort.comm.agreed import gather_json
from zerort.config import Budget, Plan
from zerort.data import Order
from zerort.engine.attachment import within
from zerort.engine.batches.joining import Joining, join
from zerort.engine.batches.means import mean_of
from zerort.engine.batches.taking import Taking, take
from zerort.engine.closing import abandon, close
from zerort.engine.context import Context
from zerort.engine.mesh import Mesh
from zerort.engine.model.prefetch import Prefetcher
from zerort.engine.model.registration import register_unit
from zerort.engine.model.tensors import Frozen, TensorSpec
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.options import RuntimeOptions, accumulation
from zerort.engine.persistence import Persistence
from zerort.engine.report import MemoryReport, Rebalanced, StepReport
from zerort.engine.sizing.counted import memory_of
from zerort.engine.sizing.planner import announce
from zerort.engine.step.discard import discard_gradients
from zerort.engine.step.facts.rates import set_lr
from zerort.engine.step.step import take_step
from zerort.engine.stopping import unbroken
from zerort.optim import Optimizer, ParameterGroup, warn_of_unmatched
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerort.engine.sizing.predicting import Prediction
    from zerort.publish import Feed

__all__ = ["Runtime"]

Batch = TypeVar("Batch")


class Runtime(Persistence):
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
            prefetcher=Prefetcher(
                self.units, ahead=options.prefetch, tells_order=1 < len(set(mesh.shard.hosts)) < mesh.shard.size
            ),
        )
        mesh.world.standing.updates = 0
        self._stepped = False
        self._feeds: list[Feed] = []
        forks.follow(self)

    # -- the verbs -------------------------------------------------------------------------------------------------

    def expect(
        self,
        units: Mapping[str, Mapping[str, Array | TensorSpec]],
        *,
        frozen: Frozen | Mapping[str, Frozen] = False,
        rows: Mapping[str, Sequence[str]] | None = None,
        lazy: bool | Mapping[str, bool] = False,
    ) -> None:
        """Announce units that will be registered, so that a budget is shared out over all of them at once.

        Only with `Plan.fit` does this do anything. A unit that nobody has announced gets of what is left when it is
        registered: then the first units rest highest, instead of the hottest parts of all. Every rank calls this.

        Args:
            units: Tensors by name, by unit, as they will be registered; values are not looked at. One array under two
                names counts once. A `TensorSpec` does not say that: name what will be one array only once.
            frozen: Which parameters take no gradient: in all of these units, or by unit.
            rows: Tables that will be registered with ``rows=``, by unit: ``{"embed": ("table",)}``.
            lazy: The ``lazy=`` that they will be registered with: for all of these units, or by unit.

        Raises:
            CallError: One of them cannot be registered so; on every rank, as from `register`.
            PlanError: They do not fit into the budget, or tables by rows cannot have it; on every rank.
        """
        self.context.check_open("expect")
        context = self.context
        announce(self.world, context.planner, units, frozen=frozen, rows=rows, lazy=lazy, settings=context.row_settings)

    def register(
        self,
        name: str,
        params: Mapping[str, Array | TensorSpec],
        *,
        frozen: Frozen = False,
        ties: Mapping[str, tuple[Unit, str]] | None = None,
        broadcast: bool = False,
        rows: Sequence[str] = (),
        lazy: bool = False,
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
            rows: Tables, rows x width, of which a batch touches few rows: ``unit.gathered(rows=)`` and
                ``unit.reduce(rows=)`` move only these, and only these are updated. The others get the weight decay and
                the fading moments of the updates that they have missed when they are next gathered, so results are
                those of dense updates. Sharded over the ranks under every stage.
            lazy: Rows without a gradient stay as they are instead, moments included, which changes the results; the
                report says so.

        Raises:
            CallError: A name or a value cannot be used, or differs between ranks; on every rank.
            PlanError: Tables are declared as rows that the plan cannot keep so; on every rank.
        """
        self.context.check_open("register")
        with unbroken("register", self.mesh.groups):
            unit = register_unit(
                self.context,
                self.units,
                name,
                params,
                frozen=frozen,
                ties=ties or {},
                broadcast=broadcast,
                rows=rows,
                lazy=lazy,
            )
        self.units[name] = unit
        return unit

    def take(self, order: Order, *, epochs: int | None = 1, shares: Sequence[float] | None = None) -> Taking:
        """Return a loop over this rank's part of each batch: ``for indices in rt.take(order)``. Every rank calls this.

        A step uses up the batch that came last; `save`, `load` and `resume` keep the place, whatever the number of
        ranks. Ranks may get different numbers of indices, or none: ``rt.step(weight=len(indices))``.

        Args:
            order: The samples, the same on every rank.
            epochs: Where to end, counted from the order's beginning, not from this call; None: never.
            shares: How much of a batch each rank takes, in proportion; None: as ``shard_weights``, or alike. With
                ``virtual_shards`` a rank takes whole leaves: ``np.array_split(indices, rt.micro_steps)`` are they.

        Raises:
            CallError: The order is not the one that this run, or the checkpoint that was loaded, has begun; on every
                rank.

        A runtime with ``history=`` warns once if steps of these batches are predicted not to fit into memory.
        """
        self.context.check_open("take")
        taking = take(self.context, order, epochs=epochs, shares=shares)
        if self.context.peaks is not None:
            from zerort.engine.sizing.predicting import warn_unless_fits

            warn_unless_fits(self.context, self.units, batch=taking.batch / self.micro_steps)
        return taking

    def join(self, batches: Iterable[Batch]) -> Joining[Batch]:
        """Return a loop over this rank's batches that ends on all ranks at once. Every rank calls this.

        A rank with fewer batches than others computes its last one again until all are done; its gradients of that are
        dropped, and it counts nothing in weights and in `mean`. One that never had a batch is sent another's first one.
        In the loop's body every rank takes the same steps: one for each batch, or one for every ``micro_steps``, with
        a weight for each then (a rank with one of ``virtual_shards`` fewer than others gets a step's last batch again).
        All leave the loop alike, after a step or before a batch's first gradient.

        Args:
            batches: This rank's; the next one is asked for while one is in use. Their first has to be such that
                `pickle` can send it, if some rank may have none.

        Raises:
            CallError: Some rank's batches cannot be used, or are those of `take`, which all ranks have equally many of;
                on every rank.
        """
        self.context.check_open("join")
        return join(self.context, batches)

    def step(
        self, *, weight: float | Array | Sequence[float | Array] | None = None, progress: Any = None
    ) -> StepReport:
        """Sum what is left to sum, update every parameter that has a gradient, and say what happened.

        Args:
            weight: How many tokens, or samples, this rank's gradients are the sum over, in all of its micro-steps; 0 if
                it has none. A list has a number for each of `micro_batches`, and those that are computed again count
                nothing; where that may happen, it has to be a list. The sum over ranks is divided by that of all
                weights: a mean over tokens, however they are shared out. None, on every rank: each rank and micro-step
                counts alike.
            progress: What `save` takes, for a runtime that keeps its last step.

        Raises:
            CallError: A weight is negative, NaN or infinite, or all are 0, or some rank gave none, or one number where
                a list has to be; on every rank. Nothing was updated.
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
            return take_step(self.context, self.units, weight=weight, progress=progress)

    def mean(self, values: float | Array | Sequence[float | Array]) -> float:
        """Return the mean over all micro-batches of a step, of losses, say. Every rank calls this.

        Args:
            values: One number for each of `micro_batches`, in order; just the number if there is one. Those that are
                computed again do not count: the last leaf of ``virtual_shards``, batches that `join` repeats.

        Raises:
            CallError: There are more or fewer; on every rank.
        """
        self.context.check_open("mean")
        return mean_of(self.context, values)

    def discard_gradients(self) -> None:
        """Forget this step's gradients, as if `reduce` had not been called. Every rank calls this.

        With ``Wire(feedback=True)`` they take with them what they had made up for, unless steps may be skipped
        (``nonfinite="skip"``, a loss scale): what coding has lost is then as it was before (decision 0147).
        """
        self.context.check_open("discard_gradients")
        with within(self.attachments):
            discard_gradients(self.context, self.units)

    def set_lr(self, lr: float | None, *, group: ParameterGroup | None = None) -> None:
        """Set the learning rate by hand, from the next update on. Every rank calls this alike; checkpoints hold it.

        Args:
            lr: The rate; None: what the optimizer, or its schedule, says again.
            group: The parameter group that is meant; None: all parameters but those of groups with a rate of their own.
                Groups with equal settings have one rate.
        """
        self.context.check_open("set_lr")
        set_lr(self.context, lr, group=group)

    @overload
    def rebalance(self, *, shard_weights: Sequence[float] | None) -> Rebalanced: ...
    @overload
    def rebalance(self, mode: Literal["auto"], *, payback_steps: int = 100) -> Rebalanced: ...

    def rebalance(
        self,
        mode: str | None = None,
        *,
        shard_weights: Sequence[float] | None = (),
        payback_steps: int | None = None,
    ) -> Rebalanced:
        """Cut all shards anew: parameters and optimizer state move between the ranks. Every rank calls this.

        Between steps, in memory and on disks, without a checkpoint. Values stay what they are, to the bit: with
        ``virtual_shards`` so does all that follows. Loops of `take` without ``shares=`` follow the new weights from
        their next batch on, those of loaders that run ahead when they begin anew.

        ``"auto"`` chooses shards, and what part of each batch of `take` a rank gets, from each rank's own times since
        the last change and from what its memories have left. It changes what makes a step shorter by 5 % and by more
        than times vary, and moves shards only if that saves more than it costs within ``payback_steps``; or if a memory
        is nearly full. Call it now and then, or when `StepReport.straggler` names a rank; it says what it did, and why.

        Args:
            mode: ``"auto"``, or nothing, with ``shard_weights``.
            shard_weights: How much of every shard each rank takes from now on, as `zerort.open` has it; None: alike.
            payback_steps: Within how many steps a move has to save what it costs; with ``"auto"``, 100 unless given.

        Raises:
            CallError: Weights are negative, NaN or infinite, all 0, or not one for each rank; on every rank.
            UnitStateError: A unit is gathered, or has gradients since the last step; on every rank.
            PlanError: A rank has too little memory for its new shards; on every rank. Nothing was moved.
            StorageError: A disk has too little room, and nothing was moved; or it failed on the way: then all values
                are there as the last update left them, some where they were. Call this again, or go on.
        """
        from zerort.engine.rebalance.auto import check_mode, rebalance_auto  # here: few runs need it
        from zerort.engine.rebalance.recut import recut

        def cut(weights: Sequence[float] | None) -> Rebalanced:
            for feed in self._feeds:
                feed.begin_whole()
            return recut(self.context, self.units, weights)

        self.context.check_whole("rebalance")
        with unbroken("rebalance", self.mesh.groups), within(self.attachments):
            if check_mode(self.world, mode, shard_weights, payback_steps) is None:
                return cut(shard_weights)
            most = 100 if payback_steps is None else payback_steps
            return rebalance_auto(self.context, self.units, payback_steps=most, cut=cut)

    def waits(self) -> list[dict[str, float]]:
        """Return what every rank did before the last step, by rank: seconds of its ``"own"``, and waits by stream.

        Every rank calls this. `StepReport.slowest` has the slowest rank of every step without a message.
        """
        self.context.check_open("waits")
        return gather_json(self.world, {"own": self.context.pace.own_seconds, **self.context.run.stalls}, name="waits")

    def memory(self) -> MemoryReport:
        """Return how many bytes this rank holds, counted from its arrays."""
        return memory_of(self.context, self.units)

    def predict(self, *, batch: float | None = None, plan: Plan | Budget | None = None) -> Prediction:
        """Return what a step will take of memory, with an interval: also for batch sizes and plans that were not run.

        From the layout, which is counted, and from peaks of past steps of this model: for a runtime with ``history=``.
        On GPUs it is the GPU's memory, with what pools of CuPy and torch keep for later and give back when it runs out:
        a bound from above. Else it is that of the process, of which shared pages count in parts. Every rank calls this.

        Args:
            batch: Samples that a rank computes at once, in a micro-step: those of `take`, or of ``weight=`` without;
                None: as many as the largest there was.
            plan: What is to lie where, with the options of this runtime; None: what does.

        Raises:
            CallError: There is no history, or nothing of this model in it; on every rank.
            PlanError: A budget does not hold the model; on every rank.
        """
        from zerort.engine.sizing.predicting import predict  # here: few runs need it

        self.context.check_open("predict")
        return predict(self.context, self.units, batch=batch, plan=plan)

    # -- open and closed -------------------------------------------------------------------------------------------

    def complain(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on as they do, and why."""
        self.context.complain(error)

    def disown(self) -> None:
        """In a forked child: be closed. What is there is its parent's, which goes on with it."""
        self.context.run.is_closed = self.context.run.is_inherited = True

    def close(self) -> None:
        """Finish what is under way and give everything back. Closing twice is fine; other verbs then raise."""
        if not self.context.run.is_closed:
            close(self.context, self.units, self._feeds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.context.run.is_inherited:
            return
        self.world.standing.take_exit(error)
        if kind is None:
            self.close()
        else:
            abandon(self.context, self._feeds)

    def __repr__(self) -> str:
        context = self.context
        state = "closed" if context.run.is_closed else f"{len(self.units)} units, {self.updates} updates"
        plan = context.plan.describe(gpus=not context.device.in_host_memory)
        summed = accumulation(
            context.plan,
            micro_steps=context.micro_steps,
            accumulate=context.options.accumulate,
            in_tree=context.leaves is not None,
        )
        return f"Runtime(rank {self.rank} of {self.size}, {context.budget or plan}, {summed and f'{summed}, '}{state})"
