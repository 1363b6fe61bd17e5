"""``zerort plan``: what a model takes of each memory under a budget, and what the disk costs each step.

    exit code 0: it fits     1: it does not, and why     2: the words make no sense

Without a budget: what it takes of memory under each plan.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from zerort.buffer import Leaves
from zerort.cli.arguments import UsageError
from zerort.cli.plan.asked import asked_budget, asked_plans, model_spec_of
from zerort.cli.plan.models import Model, read_model
from zerort.cli.plan.named import frozen_in, rows_in, ties_of
from zerort.cli.plan.predicted import show_predictions
from zerort.cli.screen import Screen, new_table
from zerort.config import Budget, Plan, format_bytes
from zerort.config.offload import OffloadOptions
from zerort.engine.model.frozen import check_frozen_format, rows_of
from zerort.engine.options import accumulation
from zerort.engine.report import MemoryReport
from zerort.engine.residence.choose import reach
from zerort.engine.sizing.forecast import MemoryForecast, Traffic
from zerort.engine.sizing.section_size import PARTS
from zerort.errors import CallError, PlanError
from zerort.layout import Placement, itemsize
from zerort.layout.dtypes import TRAINABLE
from zerort.storage import DirectoryReport, inspect
from zerort.trace.files import write_json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["run_plan"]

_WORKING = {"buckets": "gradient buckets", "gathered": "gathered units", "streaming": "chunks on their way"}


def run_plan(options: argparse.Namespace) -> int:
    """Plan, and show the plan. Return the exit code."""
    screen = Screen()
    model = read_model(options.model, dtype=options.dtype)
    if options.ranks % options.machines:
        raise UsageError(f"Expected --ranks to be a multiple of --machines, got {options.ranks} on {options.machines}.")
    if bool(options.read_speed) != bool(options.write_speed):
        raise UsageError("Expected --read-speed and --write-speed together, got one of them.")
    if options.batch is not None and options.history is None:
        raise UsageError("Expected --batch with --history, from which steps are predicted, got it without.")
    if options.virtual_shards is not None and (options.virtual_shards < options.ranks or options.micro_steps > 1):
        raise UsageError(
            f"Expected --virtual-shards to be at least --ranks ({options.ranks}), without --micro-steps, got "
            f"{options.virtual_shards} and {options.micro_steps}."
        )
    options.on_gpus, options.device = "cuda" in options.device, _capacity(options.device)
    has_budget = bool(options.device or options.host or options.nvme)
    if has_budget and options.stage is None:
        options.stage = 3
    disk = _disk(options)
    budget = asked_budget(options, model) if has_budget else None
    plans = {} if has_budget else asked_plans(options, model)
    for line in _head(options, model):
        screen.print(line)
    for unit, tensors in ties_of(options, model).items():
        for full, (home, name) in tensors.items():
            nbytes = math.prod(model[home][name].shape) * itemsize(model[home][name].dtype)
            screen.print(
                f"tied: {unit} uses {full}. Its gradients are reduced by themselves; torch's autograd sums them first, "
                f"and holds {format_bytes(nbytes)} besides, from the first use in backward to the last"
            )
    names = {name: None for tensors in model.values() for name in tensors}
    for glob in options.frozen:
        if not fnmatch.filter(names, glob):
            screen.print(f"warning: --frozen {glob!r} matches no tensor; names are like {next(iter(names), '')!r}")
    document: dict[str, Any] = {"model": options.model, "ranks": options.ranks}
    if budget is not None:
        document |= _within_budget(screen, options, model, budget, disk)
    else:
        document |= _under_every_plan(screen, options, model, plans)
    if options.history is not None:
        document |= show_predictions(screen, options, model, _layouts(document))
    if options.json is not None:
        write_json(options.json, document)
    return 1 if document.get("reason") else 0


def _layouts(document: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of memory under each plan that was shown, or within the budget, on the rank that takes most."""
    if "plans" in document:
        return {name: sum(parts.values()) for name, parts in document["plans"].items()}
    every = [sum(one["memory"].values()) for one in document.get("per_rank", ())]
    return {"budget": max(every)} if every else {}


def _within_budget(
    screen: Screen, options: argparse.Namespace, model: Model, budget: Budget, disk: DirectoryReport | None
) -> dict[str, Any]:
    """Show what a budget makes of the model, and return it for JSON."""
    screen.print(f"budget: {_budget(budget, on_gpus=options.on_gpus)}")
    document: dict[str, Any] = {"budget": asdict(budget)}
    try:
        forecasts = _forecasts(options, model, budget)
        reason = _too_full(options, forecasts, disk)
    except PlanError as error:
        forecasts, reason = [], str(error)
    if forecasts:
        document |= _show(screen, options, budget, forecasts, disk)
    screen.print(f"does not fit: {reason}" if reason else "fits")
    return document | {"fits": not reason, "reason": reason}


