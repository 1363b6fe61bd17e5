"""``zerort bench step``: a training step under several plans and without the runtime, in turn, in one run.

    round 1:  zero0 zero0  zero1 zero1  …  floor floor       each: all ranks meet, some steps, all ranks meet
    round 2:  zero1 zero1  …  floor floor  zero0 zero0       the order rotates

Every plan sees the same batches, so their losses have to agree: a figure is worth nothing if one of them computes
something else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from zerort import engine, trace
from zerort.cli.arguments import UsageError
from zerort.cli.bench.harness import Benchmark, Result, run_in_ranks
from zerort.cli.bench.step.contenders import Contender, FloorSteps, PlanSteps, Sample, TimedModel, time_block
from zerort.cli.bench.step.rows import BASE, FLOOR, StepRow, make_rows, parts_table, steps_legend, steps_table
from zerort.cli.bench.timing import rotated
from zerort.cli.machine import available_nbytes, library_title
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.config import Plan, Wire, format_bytes
from zerort.config.environment import read_variable
from zerort.errors import CallError
from zerort.layout import Placement
from zerort.optim import AdamW
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

__all__ = ["BLAS", "PlanOption", "StepBenchmark", "check_step_options", "run_step"]

_HEADS = 4
BLAS = "OPENBLAS_NUM_THREADS"
"""How many threads of a rank compute."""

_WARM_UP = 2
"""Steps before the first round: the first touches memory, and shows in which order units are gathered."""

_APART = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""How far losses of two plans may be apart, relatively: sums in another order, and rounded elsewhere."""
_APART_CODED = 0.1
"""The same where values travel as codes, which change them."""


