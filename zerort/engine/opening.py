"""`open_runtime`: all ranks open a runtime with the same arguments, or all raise. May import: engine.*, comm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zerort.comm import Group
from zerort.comm.agreement import expect_same, raise_together
from zerort.config import Budget, Plan, Tier
from zerort.device import HostDevice
from zerort.engine.mesh import Mesh, mesh
from zerort.engine.options import RuntimeOptions
from zerort.engine.runtime import Runtime
from zerort.errors import CallError, PlanError
from zerort.optim import AdamW, ElementwiseOptimizer, Optimizer, ParameterGroup

__all__ = ["open_runtime"]


def open_runtime(
    *,
    plan: Plan | Budget | None = None,
    optimizer: Optimizer | None = None,
    groups: Sequence[ParameterGroup] = (),
    group: Group | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Runtime:
    """Open a runtime on this rank. Every rank of the group calls this with the same arguments.

    Args:
        plan: What lives where, or a budget: `Plan.zero`, `Plan.fit`. ZeRO-3 if None.
        optimizer: How parameters are updated; AdamW with a learning rate of 1e-3 if None.
        groups: Other settings for some parameters, by name.
        group: The ranks; left open when the runtime closes. All of the job's if None.
        mesh: The ranks as `zerort.mesh` arranges them, instead of a group; closed with the runtime.
        **options: Fields of `RuntimeOptions`: prefetch, micro_steps, clip_norm, loss_scale, deterministic …

    Raises:
        PlanError: The plan cannot be served here, or ranks came with different arguments; on every rank.
    """
    if mesh is not None and group is not None:
        raise CallError("Expected a mesh or a group, got both. A mesh has its group.")
    ranks = _mesh_of(group) if mesh is None else mesh
    try:
        runtime, error = None, None
        try:
            runtime = _prepare(ranks, plan, optimizer, groups, options)
        except Exception as caught:
            error = caught
        raise_together(ranks.world, error, name="open")
        assert runtime is not None
        facts = [
            [str(runtime.plan), repr(runtime.budget)],
            runtime.optimizer.describe(),
            [_describe(one, runtime.optimizer) for one in runtime.groups],
            runtime.options.describe(),
            [ranks.shard.size, ranks.world.size],
        ]
        expect_same(ranks.world, facts, what="the runtime's plan, optimizer and options")
    except BaseException:
        ranks.close()
        raise
    return runtime


def _describe(group: ParameterGroup, optimizer: Optimizer) -> list[Any]:
    """Return a parameter group for JSON: whom it means, and with which settings."""
    return [repr(ParameterGroup(group.match)), replace(optimizer, **group.overrides).describe()]  # type: ignore[type-var]


def _mesh_of(group: Group | None) -> Mesh:
    return mesh(group=group)


def _prepare(
    ranks: Mesh,
    plan: Plan | Budget | None,
    optimizer: Optimizer | None,
    groups: Sequence[ParameterGroup],
    options: dict[str, Any],
) -> Runtime:
    settings = RuntimeOptions(**options)
    if settings.last_step is not None:  # resolved once, as scratch is: it does not follow os.chdir
        settings = replace(settings, last_step=os.path.abspath(settings.last_step))
    plan = Plan.zero(3) if plan is None else plan
    optimizer = AdamW(lr=1e-3) if optimizer is None else optimizer
    budget = plan if isinstance(plan, Budget) else None
    if budget is not None:
        plan = Plan.zero(budget.stage)
    if not isinstance(plan, Plan):
        raise CallError(f"Expected a Plan such as Plan.zero(3), or a budget, Plan.fit(host='8GiB'); got {plan!r}.")
    if not isinstance(optimizer, Optimizer):
        raise CallError(f"Expected an optimizer such as AdamW(lr=1e-3), got {optimizer!r}.")
    for one in groups:
        one.check(optimizer)
    on_gpus = not isinstance(ranks.shard.device, HostDevice)
    if plan.gradient.tier is Tier.NVME or (plan.gradient.tier is Tier.HOST and on_gpus):
        _check_resting_gradient(ranks, settings, plan.gradient.tier, free=Tier.DEVICE if on_gpus else Tier.HOST)
    if settings.weights is not None and len(settings.weights) != ranks.shard.size:
        raise PlanError(
            f"Expected one weight for each of {ranks.shard.size} ranks that share the model, got "
            f"{len(settings.weights)}: {settings.weights!r}."
        )
    if on_gpus:
        _check_optimizer_of_gpus(optimizer)
    if settings.deterministic:
        _check_deterministic(ranks, optimizer, settings)
    return Runtime(ranks, plan=plan, budget=budget, optimizer=optimizer, groups=groups, options=settings)


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
