"""`Context`: what all parts of one open runtime share; `RunState`: the few facts of a run that change.

    Runtime ── Context ──> units and their sections, the step, checkpoints
                  └─ RunState: updates done, bindings attached, open or closed

Everything below `Runtime` takes the context, and `Units` where it asks all of them. A context knows neither, so what
it is made of can be read, and tested, without them. Next in reading order: `model/section.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerort import forks
from zerort.buffer import Leaves
from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.config.offload import OffloadOptions
from zerort.data import Cursor
from zerort.engine.attachment import Attachment
from zerort.engine.batches.join_state import JoinState
from zerort.engine.mesh import Mesh
from zerort.engine.model.division import BLOCK, cut_over
from zerort.engine.model.prefetch import Prefetcher
from zerort.engine.model.slot_set import SlotSet
from zerort.engine.options import RuntimeOptions, keeps_whole_gradients
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.rows.checks import RowSettings
from zerort.engine.sizing.planner import BudgetPlanner
from zerort.engine.sizing.table import SizeTable
from zerort.engine.sizing.working import offload_within
from zerort.engine.step.facts.pace import Pace
from zerort.engine.step.facts.peaks import Peaks
from zerort.engine.step.update_guard import UpdateGuard
from zerort.engine.stopping import Stopping
from zerort.engine.wire.coding import Coding
from zerort.engine.wire.sending import Sending
from zerort.errors import ClosedError
from zerort.layout import Cut
from zerort.layout.flat import ALIGNMENT
from zerort.optim import LossScaler, Optimizer, ParameterGroup, settings_of
from zerort.storage.session import StorageSession
from zerort.streaming.update_staging import UpdateStaging
from zerort.streaming.update_stream import UpdateStream
from zerort.trace.ledger import Ledger
from zerort.typing import Device

if TYPE_CHECKING:
    from zerort.checkpoint.files.lease import Lease

__all__ = ["Context", "RunState"]


@dataclass(slots=True)
class RunState:
    """What changes while a runtime is open, beside parameters, gradients and optimizer state."""

    cut: Cut
    """How sections are cut over the ranks that share a copy of the model."""
    sizes: SizeTable
    """How many bytes sections take, for what is reserved and decided."""
    shares: tuple[float, ...] | None = None
    """How much of a batch each rank takes, in proportion, if that is not as sections are cut."""
    move_speed: float | None = None
    """Bytes per second that the last shards moved with, when they were cut anew; the same on every rank."""
    relieved: int | None = None
    """Updates that were done when a full memory last gave shards away; None: none has."""
    updates: int = 0
    """Updates done so far; the same on every rank."""
    is_new: bool = True
    """Whether no step was taken yet, and no other run's state loaded."""
    is_weighted: bool = False
    """Whether the last step was divided by ``weight=``; the same on every rank."""
    lease: Lease | None = None
    """The right to keep steps in ``last_step``, once it was asked for."""
    attachments: list[Attachment] = field(default_factory=list)
    """Bindings that collect gradients on their own; asked before every step, and told after it."""
    lr_overrides: dict[int, float] = field(default_factory=dict)
    """Learning rates that are not as the optimizers have them, by the optimizer's `id`; the same on every rank."""
    meetings: int = 0
    """How often all ranks that share slots have met, as far as it matters to who may write to them."""
    in_one_order: bool = False
    """Whether it matters that all ranks lease gather slots in one order: some share them, or meet because of them."""
    cursors: dict[str, Cursor] = field(default_factory=dict)
    """How far each order of samples is used, by its name; the same on every rank."""
    join: JoinState = field(default_factory=JoinState)
    """Whether the batch that this rank computes is its own (`Runtime.join`)."""
    stalls: dict[str, float] = field(default_factory=dict)
    """Seconds that this rank waited before the last step, by stream."""
    straggler: tuple[int, str] | None = None
    """The rank that stays slow, and what it is called; the same on every rank."""
    is_closed: bool = False
    """Whether the runtime was closed, or left with an error."""
    is_inherited: bool = False
    """Whether this process is a forked child of the one that opened the runtime."""

    def commit_batches(self) -> int:
        """Count the batches that a step was made of as used; return how many of their samples were this rank's."""
        return sum(cursor.commit() for cursor in self.cursors.values())

    def release_lease(self) -> None:
        """Let another run keep its steps where this one did."""
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What all parts of one open runtime share, on this rank. Made by `Context.build`."""

    mesh: Mesh
    """The ranks."""
    plan: Plan
    """What lives where; with a budget, only how it lies over the ranks."""
    budget: Budget | None
    """How much there is of each memory, instead of the plan's tiers."""
    optimizer: Optimizer
    """How parameters are updated."""
    param_groups: tuple[ParameterGroup, ...]
    """Other settings for some parameters."""
    settings: tuple[Optimizer, ...]
    """The optimizer itself, then that of each group; equal settings are one object, which lives as long as this."""
    options: RuntimeOptions
    """How the runtime trains."""
    coding: Coding | None
    """What travels as codes; None: nothing."""
    scaler: LossScaler | None
    """What scales losses, if anything does."""
    ledger: Ledger
    """Where moved bytes and waits are counted."""
    slots: SlotSet
    """Memory that takes turns: gathered units, gradients in flight."""
    prefetcher: Prefetcher
    """Gathers the units that come next."""
    host: HostMemory
    """Host memory for values that are offloaded from a GPU."""
    storage: StorageSession
    """Values that are offloaded to a disk."""
    update_stream: UpdateStream
    """Brings them to an update, and back."""
    guard: UpdateGuard
    """Whether parameters and state are those of one update."""
    backings: Backings
    """What values are kept in, by tier."""
    staging: UpdateStaging
    """Where updates are computed, between a GPU and its host."""
    planner: BudgetPlanner | None
    """What a budget gives to each section; None: the plan says it."""
    tiers_of: Callable[[str], SectionResidence]
    """In which memory the parts of a section are, by its name; the same on every rank."""
    stopping: Stopping
    """Signals that ask the run to stop."""
    pace: Pace
    """Which rank is slow."""
    peaks: Peaks | None
    """How much memory steps take; None: nobody wants to know."""
    run: RunState
    """What changes while the runtime is open."""

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        *,
        plan: Plan,
        budget: Budget | None,
        optimizer: Optimizer,
        param_groups: tuple[ParameterGroup, ...],
        options: RuntimeOptions,
        prefetcher: Prefetcher,
    ) -> Context:
        """Make what a runtime's parts share, from what the runtime was opened with. No communication.

        Args:
            mesh: The ranks.
            plan: What lives where.
            budget: How much there is of each memory, instead of the plan's tiers.
            optimizer: How parameters are updated.
            param_groups: Other settings for some of them.
            options: How the runtime trains.
            prefetcher: Gathers the units that come next.
        """
        shard, ledger, host = mesh.shard, Ledger(), HostMemory(mesh.shard)
        offload = OffloadOptions.from_environment() if options.offload is None else options.offload
        streamed = offload if budget is None else offload_within(budget.memory, offload)
        coding = Coding.of(
            options.wire,
            one_host=shard.one_host,
            virtual_shards=options.virtual_shards,
            may_skip=options.may_skip,
        )
        sizes = SizeTable.build(
            mesh,
            plan=plan,
            optimizer=optimizer,
            param_groups=param_groups,
            options=options,
            offload=offload,
            memory=None if budget is None else budget.memory,
        )
        planner = None
        if budget is not None:
            planner = BudgetPlanner(budget, model_spec=sizes.model_spec, working=sizes.working)
        storage = StorageSession(
            mesh.world, scratch=options.scratch, options=streamed, traffic=ledger.tiered, host=host
        )
        micro_steps = options.micro_steps_of(mesh.world.size)
        is_whole = keeps_whole_gradients(
            plan,
            micro_steps=micro_steps,
            accumulate=options.accumulate,
            in_tree=options.virtual_shards is not None,
        )
        return cls(
            mesh=mesh,
            plan=plan,
            budget=budget,
            optimizer=optimizer,
            param_groups=param_groups,
            settings=(optimizer, *(settings_of(one, optimizer) for one in param_groups)),
            options=options,
            coding=coding,
            scaler=options.make_scaler(),
            ledger=ledger,
            slots=SlotSet.build(shard, reduces_micro_steps=micro_steps > 1 and not is_whole),
            prefetcher=prefetcher,
            host=host,
            storage=storage,
            update_stream=UpdateStream(storage, ledger=ledger, host=host, rank=mesh.world.rank),
            guard=UpdateGuard(),
            backings=Backings(shard, host, storage),
            staging=UpdateStaging(shard.device, host, options=streamed),
            planner=planner,
            tiers_of=(lambda section: SectionResidence.of(plan)) if planner is None else planner.of,
            stopping=Stopping(f"rank {mesh.world.rank}"),
            pace=Pace(ledger, rank=mesh.world.rank, size=mesh.world.size),
            peaks=None
            if options.history is None
            else Peaks(os.fspath(options.history), device=shard.device, rank=mesh.world.rank),
            run=RunState(
                cut=cut_over(
                    shard.size,
                    weights=options.shard_weights,
                    deterministic=options.virtual_shards is not None,
                    equal=shard.prefers_equal_counts,
                    alignment=ALIGNMENT if coding is None else coding.alignment,
                ),
                sizes=sizes,
            ),
        )

    # -- the ranks -------------------------------------------------------------------------------------------------

    @property
    def world(self) -> Group:
        """All ranks that train together."""
        return self.mesh.world

    @property
    def rank(self) -> int:
        """This rank's number among all that train together."""
        return self.mesh.world.rank

    @property
    def device(self) -> Device:
        """Where gathered parameters and gradients are, and whose arrays loops compute with."""
        return self.mesh.shard.device

    # -- what the options mean here --------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Calls of `Unit.reduce` per unit and step, on this rank."""
        return self.options.micro_steps_of(self.world.size)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether each rank keeps whole gradients until the last micro-step."""
        return keeps_whole_gradients(
            self.plan,
            micro_steps=self.micro_steps,
            accumulate=self.options.accumulate,
            in_tree=self.options.virtual_shards is not None,
        )

    @property
    def leaves(self) -> Leaves | None:
        """Which micro-batches each rank computes, if gradients are summed in a fixed tree."""
        shards, size = self.options.virtual_shards, self.world.size
        if shards is None:
            return None
        return Leaves(shards, size, size // self.mesh.shard.size, in_turn=not self.keeps_whole_gradients)

    @property
    def senders(self) -> Sending | None:
        """Who sends gradients as codes; None: they travel as they are."""
        if self.coding is None or self.coding.wire.reduce is None:
            return None
        copies = self.world.size // self.mesh.shard.size
        return Sending.among(self.coding, self.world.hosts, copies=copies, leaves=self.leaves, rank=self.rank)

    @property
    def own_micro_batches(self) -> range:
        """Which of a step's micro-batches this rank computes, over all ranks, in order; each once."""
        return self._own_micro_batches_of(self.rank)

    @property
    def micro_batches(self) -> Sequence[int]:
        """The same, one for each micro-step: a rank with one fewer than others repeats its last."""
        return self.micro_batches_of(self.rank)

    def micro_batches_of(self, rank: int) -> Sequence[int]:
        """Return the `micro_batches` of any rank."""
        own = self._own_micro_batches_of(rank)
        return own if len(own) == self.micro_steps else (*own, own[-1])

    def _own_micro_batches_of(self, rank: int) -> range:
        if self.leaves is not None:
            return self.leaves.of(rank)
        return range(rank * self.micro_steps, (rank + 1) * self.micro_steps)

    @property
    def micro_batch_count(self) -> int:
        """How many micro-batches a step has, over all ranks."""
        return self.options.virtual_shards or self.world.size * self.micro_steps

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1.0 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def denominator(self) -> int:
        """How many gradients a step averages over; 1 if they are summed."""
        return self.micro_batch_count if self.options.reduction == "mean" else 1

    @property
    def norm_block(self) -> int | None:
        """Elements over which squares are summed before the sums meet those of other ranks; None: all of a shard."""
        return BLOCK if self.options.virtual_shards is not None else None

    @property
    def row_settings(self) -> RowSettings:
        """What tables are trained with, as far as some of it cannot have rows."""
        return RowSettings(
            plan=self.plan,
            has_budget=self.budget is not None,
            optimizer=self.optimizer,
            param_groups=self.param_groups,
            on_gpus=not self.device.in_host_memory,
            has_copies=self.mesh.replicate is not None,
        )

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_open(self, verb: str) -> None:
        """Raise if the runtime is closed."""
        if self.run.is_inherited:
            raise forks.inherited(f"a runtime ({verb})")
        if self.run.is_closed:
            raise ClosedError(
                f"{verb}: Expected an open runtime, got a closed one. Stay inside `with zerort.open(…):`."
            )

    def check_whole(self, verb: str) -> None:
        """Raise if the runtime is closed, or if a disk failed in the middle of an update."""
        self.check_open(verb)
        self.guard.check_whole(verb)

    @property
    def is_partially_updated(self) -> bool:
        """Whether optimizer state of this rank is not that of one update, or not for sure: a sync has failed."""
        return self.guard.has_partial_state or self.update_stream.failure() is not None or self.storage.has_lost

    def close_storage(self) -> None:
        """Wait for what is on its way to a store, and delete its files. Closing twice is fine."""
        with contextlib.ExitStack() as stack:  # the last one first; whatever fails, the rest is closed, too
            stack.callback(self.storage.close)
            stack.callback(self.update_stream.close)
            stack.callback(self.backings.close)

    def complain(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on as they do, and why."""
        if not isinstance(error, ClosedError):
            self.mesh.complain(str(error))
