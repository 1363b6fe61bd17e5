"""`open`: all ranks open a runtime with the same arguments, or all raise."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn

from zerort.comm import Group, open_group
from zerort.comm.agreed import expect_same, raise_together
from zerort.config import Budget, Plan, Tier, Wire
from zerort.config.offload import OffloadOptions, Scratch, scratch_directories
from zerort.engine.mesh import Mesh, MeshShape
from zerort.engine.model.frozen import check_frozen_format
from zerort.engine.opening_checks import check_nouns, check_ranks
from zerort.engine.option_names import unknown_options
from zerort.engine.options import Accumulate, RuntimeOptions, keeps_whole_gradients
from zerort.engine.residence.choose import reach
from zerort.engine.runtime import Runtime
from zerort.errors import PlanError, ZerortError
from zerort.layout import Placement
from zerort.optim import AdamW, ElementwiseOptimizer, LossScale, Optimizer, ParameterGroup, TensorOptimizer, settings_of
from zerort.storage.files.mounts import expect_directory

__all__ = ["open"]


def open(
    plan: Plan | Budget | None = None,
    optimizer: Optimizer | None = None,
    *,
    param_groups: Sequence[ParameterGroup] = (),
    group: Group | None = None,
    mesh: MeshShape | None = None,
    device: Literal["host", "cuda"] | None = None,
    micro_steps: int = 1,
    accumulate: Accumulate | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    clip_norm: float | None = None,
    loss_scale: LossScale | float | None = None,
    nonfinite: Literal["raise", "skip"] = "raise",
    gradient_dtype: str | None = None,
    virtual_shards: int | None = None,
    digest: bool | None = None,
    shard_weights: Sequence[float] | None = None,
    wire: Wire | None = None,
    frozen_format: Literal["int8", "int4"] | None = None,
    prefetch: int = 1,
    buckets: int = 2,
    scratch: Scratch | None = None,
    create_scratch: bool = False,
    offload: OffloadOptions | None = None,
    last_step: str | os.PathLike[str] | None = None,
    history: str | os.PathLike[str] | None = None,
    **unknown: NoReturn,
) -> Runtime:
    """Open a runtime on this rank. Every rank of the group calls this with the same arguments.

    Args:
        plan: What lives where, or a budget: `Plan.zero`, `Plan.fit`. ZeRO-3 if None.
        optimizer: How parameters are updated; AdamW with a learning rate of 1e-3 if None.
        param_groups: Other settings for some parameters, by name.
        group: The ranks, in a group of your own, which stays open when the runtime closes. If None, the runtime opens
            one of all of the job's ranks, and closes it.
        mesh: How the ranks are arranged, as `zerort.mesh` says; all of them share one copy of the model if None.
        device: Where a runtime that opens its own group computes: on the host, or ``"cuda"``, on a GPU for each rank of
            a host. With a group, its device; on the host if None.
        micro_steps: Calls of `Unit.reduce` per unit and step, whose gradients are summed.
        accumulate: How they are summed: "sharded", over the ranks in every micro-step, with the memory that the plan
            says; "local", one communication per step, with whole gradients on every rank. None: "sharded" where the
            plan shards gradients.
        reduction: Whether gradients are averaged over ranks and micro-steps, or summed.
        clip_norm: Largest norm of all gradients together; None: not clipped.
        loss_scale: What losses are multiplied by before backward: a `LossScale`, which is dynamic, a fixed number, or
            None.
        nonfinite: What NaN or infinity in a gradient does without loss scaling: `NonFiniteError`, or a skipped update.
        gradient_dtype: What gradients are summed in; None: the parameter's dtype, but float32 for float16 on GPUs.
        virtual_shards: How many micro-batches a step has, over all ranks: the same bits on any number of ranks up to
            this.
        digest: Whether every step's report has a checksum of all parameters, which reads all of them; None: with
            ``virtual_shards``.
        shard_weights: How much of every shard each rank takes, by capacity; None: alike.
        wire: How values travel between ranks, such as ``zr.Wire(gather="int8")``; None: as they are.
        frozen_format: What frozen parameters rest in, decoded when they are gathered: "int8" or "int4"; None: as they
            are.
        prefetch: Units that are gathered ahead of the one in use. As many and one stay where forward turns to backward:
            more of them take memory and spare gathers.
        buckets: Gradient buckets that may be in flight at once.
        scratch: The directory for what rests on NVME, or several; None: as ``ZERORT_SCRATCH`` says, or the system's for
            temporary files.
        create_scratch: Make directories of ``scratch`` that are not there.
        offload: How values stream to and from ``scratch``.
        last_step: A directory in which every step leaves a checkpoint: `Runtime.resume`. The first step makes it; what
            is above it has to be there.
        history: A file in which the most memory that steps take is kept, for `Runtime.predict`; None: nothing is
            measured.
        **unknown: No others: a name that is not one of these is answered with the nearest.

    `RuntimeOptions` says more about each of those from ``micro_steps`` on.

    Raises:
        CallError: An argument cannot be worked with, or is not known; on every rank.
        PlanError: The plan cannot be served here, or ranks came with different arguments; on every rank.
        StorageError: ``scratch`` is not there; on every rank.
    """
    check_ranks(group, mesh, device)
    settings = functools.partial(
        RuntimeOptions,
        micro_steps=micro_steps,
        accumulate=accumulate,
        reduction=reduction,
        clip_norm=clip_norm,
        loss_scale=loss_scale,
        nonfinite=nonfinite,
        gradient_dtype=gradient_dtype,
        virtual_shards=virtual_shards,
        digest=digest,
        shard_weights=shard_weights,
        wire=wire,
        frozen_format=frozen_format,
        prefetch=prefetch,
        buckets=buckets,
        scratch=scratch,
        create_scratch=create_scratch,
        offload=offload,
        last_step=last_step,
        history=history,
    )
    ranks = _open_mesh(group, MeshShape() if mesh is None else mesh, device)
    try:
        runtime, error = None, None  # type: Runtime | None, Exception | None
        try:
            if unknown:
                raise unknown_options(unknown, _NAMES)
            runtime = _prepare(ranks, plan, optimizer, param_groups, settings())
        except ZerortError as caught:
            error = caught.with_traceback(None)  # the line that called this tells more than ours
        except Exception as caught:
            error = caught
        raise_together(ranks.world, error, name="open")
        assert runtime is not None
        facts = [
            [str(runtime.context.plan), repr(runtime.context.budget)],
            runtime.context.optimizer.describe(),
            [_describe(one, runtime.context.optimizer) for one in runtime.context.param_groups],
            runtime.context.options.describe(),
            [ranks.shard.size, ranks.world.size],
        ]
        expect_same(ranks.world, facts, what="the runtime's plan, optimizer and options")
    except BaseException:
        ranks.close()
        raise
    runtime.context.stopping.begin()
    return runtime


_NAMES: Final = tuple(
    name for name, one in inspect.signature(open).parameters.items() if one.kind is not one.VAR_KEYWORD
)

_OR_ELSE: Final = ", or zr.open(create_scratch=True)"


def _describe(group: ParameterGroup, optimizer: Optimizer) -> list[Any]:
    """Return a parameter group for JSON: whom it means, and with which settings."""
    return [repr(ParameterGroup(group.match)), settings_of(group, optimizer).describe()]


def _open_mesh(group: Group | None, shape: MeshShape, device: str | None) -> Mesh:
    """Make the groups of a mesh, over the caller's ranks, or over all of the job's on a device."""
    given = group if shape.group is None else shape.group
    world = open_group(kind="nccl" if device == "cuda" else None) if given is None else given
    try:
        return shape.build(world, owns_world=given is None)
    except BaseException:
        if given is None:
            world.close()
        raise


def _prepare(
    ranks: Mesh,
    plan: Plan | Budget | None,
    optimizer: Optimizer | None,
    param_groups: Sequence[ParameterGroup],
    settings: RuntimeOptions,
) -> Runtime:
    plan = Plan.zero(3) if plan is None else plan
    optimizer = AdamW(lr=1e-3) if optimizer is None else optimizer
    check_nouns(plan, optimizer, param_groups)
    settings = _with_directories(settings)
    budget = plan if isinstance(plan, Budget) else None
    if isinstance(plan, Budget):
        plan = Plan.zero(plan.stage)
    on_gpus = not ranks.shard.device.in_host_memory
    is_whole = keeps_whole_gradients(
        plan,
        micro_steps=settings.micro_steps,
        accumulate=settings.accumulate,
        in_tree=settings.virtual_shards is not None,
    )
    if plan.gradient.tier is Tier.NVME or (plan.gradient.tier is Tier.HOST and on_gpus):
        free = Tier.DEVICE if on_gpus else Tier.HOST
        _check_offloaded_gradient(plan.gradient.tier, is_whole=is_whole, free=free)
    if settings.shard_weights is not None and len(settings.shard_weights) != ranks.shard.size:
        raise PlanError(
            f"Expected one weight for each of {ranks.shard.size} ranks that share the model, got "
            f"{len(settings.shard_weights)}: {settings.shard_weights!r}."
        )
    plan.check_device(on_gpus=on_gpus)
    check_frozen_format(settings.frozen_format)
    if settings.wire is not None:
        _check_wire(ranks, plan, settings, settings.wire)
    for one in (optimizer, *(settings_of(group, optimizer) for group in param_groups)):
        if on_gpus:
            _check_optimizer_of_gpus(one)
        if settings.virtual_shards is not None:
            _check_deterministic(ranks, one, settings)
    return Runtime(ranks, plan=plan, budget=budget, optimizer=optimizer, param_groups=param_groups, options=settings)


def _with_directories(settings: RuntimeOptions) -> RuntimeOptions:
    """Raise unless directories that were named are there, or asked for, and resolve them: they do not follow chdir."""
    if settings.scratch is not None or settings.create_scratch:  # else it is looked at when something goes there
        for one in scratch_directories(settings.scratch):
            expect_directory(one, what="scratch", create=settings.create_scratch, or_else=_OR_ELSE)
    if settings.history is not None:
        history = os.path.abspath(settings.history)
        expect_directory(os.path.dirname(history), what=f"history={history!r}")
        settings = replace(settings, history=history)
    if settings.last_step is None:
        return settings
    last_step = os.path.abspath(settings.last_step)
    expect_directory(os.path.dirname(last_step), what=f"last_step={last_step!r}")
    return replace(settings, last_step=last_step)


def _check_optimizer_of_gpus(optimizer: Optimizer) -> None:
    """Refuse what has no kernel there."""
    if not isinstance(optimizer, ElementwiseOptimizer):
        raise PlanError(
            f"Expected an elementwise optimizer on GPUs, got {optimizer.kind}, which has no kernel there. Use AdamW, "
            "SGD or Lion, or train on the host."
        )


def _check_offloaded_gradient(tier: Tier, *, is_whole: bool, free: Tier) -> None:
    """Refuse to offload gradients that are summed where computing happens.

    Args:
        tier: Where gradients rest.
        is_whole: Whether micro-steps are summed in whole gradients.
        free: A tier in which they could be summed.
    """
    if is_whole:
        raise PlanError(
            f"Expected gradients on {tier.name} to be shards, got whole ones. They are summed where computing happens: "
            f"let gradients rest there, gradient=Tier.{free.name}."
        )


def _check_wire(ranks: Mesh, plan: Plan, settings: RuntimeOptions, wire: Wire) -> None:
    """Refuse codes that a plan, a device or a mesh cannot have."""
    on_gpus = not ranks.shard.device.in_host_memory
    if wire.gather is not None and plan.parameter.placement is not Placement.SHARDED:
        raise PlanError(
            f"Expected a plan that shards parameters with Wire(gather={wire.gather!r}), got {plan.parameter.placement} "
            "ones, which every rank keeps whole. Use zr.Plan.zero(3), or leave gather= out."
        )
    if wire.keeps_whole and plan.parameter.tier not in reach(on_gpus=on_gpus):
        where = "in the memory of GPUs" if on_gpus else "in memory"
        wanted = "gather='delta'" if wire.gather == "delta" else "gather='int4', feedback=True"
        others = "reduce" if wire.keeps_residuals else False
        cure = "leave gather= out" if wire.gather == "delta" else f"gather='int8', or feedback={others!r}"
        raise PlanError(
            f"Expected parameters {where} with Wire({wanted}), which keeps the whole model there on each "
            f"{'rank' if on_gpus else 'host'}, got parameters on {plan.parameter.tier.name}. Use "
            f"parameter=Tier.DEVICE, or {cure}."
        )
    if wire.reduce is None:
        return
    for is_asked, got, cure in (
        (
            plan.gradient.placement is not Placement.SHARDED,
            f"{plan.gradient.placement} ones, which every rank keeps whole",
            "Use zr.Plan.zero(2) or zr.Plan.zero(3)",
        ),
        (
            settings.virtual_shards is not None and settings.accumulate == "local",
            "virtual shards that each rank sums whole",
            "Leave accumulate='local' out",
        ),
    ):
        if is_asked:
            raise PlanError(
                f"Expected gradients that are summed over ranks once, shard by shard, with "
                f"Wire(reduce={wire.reduce!r}), got {got}. {cure}, or leave reduce= out."
            )


def _check_deterministic(ranks: Mesh, optimizer: Optimizer, settings: RuntimeOptions) -> None:
    """Refuse what would make the bits of a step depend on the number of ranks."""
    shards, size = settings.virtual_shards, ranks.world.size
    assert shards is not None
    if shards < size:
        raise PlanError(
            f"Expected virtual_shards to be at least the number of ranks ({size}), got {shards}: each rank computes "
            f"at least one micro-batch of a step. Use {size} or more, or fewer ranks."
        )
    is_exact = isinstance(optimizer, TensorOptimizer) and optimizer.sums_exactly
    if not (is_exact or isinstance(optimizer, ElementwiseOptimizer)):
        raise PlanError(
            f"Expected an optimizer whose sums do not depend on how tensors are cut with virtual_shards, got "
            f"{optimizer.kind}. Use AdamW, SGD, Lion or Adafactor, or let yours heed TensorPart.exact and say "
            "sums_exactly = True."
        )
