"""What the training examples share: their options, and what rank 0 shows while they train."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import zerort as zr
from zerort.comm.bootstrap.environment import sees_terminal
from zerort.config import format_bytes

__all__ = ["PLANS", "Screen", "add_options", "check_options", "console_of", "whole"]

PLANS = {f"zero{stage}": zr.Plan.zero(stage) for stage in range(4)}


def console_of(rt: zr.Runtime) -> Console:
    """Return where rank 0 writes, and the others do not; a launcher's pseudo-terminal before a pipe is no terminal."""
    live = sees_terminal(sys.stdout) or os.environ.get("FORCE_COLOR")
    return Console(highlight=False, soft_wrap=True, quiet=rt.rank != 0, force_terminal=None if live else False)


class Screen:
    """What rank 0 shows: a live bar on a terminal, a line now and then elsewhere; a summary and a plot at the end.

    Args:
        rt: What trains.
        options: What `parse` returned.
        model: What is trained; its name is shown.
        tokens: Of a step, over all ranks.
        position: The step it goes on from.
        per: What a loss is the mean of.
    """

    def __init__(
        self,
        rt: zr.Runtime,
        options: argparse.Namespace,
        *,
        model: object,
        tokens: int,
        position: int,
        per: str = "byte",
    ) -> None:
        self.rt, self.options, self.model, self.tokens, self.position = rt, options, model, tokens, position
        self.per = per
        self.losses: list[float] = []  # of this rank, since the last look
        self.history: list[tuple[int, float]] = []  # step, mean bits of all ranks
        self.report: zr.StepReport | None = None
        self.skipped = 0
        self.began, self.seconds = time.perf_counter(), 0.0
        self.console = console_of(rt)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Screen:
        ranks = "1 rank" if self.rt.size == 1 else f"{self.rt.size} ranks"
        self.say(f"{self.model} in {self.options.dtype}, {self.options.plan} on {ranks} ({self.rt.group.kind})")
        if self.position:
            self.say(f"resumed from {self.options.resume} at step {self.position}")
        if self.bar:
            self.bar.add_task("", total=self.options.steps)
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar:
            self.bar.stop()  # gives the cursor back

    def say(self, line: str) -> None:
        """Print on rank 0."""
        self.console.print(line, markup=False)

    def show(self, done: int, loss: float, report: zr.StepReport) -> None:
        """Take note of a step. Now and then all ranks average their losses, and rank 0 shows how things stand."""
        self.losses.append(loss)
        self.report = report
        self.skipped += not report.updated
        steps = self.options.steps
        if done % max(1, steps // 60) and done not in (self.position + 1, steps):
            return
        mean = self.rt.group.all_reduce(np.array([np.mean(self.losses)]), name="loss").wait()[0] / self.rt.size
        self.losses.clear()
        self.history.append((done, mean / math.log(2)))
        self.seconds = time.perf_counter() - self.began
        rate = (done - self.position) * self.tokens / self.seconds
        memory = format_bytes(self.rt.memory().at_rest)
        line = f"loss {self.history[-1][1]:5.3f} bits/{self.per}  {rate:7,.0f} tokens/s  {memory} on this rank"
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, description=line, refresh=True)
        elif len(self.history) % 4 == 1 or done == steps:
            self.say(f"step {done:5}  {'█' * (20 * done // steps):20}  {line}")

    def summary(self) -> None:
        """Say what was learned, what it took and where it is; draw the plot."""
        options, memory = self.options, self.rt.memory()
        parts = ", ".join(
            f"{part} {format_bytes(getattr(memory, part))}" for part in ("parameter", "gradient", "state")
        )
        plan = PLANS[options.plan].describe(gpus=not self.rt.group.device.in_host_memory)
        self.say(f"\n{options.plan}: {plan}\nat rest on this rank: {parts}")
        if self.report is None:
            self.say(f"nothing to do: the checkpoint is at step {self.position}; ask for more with --steps")
            return
        (_, high), (last, _) = self.history[0], self.history[-1]
        low = np.mean([bits for _, bits in self.history[-5:]])  # batches differ: a single one says little
        self.say(f"loss: from {high:.2f} to {low:.2f} bits per {self.per} in {self.seconds:.1f} s, up to step {last}")
        if self.skipped:
            self.say(f"{self.skipped} steps changed nothing, as with float16 while the loss scale is being found")
        if self.report.digest:
            self.say(f"digest of the parameters: {self.report.digest}")
        if options.save:
            self.say(f"checkpoint: {options.save} (go on with --resume {options.save} --steps {2 * last})")
        if options.plot and self.rt.rank == 0:
            self.draw(options.plot)
            self.say(f"plot: {options.plot}")

    def draw(self, path: Path) -> None:
        """Write the loss over the steps as a picture."""
        import matplotlib

        matplotlib.use("Agg")  # no screen needed
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(*zip(*self.history, strict=True))
        axes.set(xlabel="step", ylabel=f"bits per {self.per}", title=f"{self.options.plan}, ranks: {self.rt.size}")
        axes.grid(visible=True, alpha=0.3)
        figure.savefig(path, dpi=130)


def add_options(parser: argparse.ArgumentParser, *, steps: int, batch: int, lr: float) -> None:
    """Add the options that all examples have."""
    add = parser.add_argument
    add("--plan", choices=PLANS, default="zero3", help="what is sharded (default: %(default)s)")
    add("--steps", type=whole, default=steps, help="train up to this step (default: %(default)s)")
    add("--batch", type=whole, default=batch, help="rows of a step, over all ranks (default: %(default)s)")
    add("--lr", type=float, default=lr, help="largest learning rate (default: %(default)s)")
    add("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32", help="of the parameters")
    add("--save", type=Path, metavar="DIR", help="write a checkpoint at the end (default: where --resume is)")
    add("--save-every", type=whole, default=200, metavar="STEPS", help="and so often (default: %(default)s)")
    add("--resume", type=Path, metavar="DIR", help="go on from the checkpoint there, if there is one")
    add("--plot", type=Path, metavar="FILE", help="draw the loss: loss.png, .svg or .pdf")
    add("--trace", type=Path, metavar="FILE", help="write what every rank did and when, for ui.perfetto.dev")
    add("--sample", type=functools.partial(whole, least=0), default=80, metavar="BYTES", help="let it write at the end")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Say which of those options cannot be, before anything is computed."""
    if not 0 < options.lr < 1:
        parser.error(f"argument --lr: expected a number between 0 and 1, got {options.lr}")
    for name in ("plot", "trace"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            parser.error(f"argument --{name}: there is no directory {path.absolute().parent}")
    if options.plot and options.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --plot: expected a file that ends in .png, .svg or .pdf, got {options.plot}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, which is not installed: pip install matplotlib")
    options.save = options.save or options.resume


def whole(text: str, *, least: int = 1) -> int:
    """Return a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)
