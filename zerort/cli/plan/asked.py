"""What a user of ``zerort plan`` asks about: plans or a budget, and a model with its optimizer.

Plans that tables by rows cannot have are left out where all were asked about; if none is left, the user reads why: in
the words of a runtime, which would refuse it (`ModelSpec.check_rows`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TypeVar

from zerort.cli.arguments import UsageError
from zerort.cli.plan.models import Model
from zerort.cli.plan.named import frozen_in, rows_in, ties_of
from zerort.config import ZERO, Budget, Plan
from zerort.engine.sizing.requirements import ModelSpec
from zerort.errors import CallError, PlanError
from zerort.layout import Placement
from zerort.optim import SGD, Adafactor, AdamW, Lion, Optimizer

__all__ = ["asked_budget", "asked_plans", "model_spec_of"]

Asked = TypeVar("Asked", Plan, Budget)


def asked_budget(options: argparse.Namespace, model: Model) -> Budget:
    """Return the budget.

    Raises:
        UsageError: It is none, or tables by rows cannot have it.
    """
    try:
        budget = Plan.fit(device=options.device, host=options.host, nvme=options.nvme, stage=options.stage)
    except PlanError as error:
        raise UsageError(f"{error} On the command line: --host 8GiB --nvme 200GiB.") from error
    return _possible(options, model, {"budget": budget})["budget"]


def asked_plans(options: argparse.Namespace, model: Model) -> dict[str, Plan]:
    """Return plans to compare, by name: all, or the stage that was asked about.

    Raises:
        UsageError: Tables by rows can have none of them.
    """
    plans = {f"zero{stage}": Plan.zero(stage) for stage in (ZERO if options.stage is None else (options.stage,))}
    if "zero3" in plans and options.machines > 1 and not options.on_gpus:
        plans["zero3-secondary"] = Plan.zero(3, secondary="host")
    return _possible(options, model, plans)


def _possible(options: argparse.Namespace, model: Model, plans: Mapping[str, Asked]) -> dict[str, Asked]:
    """Return those that tables by rows can have."""
    refused = {name: error for name, plan in plans.items() if (error := _refusal(options, model, plan)) is not None}
    if len(refused) == len(plans):
        raise UsageError(str(list(refused.values())[-1]))
    return {name: plan for name, plan in plans.items() if name not in refused}


def _refusal(options: argparse.Namespace, model: Model, plan: Plan | Budget) -> PlanError | None:
    """Return why tables by rows cannot have a plan; None: they can.

    Raises:
        UsageError: They can have none, being what they are.
    """
    spec = model_spec_of(options, model, plan)
    try:
        spec.check_rows(has_budget=isinstance(plan, Budget), on_gpus=options.on_gpus)
    except PlanError as error:
        return error
    except CallError as error:
        raise UsageError(str(error)) from error
    return None


def model_spec_of(options: argparse.Namespace, model: Model, plan: Plan | Budget) -> ModelSpec:
    """Return what fixes how many bytes the model takes."""
    placements = plan if isinstance(plan, Plan) else Plan.zero(plan.stage)
    is_sharded = placements.gradient.placement is Placement.SHARDED  # of others there is one way to accumulate
    return ModelSpec(
        units=model,
        plan=placements,
        optimizer=_optimizer(options),
        size=options.ranks,
        frozen=frozen_in(options, model),
        gradient_dtype=options.gradient_dtype,
        equal_shards=options.on_gpus,
        over_nccl=options.on_gpus,
        micro_steps=options.micro_steps,
        accumulate=options.accumulate if is_sharded else None,
        virtual_shards=options.virtual_shards,
        ties=ties_of(options, model),
        frozen_format=options.frozen_format,
        rows=rows_in(options, model),
    )


def _optimizer(options: argparse.Namespace) -> Optimizer:
    forms = {name: form for name in ("master", "moments") if (form := getattr(options, name)) is not None}
    if forms and options.optimizer != "adamw":
        given = " and ".join(f"--{name}" for name in forms)
        raise UsageError(f"Expected {given} with --optimizer adamw, got {options.optimizer}. Leave it out.")
    made: dict[str, Optimizer] = {
        "adamw": AdamW(lr=1e-3, **forms),
        "lion": Lion(lr=1e-3),
        "sgd": SGD(lr=1e-3),
        "sgd-momentum": SGD(lr=1e-3, momentum=0.9),
        "adafactor": Adafactor(lr=1e-3),
    }
    return made[options.optimizer]
