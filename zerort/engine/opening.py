"""`open`: all ranks open a runtime with the same arguments, or all raise."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn

from zerort.comm import Group
from zerort.comm.agreed import expect_same, raise_together
from zerort.config import Budget, Plan, Tier
from zerort.engine.mesh import Mesh, mesh
from zerort.engine.offload_options import OffloadOptions, Scratch, scratch_directories
from zerort.engine.opening_checks import check_nouns, check_ranks
from zerort.engine.option_names import unknown_options
from zerort.engine.options import RuntimeOptions
from zerort.engine.runtime import Runtime
from zerort.errors import PlanError, ZerortError
from zerort.optim import AdamW, ElementwiseOptimizer, LossScale, Optimizer, ParameterGroup
from zerort.storage.files.mounts import expect_directory

__all__ = ["open"]


def open(
    plan: Plan | Budget | None = None,
    optimizer: Optimizer | None = None,
    *,
    param_groups: Sequence[ParameterGroup] = (),
    group: Group | None = None,
    mesh: Mesh | None = None,
    micro_steps: int = 1,
    reduction: Literal["mean", "sum"] = "mean",
    clip_norm: float | None = None,
    loss_scale: LossScale | float | None = None,
    nonfinite: Literal["raise", "skip"] = "raise",
    gradient_dtype: str | None = None,
    deterministic: bool = False,
    virtual_shards: int | None = None,
    shard_weights: Sequence[float] | None = None,
    prefetch: int = 1,
    buckets: int = 2,
    scratch: Scratch | None = None,
    create_scratch: bool = False,
    offload: OffloadOptions | None = None,
    last_step: str | os.PathLike[str] | None = None,
    **unknown: NoReturn,
) -> Runtime:
    """Open a runtime on this rank. Every rank of the group calls this with the same arguments.

    Args:
        plan: What lives where, or a budget: `Plan.zero`, `Plan.fit`. ZeRO-3 if None.
        optimizer: How parameters are updated; AdamW with a learning rate of 1e-3 if None.
        param_groups: Other settings for some parameters, by name.
        group: The ranks; left open when the runtime closes. All of the job's if None.
        mesh: The ranks as `zerort.mesh` arranges them, instead of a group; closed with the runtime.
        micro_steps: Calls of `Unit.reduce` that are summed locally before anything is communicated.
        reduction: Whether gradients are averaged over ranks and micro-steps, or summed.
        clip_norm: Largest norm of all gradients together; None: not clipped.
        loss_scale: What losses are multiplied by before backward: a `LossScale`, which is dynamic, a fixed number, or
            None.
        nonfinite: What NaN or infinity in a gradient does without loss scaling: `NonFiniteError`, or a skipped update.
        gradient_dtype: What gradients are summed in; None: the parameter's dtype, but float32 for float16 on GPUs.
        deterministic: Give the same bits on any number of ranks; needs ``virtual_shards``.
        virtual_shards: How many micro-batches a step has, over all ranks, with ``deterministic``.
        shard_weights: How much of every shard each rank takes, by capacity; None: alike.
        prefetch: Units that are gathered ahead of the one in use.
        buckets: Gradient buckets that may be in flight at once.
        scratch: The directory for what rests on NVME, or several; None: as ``ZERORT_SCRATCH`` says, or the system's for
            temporary files.
        create_scratch: Make directories of ``scratch`` that are not there.
        offload: How values stream to and from ``scratch``.
        last_step: A directory in which every step leaves a checkpoint: `Runtime.resume`. The first step makes it; what
            is above it has to be there.
        **unknown: No others: a name that is not one of these is answered with the nearest.

    `RuntimeOptions` says more about each of those from ``micro_steps`` on.

    Raises:
        CallError: An argument cannot be worked with, or is not known; on every rank.
        PlanError: The plan cannot be served here, or ranks came with different arguments; on every rank.
        StorageError: ``scratch`` is not there; on every rank.
    """
    check_ranks(group, mesh)
    settings = functools.partial(
        RuntimeOptions,
        micro_steps=micro_steps,
        reduction=reduction,
        clip_norm=clip_norm,
        loss_scale=loss_scale,
        nonfinite=nonfinite,
        gradient_dtype=gradient_dtype,
        deterministic=deterministic,
        virtual_shards=virtual_shards,
        shard_weights=shard_weights,
        prefetch=prefetch,
        buckets=buckets,
        scratch=scratch,
        create_scratch=create_scratch,
        offload=offload,
        last_step=last_step,
    )
    ranks = _mesh_of(group) if mesh is None else mesh
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
    return [repr(ParameterGroup(group.match)), replace(optimizer, **group.overrides).describe()]  # type: ignore[type-var]


def _mesh_of(group: Group | None) -> Mesh:
    return mesh(group=group)


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
    if plan.gradient.tier is Tier.NVME or (plan.gradient.tier is Tier.HOST and on_gpus):
        _check_resting_gradient(ranks, settings, plan.gradient.tier, free=Tier.DEVICE if on_gpus else Tier.HOST)
    if settings.shard_weights is not None and len(settings.shard_weights) != ranks.shard.size:
        raise PlanError(
            f"Expected one weight for each of {ranks.shard.size} ranks that share the model, got "
            f"{len(settings.shard_weights)}: {settings.shard_weights!r}."
        )
    if on_gpus:
        _check_optimizer_of_gpus(optimizer)
    if settings.deterministic:
        _check_deterministic(ranks, optimizer, settings)
    return Runtime(ranks, plan=plan, budget=budget, optimizer=optimizer, param_groups=param_groups, options=settings)


def _with_directories(settings: RuntimeOptions) -> RuntimeOptions:
    """Raise unless directories that were named are there, or asked for, and resolve them: they do not follow chdir."""
    if settings.scratch is not None or settings.create_scratch:  # else it is looked at when something goes there
        for one in scratch_directories(settings.scratch):
            expect_directory(one, what="scratch", create=settings.create_scratch, or_else=_OR_ELSE)
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


def _check_resting_gradient(ranks: Mesh, settings: RuntimeOptions, tier: Tier, *, free: Tier) -> None:
    """Refuse what sums gradients more than once: they would have to come back from where they rest in between.

    Args:
        ranks: The ranks.
        settings: How the runtime trains.
        tier: Where gradients rest.
        free: A tier in which they could be summed.
    """
    for what, is_asked, cure in (
        ("micro_steps=1", settings.micro_steps > 1, "Several micro-steps are summed where computing happens"),
        ("deterministic=False", settings.deterministic, "The fixed tree is summed where computing happens"),
        ("one copy of the model", ranks.replicate is not None, "Copies sum their shards where computing happens"),
    ):
        if is_asked:
            raise PlanError(
                f"Expected {what} with gradients on {tier.name}, got another. {cure}: let them rest there, "
                f"gradient=Tier.{free.name}."
            )


def _check_deterministic(ranks: Mesh, optimizer: Optimizer, settings: RuntimeOptions) -> None:
    """Refuse what would make the bits of a step depend on the number of ranks."""
    shards, size = settings.virtual_shards, ranks.world.size
    assert shards is not None
    each = shards // size
    if shards % size or (size > 1 and each & (each - 1)):
        raise PlanError(
            f"Expected virtual_shards to be the number of ranks ({size}) times a power of two, got {shards}. Only then "
            f"is what a rank sums a node of the tree. Use {size << max(0, each.bit_length() - 1)}, say, or other ranks."
        )
    if ranks.replicate is not None:
        raise PlanError("Expected one copy of the model in deterministic mode, got several. Use replicate=1.")
    if not isinstance(optimizer, ElementwiseOptimizer):
        raise PlanError(
            f"Expected an elementwise optimizer in deterministic mode, got {optimizer.kind}, whose sums over whole "
            "tensors depend on how they are cut. Use AdamW, SGD or Lion."
        )
