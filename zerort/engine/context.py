"""`Context`: what all parts of one open runtime share; `RunState`: the few facts of a run that change.

    Runtime ── Context ──> units and their sections, the step, checkpoints
                  └─ RunState: updates done, bindings attached, open or closed

Everything below `Runtime` takes the context, and `Units` where it asks all of them. A context knows neither, so what
it is made of can be read, and tested, without them. Next in reading order: `model/section.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerort import forks
from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.engine.binding import Attachment
from zerort.engine.ledger import Ledger
from zerort.engine.mesh import Mesh
from zerort.engine.model.division import BLOCK, cut_over
from zerort.engine.model.prefetch import Prefetcher
from zerort.engine.model.slot_set import SlotSet
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.options import RuntimeOptions
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.stage import Stage
from zerort.engine.residence.tiers import Tiers
from zerort.engine.sizing.planner import BudgetPlanner
from zerort.engine.sizing.working import offload_within
from zerort.engine.stopping import Stopping
from zerort.errors import ClosedError
from zerort.layout import Cut
from zerort.optim import LossScaler, Optimizer, ParameterGroup
from zerort.typing import Device

if TYPE_CHECKING:
    from zerort.checkpoint.lease import Lease

__all__ = ["Context", "RunState"]


@dataclass(slots=True)
class RunState:
    """What changes while a runtime is open, beside parameters, gradients and optimizer state."""

    updates: int = 0
    """Updates done so far; the same on every rank."""
    is_new: bool = True
    """Whether no step was taken yet, and no other run's state loaded."""
    lease: Lease | None = None
    """The right to keep steps in ``last_step``, once it was asked for."""
    attachments: list[Attachment] = field(default_factory=list)
    """Bindings that collect gradients on their own; asked before every step, and told after it."""
    lr_overrides: dict[int, float] = field(default_factory=dict)
    """Learning rates that are not as the optimizers have them, by the optimizer's `id`; the same on every rank."""
    meetings: int = 0
    """How often all ranks that share slots have met, as far as it matters to who may write to them."""
    is_closed: bool = False
    """Whether the runtime was closed, or left with an error."""
    is_inherited: bool = False
    """Whether this process is a forked child of the one that opened the runtime."""

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
    options: RuntimeOptions
    """How the runtime trains."""
    cut: Cut
    """How sections are cut over the ranks that share a copy of the model."""
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
    tiers: Tiers
    """Values that are offloaded to a disk."""
    stage: Stage
    """Where updates are computed."""
    planner: BudgetPlanner | None
    """What a budget gives to each section; None: the plan says it."""
    tiers_of: Callable[[str], SectionResidence]
    """In which memory the parts of a section are, by its name; the same on every rank."""
    stopping: Stopping
    """Signals that ask the run to stop."""
    run: RunState = field(default_factory=RunState)
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
        planner = None
        if budget is not None:
            planner = BudgetPlanner.build(
                budget,
                mesh,
                plan=plan,
                optimizer=optimizer,
                param_groups=param_groups,
                options=options,
                offload=offload,
            )
        return cls(
            mesh=mesh,
            plan=plan,
            budget=budget,
            optimizer=optimizer,
            param_groups=param_groups,
            options=options,
            cut=cut_over(
                shard.size,
                weights=options.shard_weights,
                deterministic=options.deterministic,
                equal=shard.prefers_equal_counts,
            ),
            scaler=options.make_scaler(),
            ledger=ledger,
            slots=SlotSet.build(shard),
            prefetcher=prefetcher,
            host=host,
            tiers=Tiers(mesh.world, scratch=options.scratch, options=streamed, ledger=ledger, host=host),
            stage=Stage(shard.device, host, options=streamed),
            planner=planner,
            tiers_of=(lambda section: SectionResidence.of(plan)) if planner is None else planner.of,
            stopping=Stopping(f"rank {mesh.world.rank}"),
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
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1.0 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def denominator(self) -> int:
        """How many gradients a step averages over; 1 if they are summed."""
        return self.world.size * self.micro_steps if self.options.reduction == "mean" else 1

    @property
    def norm_block(self) -> int | None:
        """Elements over which squares are summed before the sums meet those of other ranks; None: all of a shard."""
        return BLOCK if self.options.deterministic else None

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
        self.tiers.check_whole(verb)

    def complain(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on as they do, and why."""
        if not isinstance(error, ClosedError):
            self.mesh.complain(str(error))