def _under_every_plan(
    screen: Screen, options: argparse.Namespace, model: Model, plans: Mapping[str, Plan]
) -> dict[str, Any]:
    """Show what the model takes of memory under each plan, and return it for JSON."""
    found = {}
    for name, plan in plans.items():
        forecasts = _forecasts(options, model, plan)
        found[name] = max((one.memory for one in forecasts), key=lambda one: one.in_memory)
    table = new_table("bytes of memory on the rank that takes most")
    for name in ("plan", *PARTS, "besides", "all"):
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    for name, memory in found.items():
        parts = [getattr(memory, part) for part in PARTS]
        sizes = [*parts, memory.in_memory - sum(parts), memory.in_memory]
        table.add_row(name, *map(format_bytes, sizes))
    screen.print("")
    screen.print(table)
    screen.print("besides: gradient buckets and gathered units. Activations are your program's own.")
    if "zero3-secondary" in found:
        screen.print('zero3-secondary: secondary="host", whose whole parameters ranks of a machine share.')
    if options.micro_steps > 1:
        for name in found:
            screen.print(f"{name}: {_summed(options, int(name.removeprefix('zero').removesuffix('-secondary')))}")
    screen.print("What part of it goes to a disk within a budget: --host 8GiB --nvme 200GiB")
    told = (*PARTS, *_WORKING, "host_copy")
    return {"plans": {name: {part: getattr(memory, part) for part in told} for name, memory in found.items()}}


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What one rank holds and moves."""

    memory: MemoryReport
    below: dict[str, int]
    traffic: Traffic

    @property
    def in_memory(self) -> int:
        """Bytes of memory, at rest and besides."""
        return self.memory.in_memory


def _micro_steps(options: argparse.Namespace) -> int:
    """Return how many micro-batches each rank computes in a step."""
    if options.virtual_shards is None:
        return int(options.micro_steps)
    return Leaves(options.virtual_shards, options.ranks).most


def _forecasts(options: argparse.Namespace, model: Model, plan: Plan | Budget) -> list[_Forecast]:
    """Return every rank's forecast."""
    memory_forecast = MemoryForecast.of(
        model_spec_of(options, model, plan),
        plan,
        offload=_offload(),
        prefetch=options.prefetch,
        buckets=options.buckets,
        one_memory=options.machines == 1 and not options.on_gpus,
        reach=reach(on_gpus=options.on_gpus),
    )
    return [
        _Forecast(
            memory_forecast.memory(rank),
            memory_forecast.on_disk(rank),
            memory_forecast.traffic(rank, passes=2 * _micro_steps(options)),
        )
        for rank in range(options.ranks)
    ]


def _summed(options: argparse.Namespace, stage: int) -> str:
    """Say how a plan sums the gradients of several micro-steps."""
    plan = Plan.zero(stage)
    is_sharded = plan.gradient.placement is Placement.SHARDED  # of others there is one way to accumulate
    how = options.accumulate if is_sharded else None
    return accumulation(plan, micro_steps=options.micro_steps, accumulate=how)


def _capacity(given: Sequence[int | str]) -> int:
    """Return the budget of GPU memory among what ``--device`` was given: sizes, and words."""
    sizes = [one for one in given if not isinstance(one, str)]
    if len(sizes) > 1 or {"cuda", "host"} <= {*given}:
        raise UsageError(
            f"Expected --device once as cuda or host, and once as a size; got {', '.join(map(str, given))}."
        )
    return sizes[0] if sizes else 0


def _offload() -> OffloadOptions:
    """Return how values will stream, if the environment stays as it is."""
    try:
        return OffloadOptions.from_environment()
    except CallError as error:
        raise UsageError(str(error)) from error


def _disk(options: argparse.Namespace) -> DirectoryReport | None:
    """Return what the disk can do, as measured or as told; None if nobody has asked."""
    measured = inspect(options.scratch, what="a sample") if options.scratch is not None else None
    if not options.read_speed:
        return measured
    told = {"read_gbs": options.read_speed, "write_gbs": options.write_speed}
    if measured is not None:
        return replace(measured, **told)
    return DirectoryReport(path="", free_nbytes=None, direct=True, alignment=None, **told)


def _too_full(options: argparse.Namespace, forecasts: Sequence[_Forecast], disk: DirectoryReport | None) -> str:
    """Return why the disk cannot take what it should; empty if it can, or if nobody knows."""
    each = options.ranks // options.machines
    needed = sum(sorted((one.memory.nvme for one in forecasts), reverse=True)[:each])
    if disk is None or disk.free_nbytes is None or needed <= disk.free_nbytes:
        return ""
    return (
        f"{each} rank{'s' * (each > 1)} would put {format_bytes(needed)} into {disk.path}, which has "
        f"{format_bytes(disk.free_nbytes)} free. Free some, or name another disk."
    )


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


def _moments(options: argparse.Namespace) -> str | None:
    """Return the form of the moments, and that it changes results."""
    return "int8 (approximate)" if options.moments == "int8" else options.moments


