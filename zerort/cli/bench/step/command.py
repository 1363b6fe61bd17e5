"""``zerort bench step``: a training step under several plans and without the runtime, in turn, in one run.

    round 1:  zero0 zero0  zero1 zero1  …  floor floor       each: all ranks meet, some steps, all ranks meet
    round 2:  zero1 zero1  …  floor floor  zero0 zero0       the order rotates

Every plan sees the same batches, so their losses have to agree: a figure is worth nothing if one of them computes
something else.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from pathlib import Path
from typing import Any

from zerort import trace
from zerort.cli.arguments import UsageError
from zerort.cli.bench.step.contenders import Contender, FloorSteps, PlanSteps, Sample, TimedModel, time_block
from zerort.cli.bench.step.rows import FLOOR, StepRow, make_rows, parts_table, steps_legend, steps_table
from zerort.cli.machine import available_nbytes, describe_machine, library_title, machine_lines
from zerort.cli.ranks import run_ranks
from zerort.cli.screen import Screen
from zerort.cli.world import World
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import Plan, format_bytes
from zerort.engine import open_runtime
from zerort.errors import CallError
from zerort.optim import AdamW
from zerort.trace.files import write_json
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

__all__ = ["run_step"]

_HEADS = 4
_BLAS = "OPENBLAS_NUM_THREADS"
_WARM_UP = 2
"""Steps before the first round: the first touches memory, and shows in which order units are gathered."""

_APART = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""How far losses of two plans may be apart, relatively: sums in another order, and rounded elsewhere."""


