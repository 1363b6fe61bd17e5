"""A torch model's training step with zerort, DDP, FSDP2 and DeepSpeed, and without any of them, in turn, in one run.

    python benchmarks/bench_torch_step.py                # 2 ranks, 33.6M parameters, every method: some 7 minutes
    python benchmarks/bench_torch_step.py --methods single,fsdp2,zero3 --rounds 15
    python benchmarks/bench_torch_step.py --clip         # every method clips by the global norm, not zero3-clip alone
    python benchmarks/bench_torch_step.py --ranks 8 --methods single,ddp,fsdp2,zero3

First each method alone: its start, its memory, and its first losses against a single process. Then rounds in which
all of them take turns of a few steps. Their ranks stay loaded meanwhile: a turn that need not start anything is short,
so the noise of the machine falls on all methods alike. A method that is not installed is left out and named. Ctrl-C in
a round ends with the rounds before it.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from peers.figures import Alone, Timed, as_json, legend, make_rows, methods_table, targets, targets_table
from peers.jobs import Job, JobFailed, Turn, peak_pss
from peers.work import CLIP_NORM, CONFIGS, METHODS, REFERENCE, Method
from zerort.cli.machine import available_nbytes, describe_machine, machine_lines
from zerort.cli.screen import Screen
from zerort.trace.files import plain, write_json

WARM_UP = 4
"""Steps that a job takes before it is timed: they touch memory, and show in which order units are needed."""


def main() -> int:
    """Run the benchmark; return 1 if a method failed or has learned something else."""
    options = parse()
    bench = Bench(options)
    machine = {**describe_machine(), "load_before": os.getloadavg(), **vars(options)}
    names = [name for name in options.methods if not METHODS[name].missing]
    for line in bench.head(machine):
        bench.screen.print(line)
    if "single" not in names:
        sys.exit("bench_torch_step.py needs torch, and the method `single`: pip install torch")
    compile_packages()
    references = {clip: bench.reference(clip) for clip in dict.fromkeys(map(bench.clip_of, names))}
    alone = {name: found for name in names if (found := bench.alone(name)) is not None}
    expected = {name: references[bench.clip_of(name)] for name in alone}
    rounds = bench.rounds(list(alone))
    machine["load_after"] = os.getloadavg()
    rows = make_rows({name: METHODS[name].title for name in alone}, alone, rounds, expected)
    goals = targets(rows, ranks=options.ranks, clipped=options.clip) if options.config == "gpt30m" else []
    bench.screen.print(methods_table(bench.title(), rows))
    if goals:
        bench.screen.print(targets_table(goals))
    for line in legend(steps=options.steps, rounds=len(rounds), checked=options.check, persistent=bench.persistent):
        bench.screen.print(line)
    bench.screen.print(f"# load: {_load(machine['load_before'])} before, {_load(machine['load_after'])} after")
    if options.json is not None:
        document: dict[str, Any] = {"bench": "torch step", "machine": machine, "rows": [as_json(row) for row in rows]}
        document["targets"] = [{**one._asdict(), "met": one.met} for one in goals]
        document["losses"] = {name: {"got": alone[name].losses, "expected": expected[name]} for name in alone}
        write_json(options.json, plain(document))
    wrong = [row.title for row in rows if row.apart is not None and not row.apart <= 1e-4]  # True for NaN
    if wrong:
        bench.screen.print(f"# LEARNED SOMETHING ELSE: {', '.join(wrong)}")
    if bench.failed:
        bench.screen.print(f"# FAILED, see above: {', '.join(METHODS[name].title for name in bench.failed)}")
    return 1 if wrong or bench.failed else 0


def compile_packages() -> None:
    """Compile our packages to bytecode, as pip does with those that it installs: a checkout may have none."""
    for name in ("zerort", "zerort_torch"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            compileall.compile_dir(Path(spec.origin).parent, quiet=2)


class Bench:
    """One run: what was asked for, and the jobs it takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.screen = Screen()
        self.config = CONFIGS[options.config]
        self.persistent = True
        """Whether all jobs live at once in the rounds."""
        self.failed: list[str] = []

    def title(self) -> str:
        config = self.config
        clipped = f", clipped to a norm of {CLIP_NORM}" if self.options.clip else ""
        return (
            f"{self.options.config}: {config.layers} blocks of width {config.width}, {config.rows} rows of "
            f"{config.context} tokens per rank and step, float32, AdamW{clipped}; {self.options.ranks} ranks"
        )

    def head(self, machine: dict[str, Any]) -> list[str]:
        from importlib.metadata import version

        versions = {need: version(need) for need in ("torch", "deepspeed") if not Method("", "", (need,)).missing}
        left_out = {name: METHODS[name].missing for name in self.options.methods if METHODS[name].missing}
        return [
            *machine_lines(machine),
            f"# {', '.join(f'{name} {text}' for name, text in versions.items())}; {self.options.ranks} ranks on "
            f"{machine['cores']} cores, one thread each; load {_load(machine['load_before'])} before the start",
            *(
                f"# left out: {METHODS[name].title} (not installed: {', '.join(gone)})"
                for name, gone in left_out.items()
            ),
        ]

    def clip_of(self, name: str) -> float | None:
        """Return the norm that a method scales its gradients to."""
        return CLIP_NORM if self.options.clip else METHODS[name].clip

    def job(self, name: str) -> Job:
        return self._start(name, METHODS[name], self.clip_of(name))

    def _start(self, name: str, method: Method, clip: float | None) -> Job:
        return Job(name, method, config=self.options.config, ranks=self.options.ranks, clip=clip)

    def reference(self, clip: float | None) -> list[float]:
        """Return the losses of one process that takes everybody's batches."""
        self.say("reference: one process, all ranks' batches" + ("" if clip is None else f", clipped to {clip}"))
        with self._start("reference", REFERENCE, clip) as job:
            job.wait_until_built()
            return job.take_steps(self.options.check).losses

    def alone(self, name: str) -> Alone | None:
        """Start a method while no other lives; return what it takes, or None if it fails."""
        try:
            with self.job(name) as job, peak_pss(job) as pss:
                start = job.wait_until_built()
                turn = job.take_steps(self.options.check)
                seen = pss[0]
        except JobFailed as failure:
            self.say(f"failed: {failure}")
            self.failed.append(name)
            return None
        self.say(f"alone: {METHODS[name].title}, {seen / 2**20:.0f} MiB, loss {turn.losses[-1]:.6f}")
        self.persistent = self.persistent and self._fits(seen)
        return Alone(start, seen, turn.rss, turn.losses)

    def rounds(self, names: list[str]) -> list[dict[str, Timed]]:
        """Return each method's turn, for each round; the order rotates."""
        options = self.options
        found: list[dict[str, Timed]] = []
        with contextlib.ExitStack() as stack, self.screen.bar(options.rounds * len(names)) as bar:
            jobs = {name: stack.enter_context(self._ready(name)) for name in names} if self.persistent else {}
            for at in range(options.rounds):
                first = at % len(names)
                turns: dict[str, Timed] = {}
                try:
                    for name in names[first:] + names[:first]:
                        bar.step(f"round {at + 1} {name}")
                        turns[name] = _timed(self._turn(name, jobs.get(name)))
                        bar.step(f"round {at + 1} {name}", advance=1)
                except KeyboardInterrupt:
                    if not found:
                        raise
                    break
                found.append({name: turns[name] for name in names})
                self.say(f"round {at + 1}: " + ", ".join(f"{name} {turns[name].ms:.0f}" for name in names))
        return found

    def say(self, line: str) -> None:
        """Tell how far it is: on stderr, so that stdout holds the tables alone."""
        print(f"# {line}", file=sys.stderr, flush=True)

    def _fits(self, pss: int) -> bool:
        return pss * len(self.options.methods) < 0.8 * available_nbytes()

    def _ready(self, name: str) -> Job:
        job = self.job(name)
        try:
            job.wait_until_built()
            job.take_steps(WARM_UP)
        except BaseException:
            job.close()
            raise
        return job

    def _turn(self, name: str, job: Job | None) -> Turn:
        if job is not None:
            return job.take_steps(self.options.steps)
        with self._ready(name) as own:
            return own.take_steps(self.options.steps)


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes of each method (default: %(default)s)")
    add("--rounds", type=int, default=9, help="turns of each method (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps of a turn (default: %(default)s)")
    add("--check", type=int, default=6, metavar="STEPS", help="steps whose losses are compared (default: %(default)s)")
    add("--methods", default=",".join(METHODS), help="which, by commas (default: %(default)s)")
    add("--config", choices=CONFIGS, default="gpt30m", help="sizes (default: %(default)s)")
    add("--clip", action="store_true", help=f"scale gradients to a global norm of {CLIP_NORM}")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    if unknown := [name for name in options.methods if name not in METHODS]:
        parser.error(f"argument --methods: expected names out of {', '.join(METHODS)}, got {', '.join(unknown)}")
    if "single" not in options.methods:
        options.methods.insert(0, "single")
    if options.clip:
        options.methods = [name for name in options.methods if name != "zero3-clip"]  # zero3 is
    for name in ("ranks", "rounds", "steps", "check"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: expected a whole number of at least 1, got {getattr(options, name)}")
    return options


def _timed(turn: Turn) -> Timed:
    return Timed(1e3 * turn.seconds, 1e3 * turn.cpu)


def _load(average: tuple[float, float, float]) -> str:
    return f"{average[0]:.1f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobFailed as failure:
        sys.exit(f"bench_torch_step.py: {failure}")