def run_step(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    check_step_options(options)
    # Before NumPy is loaded there: a rank is a worker already, and more threads than cores only wait.
    return run_in_ranks(options, words, lambda world: _run(options, world), env={BLAS: "1"})


def check_step_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options that make no sense together."""
    if options.micro_steps > options.rows:
        raise UsageError(
            f"--micro-steps: Expected at most one for each of {options.rows} rows, got {options.micro_steps}. "
            "Use more --rows."
        )


def _run(options: argparse.Namespace, world: World) -> int:
    trace.enable()  # a few dozen spans per step: they say what the exposed time is spent on
    with open_group() as group:
        plans: dict[str, PlanOption] = {}
        for name in options.plans:
            plans[name] = one = PlanOption(int(name.removeprefix("zero")), group)
            if options.micro_steps > 1 and one.plan.gradient.placement is Placement.SHARDED:
                plans[f"{name}-local"] = one._replace(accumulate="local")
        return StepBenchmark(options, plans, world, base=BASE).run()


class PlanOption(NamedTuple):
    """What a contender trains with."""

    stage: int
    """ZeRO's stage."""
    group: Group
    """Its ranks."""
    accumulate: Literal["sharded", "local"] | None = None
    """How gradients of micro-steps are summed; None: as the plan has it."""
    wire: Wire | None = None
    """How values travel; None: as they are."""

    @property
    def plan(self) -> Plan:
        """What lies where."""
        return Plan.zero(self.stage)


class StepBenchmark(Benchmark):
    """Training steps under each plan, and without the runtime.

    Args:
        options: The command line.
        plans: What they train with, by the contender's name.
        world: All ranks.
        base: The contender that ratios are taken to.
    """

    name = "step"

    def __init__(
        self, options: argparse.Namespace, plans: Mapping[str, PlanOption], world: World, *, base: str
    ) -> None:
        self._plans, self._base = plans, base
        self._group = next(iter(plans.values())).group
        super().__init__(options, world=world, group=self._group)
        self._model = TimedModel(width=options.width, layers=options.layers, context=options.context, heads=_HEADS)
        self._check_room()
        self._text = ByteText(rows=options.rows * world.size, context=options.context)

    def measure(self) -> Result:
        """Time all contenders."""
        options = self.options
        with contextlib.ExitStack() as stack:
            plans = {name: self._open(one, stack) for name, one in self._plans.items()}
            contenders: dict[str, Contender] = {**plans, FLOOR: self._floor()}
            rows = make_rows(
                self.rounds(lambda number: self._round(number, contenders)),
                at_rest={name: max(self.world.all(plan.at_rest_nbytes)) for name, plan in plans.items()},
                moved={name: max(self.world.all(plan.moved_nbytes)) for name, plan in plans.items()},
                losses={name: plan.loss for name, plan in plans.items()},
                base=self._base,
            )
        title = f"{self._model.numel:,} parameters, {options.rows * options.context:,} bytes of text per rank and step"
        coded = any(one.wire is not None for one in self._plans.values())
        same, line = _compare_losses(rows, apart=max(_APART[options.dtype], _APART_CODED if coded else 0.0))
        return Result(
            tables=[steps_table(title, rows, base=self._base), parts_table(rows)],
            legend=[*steps_legend(steps=options.steps, rounds=options.rounds), line],
            figures={"rows": [row.as_json() for row in rows]},
            failed=not same,
        )

    def _check_room(self) -> None:
        """Raise, on every rank alike, if the model will not fit."""
        options, model = self.options, self._model
        tokens = options.rows * options.context // options.micro_steps
        # Per plan: parameters, gradient, two moments, a bucket or two. Activations: some 30 widths of a token per
        # block, and attention.
        activations = 4 * options.layers * tokens * (30 * options.width + 3 * _HEADS * options.context)
        needed = self.world.size * ((24 * len(self._plans) + 8) * model.numel + activations)
        room = min(self.world.all(available_nbytes()))
        if needed > 0.9 * room:
            raise CallError(
                f"Expected {format_bytes(needed)} of memory for all ranks, got {format_bytes(room)} available. "
                "Use a smaller --width, --layers, --context or --rows, or fewer plans."
            )

    def describe(self) -> dict[str, Any]:
        """Say what is trained, and on what."""
        options, mpi = self.options, self.world.mpi
        model = ("width", "layers", "context", "rows", "dtype", "steps", "rounds", "prefetch", "micro_steps")
        return {
            "mpi": None if mpi is None else library_title(mpi),
            "ranks": self.world.size,
            "group": repr(self._group),
            "blas_threads": read_variable(BLAS) or None,
            "load": os.getloadavg()[0],
            "numel": self._model.numel,
            **{name: getattr(options, name) for name in model},
        }

    def head(self, machine: dict[str, Any]) -> list[str]:
        """Say the same for people."""
        ranks, threads = machine["ranks"], machine["blas_threads"]
        lines = [
            f"# {machine['group']}; load {machine['load']:.1f} before the start",
            f"# {ranks} rank{'s' * (ranks > 1)} on {machine['cores']} cores; {BLAS}={threads or 'not set'}",
            f"# {self._model!r} in {machine['dtype']}; AdamW; prefetch {machine['prefetch']}, "
            f"micro-steps {machine['micro_steps']}",
        ]
        if not threads:
            lines.append(f"# every rank may use all cores: set {BLAS}=1 before mpirun")
        return lines

    def _open(self, one: PlanOption, stack: contextlib.ExitStack) -> PlanSteps:
        options = self.options
        rt = stack.enter_context(
            engine.open(
                plan=one.plan,
                optimizer=AdamW(lr=1e-3),
                group=one.group,
                prefetch=options.prefetch,
                micro_steps=options.micro_steps,
                accumulate=one.accumulate,
                wire=one.wire,
                loss_scale=1024.0 if options.dtype == "float16" else None,
            )
        )
        return PlanSteps(Walk(rt, self._model, self._text, dtype=options.dtype))

    def _floor(self) -> FloorSteps:
        each, rank = self.options.micro_steps, self.world.rank
        return FloorSteps(
            self._model,
            self._text,
            dtype=self.options.dtype,
            shards=range(rank * each, (rank + 1) * each),
            of=self.world.size * each,
        )

    def _round(self, number: int, contenders: dict[str, Contender]) -> dict[str, list[Sample]]:
        """Return every rank's samples by contender; none of the round that warms up."""
        found = {}
        for name in rotated(list(contenders), number):
            self.show(name)
            if number == 0:
                contenders[name].run(_WARM_UP)
            else:
                found[name] = time_block(
                    contenders[name], self._model, steps=self.options.steps, meet=self._meet, name=name
                )
        everyone = self.world.all(found)
        return {name: [one[name] for one in everyone] for name in contenders if name in found}

    def _meet(self) -> None:
        self._group.barrier().wait()


def _compare_losses(rows: list[StepRow], *, apart: float) -> tuple[bool, str]:
    """Return whether all plans have learned the same, and the line that says so."""
    losses = {row.plan: row.loss for row in rows if row.loss is not None}
    low, high = min(losses.values()), max(losses.values())
    same = high - low <= apart * high  # False for NaN
    text = ", ".join(f"{plan} {loss:.6f}" for plan, loss in losses.items())
    return same, f"# last losses: {text}" + ("" if same else ": THE PLANS DO NOT AGREE")