def run_step(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark, in ranks that are started here unless a launcher has done so. Return the exit code."""
    if options.micro_steps > options.rows:
        raise UsageError(
            f"--micro-steps: Expected at most one for each of {options.rows} rows, got {options.micro_steps}. "
            "Use more --rows."
        )
    if launched_size() is None:
        # Before NumPy is loaded there: a rank is a worker already, and more threads than cores only wait.
        found = run_ranks(options.ranks or 2, ["-m", "zerort", *words, *Screen.words()], env={_BLAS: "1"})
        return found.code if found.code in (0, 2) else 1
    world = World()
    if options.ranks not in (None, world.size):
        raise UsageError(f"--ranks: Expected the {world.size} ranks that the launcher started, got {options.ranks}.")
    trace.enable()  # a few dozen spans per step: they say what the exposed time is spent on
    with open_group() as group:
        return _Bench(options, group, world, Screen(options.screen, shown=world.rank == 0)).run()


class _Bench:
    """One run of the benchmark, on one rank."""

    def __init__(self, options: argparse.Namespace, group: Group, world: World, screen: Screen) -> None:
        self._options = options
        self._group = group
        self._world = world
        self._screen = screen
        self._model = TimedModel(width=options.width, layers=options.layers, context=options.context, heads=_HEADS)
        self._check_room()
        self._text = ByteText(rows=options.rows * world.size, context=options.context)

    def run(self) -> int:
        options, screen = self._options, self._screen
        machine = self._describe()
        for line in self._head(machine):
            screen.print(line)
        with contextlib.ExitStack() as stack:
            plans = {name: self._open(name, stack) for name in options.plans}
            rounds = self._measure({**plans, FLOOR: self._floor()})
            rows = make_rows(
                rounds,
                resting={name: max(self._world.all(plan.resting_nbytes)) for name, plan in plans.items()},
                moved={name: max(self._world.all(plan.moved_nbytes)) for name, plan in plans.items()},
                losses={name: plan.loss for name, plan in plans.items()},
            )
        title = f"{self._model.numel:,} parameters, {options.rows * options.context:,} bytes of text per rank and step"
        screen.print(steps_table(title, rows))
        screen.print(parts_table(rows))
        for line in steps_legend(steps=options.steps, rounds=options.rounds):
            screen.print(line)
        same = self._same_losses(rows)
        self._save(machine, rows)
        return 0 if same else 1

    def _check_room(self) -> None:
        """Raise, on every rank alike, if the model will not fit."""
        options, model = self._options, self._model
        tokens = options.rows * options.context // options.micro_steps
        # Per plan: parameters, gradient, two moments, a bucket or two. Activations: some 30 widths of a token per
        # block, and attention.
        activations = 4 * options.layers * tokens * (30 * options.width + 3 * _HEADS * options.context)
        needed = self._world.size * ((24 * len(options.plans) + 8) * model.numel + activations)
        room = min(self._world.all(available_nbytes()))
        if needed > 0.9 * room:
            raise CallError(
                f"Expected {format_bytes(needed)} of memory for all ranks, got {format_bytes(room)} available. "
                "Use a smaller --width, --layers, --context or --rows, or fewer --plans."
            )

    def _describe(self) -> dict[str, Any]:
        options, mpi = self._options, self._world.mpi
        model = ("width", "layers", "context", "rows", "dtype", "steps", "rounds", "prefetch", "micro_steps")
        return {
            **describe_machine(),
            "mpi": None if mpi is None else library_title(mpi),
            "ranks": self._world.size,
            "group": repr(self._group),
            "blas_threads": os.environ.get(_BLAS),
            "load": os.getloadavg()[0],
            "numel": self._model.numel,
            **{name: getattr(options, name) for name in model},
        }

    def _head(self, machine: dict[str, Any]) -> list[str]:
        ranks, threads = machine["ranks"], machine["blas_threads"]
        lines = [
            *machine_lines(machine),
            f"# {machine['group']}; load {machine['load']:.1f} before the start",
            f"# {ranks} rank{'s' * (ranks > 1)} on {machine['cores']} cores; {_BLAS}={threads or 'not set'}",
            f"# {self._model!r} in {machine['dtype']}; AdamW; prefetch {machine['prefetch']}, "
            f"micro-steps {machine['micro_steps']}",
        ]
        if not threads:
            lines.append(f"# every rank may use all cores: set {_BLAS}=1 before mpirun")
        return lines

    def _open(self, name: str, stack: contextlib.ExitStack) -> PlanSteps:
        options = self._options
        rt = stack.enter_context(
            open_runtime(
                plan=Plan.zero(int(name.removeprefix("zero"))),
                optimizer=AdamW(lr=1e-3),
                group=self._group,
                prefetch=options.prefetch,
                micro_steps=options.micro_steps,
                loss_scale=1024.0 if options.dtype == "float16" else None,
            )
        )
        return PlanSteps(Walk(rt, self._model, self._text, dtype=options.dtype))

    def _floor(self) -> FloorSteps:
        each, rank = self._options.micro_steps, self._world.rank
        return FloorSteps(
            self._model,
            self._text,
            dtype=self._options.dtype,
            shards=range(rank * each, (rank + 1) * each),
            of=self._world.size * each,
        )

    def _measure(self, contenders: dict[str, Contender]) -> list[dict[str, list[Sample]]]:
        """Return every rank's samples, by contender, for each round."""
        options, names = self._options, list(contenders)
        rounds = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self._screen.bar(options.rounds * len(names)) as bar:
                for name in names:
                    bar.step(f"warm up {name}")
                    contenders[name].run(_WARM_UP)
                for at in range(options.rounds):
                    turn = at % len(names)
                    found: dict[str, Sample] = {}
                    for name in names[turn:] + names[:turn]:
                        bar.step(f"round {at + 1} {name}")
                        found[name] = time_block(
                            contenders[name], self._model, steps=options.steps, meet=self._meet, name=name
                        )
                        bar.step(f"round {at + 1} {name}", advance=1)
                    everyone = self._world.all(found)
                    rounds.append({name: [one[name] for one in everyone] for name in names})
        finally:
            if collecting:
                gc.enable()
        return rounds

    def _meet(self) -> None:
        self._group.barrier().wait()

    def _same_losses(self, rows: list[StepRow]) -> bool:
        """Say whether all plans have learned the same, and print it."""
        losses = {row.plan: row.loss for row in rows if row.loss is not None}
        low, high = min(losses.values()), max(losses.values())
        same = high - low <= _APART[self._options.dtype] * high  # False for NaN
        text = ", ".join(f"{plan} {loss:.6f}" for plan, loss in losses.items())
        self._screen.print(f"# last losses: {text}" + ("" if same else ": THE PLANS DO NOT AGREE"))
        return same

    def _save(self, machine: dict[str, Any], rows: list[StepRow]) -> None:
        options = self._options
        if options.trace is not None:
            self._group.save_trace(options.trace)
        if options.json is not None and self._world.rank == 0:
            document = {"bench": "step", "machine": machine, "rows": [row.as_json() for row in rows]}
            write_json(Path(options.json), document)