def _head(options: argparse.Namespace, model: Model) -> list[str]:
    specs = [spec for tensors in model.values() for spec in tensors.values()]
    numel = sum(math.prod(spec.shape) for spec in specs)
    dtypes = ", ".join(dict.fromkeys(spec.dtype for spec in specs))
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)}"
    stage = "" if options.stage is None else f", ZeRO-{options.stage}"
    forms = [f"{form} {what}s" for what, form in (("master", options.master), ("moment", _moments(options))) if form]
    form = f" with {' and '.join(forms)}" if forms else ""
    odd = [spec.dtype for spec in specs if spec.dtype not in TRAINABLE]
    cold = f"; {len(odd)} of them stay as they are: no optimizer trains {', '.join(dict.fromkeys(odd))}" if odd else ""
    summed = f", {options.micro_steps} micro-steps" if options.micro_steps > 1 else ""
    if options.stage is not None:
        summed = f", {_summed(options, options.stage)}" if summed else ""
    if options.virtual_shards:
        summed = f", {_micro_steps(options)} micro-steps of {options.virtual_shards} virtual shards"
    lines = [
        f"model: {options.model}: {numel:,} parameters in {len(specs)} tensors of {len(model)} units, {dtypes}{cold}",
        f"training: {options.optimizer}{form}{stage}{summed} on {ranks}, {options.machines} "
        f"machine{'s' * (options.machines > 1)}{', a GPU each' if options.on_gpus else ''}",
    ]
    if options.rows:
        tables = [model[unit][name] for unit, names in rows_in(options, model).items() for name in names]
        count = sum(math.prod(spec.shape) for spec in tables)
        lines.append(
            f"by rows: {count:,} parameters in {len(tables)} tables; what a step gathers, reduces, reads and writes of "
            "them depends on its batch, and is not counted"
        )
    return lines if options.frozen_format is None else [*lines, _at_rest(options, model)]


def _at_rest(options: argparse.Namespace, model: Model) -> str:
    """Say what frozen parameters rest in.

    Raises:
        UsageError: They cannot.
    """
    is_frozen, coded = frozen_in(options, model), []
    try:
        check_frozen_format(options.frozen_format)
        for tensors in model.values():
            for name, spec in tensors.items():
                if is_frozen(name) and rows_of(options.frozen_format, spec.dtype, what=repr(name)) is not None:
                    coded.append(math.prod(spec.shape))
    except (CallError, PlanError) as error:
        raise UsageError(str(error)) from error
    if not coded:
        return f"warning: --frozen-format {options.frozen_format} codes nothing: no tensor of floats is --frozen"
    return f"frozen: {sum(coded):,} parameters in {len(coded)} tensors rest in {options.frozen_format} (approximate)"


def _budget(budget: Budget, *, on_gpus: bool) -> str:
    if on_gpus:
        sizes = f"{format_bytes(budget.device)} of GPU memory, {format_bytes(budget.host)} of host memory"
        return f"{sizes} and {format_bytes(budget.nvme)} of disk per rank"
    both = budget.device and budget.host
    note = " (device and host are one memory on a machine without a GPU)" if both else ""
    return f"{format_bytes(budget.memory)} of memory{note} and {format_bytes(budget.nvme)} of disk per rank"


def _show(
    screen: Screen,
    options: argparse.Namespace,
    budget: Budget,
    forecasts: Sequence[_Forecast],
    disk: DirectoryReport | None,
) -> dict[str, Any]:
    """Show the forecast of the rank that takes most, and return all of them for JSON."""
    fullest = max(range(len(forecasts)), key=lambda rank: (forecasts[rank].in_memory, forecasts[rank].memory.nvme))
    screen.print("")
    screen.print(_table(f"bytes on rank {fullest}, which takes most", budget, forecasts[fullest]))
    each = options.ranks // options.machines
    read, written = (each * max(one.traffic[way] for one in forecasts) for way in range(2))
    seconds = disk.seconds(read=read, written=written) if disk is not None else None
    if read or written:
        line = f"disk: each step reads {format_bytes(read)} and writes {format_bytes(written)} on each machine"
        if disk is not None and seconds is not None:
            line += f": {seconds:.2f} s at {disk.read_gbs:.2f} GB/s read, {disk.write_gbs:.2f} GB/s written"
        else:
            line += ". --scratch DIR measures how long that takes"
        screen.print(line)
    else:
        screen.print("disk: nothing goes there")
    return {
        "per_rank": [
            {
                "memory": {name: getattr(one.memory, name) for name in (*PARTS, *_WORKING)},
                "nvme": one.below,
                "step": one.traffic._asdict(),
            }
            for one in forecasts
        ],
        "step": {"read": read, "written": written, "seconds": seconds, "per": "machine"},
        "disk": None if disk is None else {"read_gbs": disk.read_gbs, "write_gbs": disk.write_gbs},
    }


def _table(title: str, budget: Budget, forecast: _Forecast) -> Table:
    table = new_table(title)
    for name in ("", "memory", "nvme"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True, min_width=10 if name else 0)
    for part in PARTS:
        table.add_row(part, format_bytes(getattr(forecast.memory, part)), format_bytes(forecast.below[part]))
    for name, text in _WORKING.items():
        table.add_row(text, format_bytes(getattr(forecast.memory, name)), "")
    table.add_row("all", format_bytes(forecast.in_memory), format_bytes(forecast.memory.nvme), style="bold")
    table.add_row("budget", format_bytes(budget.memory), format_bytes(budget.nvme))
    return table
