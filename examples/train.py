"""Train a byte-level language model in plain NumPy, sharded over ranks.

    python examples/train.py                            # one process
    mpirun -n 8 python examples/train.py                # eight, ZeRO-3: each holds an eighth of everything
    mpirun -n 8 python examples/train.py --plan zero0   # the same training, with everything on every rank

A small transformer learns to guess the next byte of Python's standard library. Each of its units (the embedding, the
blocks, the head) is whole only while it computes: gathered, used, released. Its gradients are summed into shards while
the next unit computes, and each rank updates what it owns. With `--resume` it goes on where it was, under another plan
or on another number of ranks if you like.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait

import argparse
import functools
import importlib.util
import math
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import zerort as zr
import zerort_numpy as zn
from zerort import checkpoint
from zerort.config import format_bytes
from zerort.workload import ByteModel, ByteText

PLANS = {f"zero{stage}": zr.Plan.zero(stage) for stage in range(4)}
SHARDS = 8  # with --deterministic a batch is always computed in eight parts, however many ranks share them


def main() -> None:
    """Open a runtime, register the model's units, train them."""
    options = parse()
    model = ByteModel(width=options.width, layers=options.layers)
    text = ByteText(rows=options.batch, context=model.context)
    if options.trace:
        zr.trace.enable()
    schedule = zr.warmup_cosine(options.lr, warmup=min(30, options.steps), total=options.steps)
    with zr.open(
        plan=PLANS[options.plan],
        optimizer=zr.AdamW(lr=schedule, betas=(0.9, 0.98), weight_decay=0.01),
        groups=[zr.ParameterGroup(("*.b_*", "*.norm*"), weight_decay=0.0)],
        clip_norm=1.0,
        gradient_dtype="float32",
        loss_scale=zr.LossScale() if options.dtype == "float16" else None,
        deterministic=options.deterministic,
        virtual_shards=SHARDS if options.deterministic else None,
    ) as rt:
        units = {}
        for name in model.units:  # all ranks make the same first values; each keeps its shard of them
            first = {key: value.astype(options.dtype) for key, value in model.init(name).items()}
            units[name] = zn.register(rt, name, first)
        position = 0
        if options.resume and checkpoint.exists(options.resume):
            position = rt.load(options.resume).progress["position"]

        with Screen(rt, options, model=model, position=position) as screen:
            for step in range(position, options.steps):
                loss = learn(rt, units, model, text, step=step)
                report = rt.step()
                screen.show(step + 1, loss, report)
                if options.save and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
                    rt.save(options.save, progress={"position": step + 1})
        screen.summary()
        if options.sample:
            screen.say(f"it writes: {sample(units, model, prompt=b'    def ', length=options.sample)!r}")
        if options.trace and (path := rt.group.save_trace(options.trace)):
            screen.say(f"trace: {path} (open it in ui.perfetto.dev)")


def learn(rt: zr.Runtime, units: dict[str, zn.NumpyUnit], model: ByteModel, text: ByteText, *, step: int) -> float:
    """Hand in the gradients of this rank's part of a batch, and return its part of the mean loss in nats."""
    losses, saved = [], {}
    for shard in rt.shards:
        x, y = text.batch(step, shard, of=rt.shard_count)
        weight = rt.shard_count * len(x) / text.rows  # a shard with fewer rows counts for less
        for name, unit in units.items():
            with unit.gathered() as p:
                x, saved[name] = model.forward(name, p, x)
        loss, slope = model.loss(x, y, weight=weight * rt.loss_scale)
        for name, unit in reversed(units.items()):
            with unit.gathered() as p:
                slope, grads = model.backward(name, p, saved.pop(name), slope)
            unit.reduce(grads)
        losses.append(loss / rt.loss_scale)
    return float(np.mean(losses))


def sample(units: dict[str, zn.NumpyUnit], model: ByteModel, *, prompt: bytes, length: int) -> str:
    """Let the model write. All ranks do the same: a gather needs all of them."""
    text, rng = list(prompt), np.random.default_rng(0)
    for _ in range(length):
        x = np.array([text[-model.context :]], np.uint8)
        for name, unit in units.items():
            with unit.gathered() as p:
                x, _ = model.forward(name, p, x)
        odds = np.exp((x[0, -1] - x[0, -1].max()).astype(float) / 0.6)  # cooler than 1: fewer slips
        text.append(int(rng.choice(len(odds), p=odds / odds.sum())))
    return bytes(text).decode(errors="replace")


class Screen:
    """What rank 0 shows: a live bar on a terminal, a line now and then elsewhere; a summary and a plot at the end."""

    def __init__(self, rt: zr.Runtime, options: argparse.Namespace, *, model: ByteModel, position: int) -> None:
        self.rt, self.options, self.model, self.position = rt, options, model, position
        self.losses: list[float] = []  # of this rank, since the last look
        self.history: list[tuple[int, float]] = []  # step, mean bits per byte of all ranks
        self.report: zr.StepReport | None = None
        self.skipped = 0
        self.began, self.seconds = time.perf_counter(), 0.0
        self.console = Console(highlight=False, soft_wrap=True, quiet=rt.rank != 0)
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
        rate = (done - self.position) * self.options.batch * self.model.context / self.seconds
        memory = format_bytes(self.rt.memory().resting)
        line = f"loss {self.history[-1][1]:5.3f} bits/byte  {rate:7,.0f} tokens/s  {memory} on this rank"
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
        self.say(f"\n{options.plan}: {PLANS[options.plan]}\nat rest on this rank: {parts}")
        if self.report is None:
            self.say(f"nothing to do: the checkpoint is at step {self.position}; ask for more with --steps")
            return
        (_, high), (last, _) = self.history[0], self.history[-1]
        low = np.mean([bits for _, bits in self.history[-5:]])  # batches differ: a single one says little
        self.say(f"loss: from {high:.2f} to {low:.2f} bits per byte in {self.seconds:.1f} s, up to step {last}")
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
        axes.set(xlabel="step", ylabel="bits per byte", title=f"{self.options.plan}, ranks: {self.rt.size}")
        axes.grid(visible=True, alpha=0.3)
        figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plan", choices=PLANS, default="zero3", help="what is sharded (default: %(default)s)")
    add("--steps", type=whole, default=400, help="train up to this step (default: %(default)s)")
    add("--batch", type=whole, default=32, help="rows of a step, over all ranks (default: %(default)s)")
    add("--lr", type=float, default=1e-2, help="largest learning rate (default: %(default)s)")
    add("--width", type=whole, default=64, help="features of a token, a multiple of 4 (default: %(default)s)")
    add("--layers", type=whole, default=2, help="blocks (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the parameters")
    add("--deterministic", action="store_true", help=f"the same bits on any number of ranks that divides {SHARDS}")
    add("--save", type=Path, metavar="DIR", help="write a checkpoint at the end (default: where --resume is)")
    add("--save-every", type=whole, default=200, metavar="STEPS", help="and so often (default: %(default)s)")
    add("--resume", type=Path, metavar="DIR", help="go on from the checkpoint there, if there is one")
    add("--plot", type=Path, metavar="FILE", help="draw the loss: loss.png, .svg or .pdf")
    add("--trace", type=Path, metavar="FILE", help="write what every rank did and when, for ui.perfetto.dev")
    add("--sample", type=functools.partial(whole, least=0), default=80, metavar="BYTES", help="let it write at the end")
    options = parser.parse_args()
    if not 0 < options.lr < 1:
        parser.error(f"argument --lr: expected a number between 0 and 1, got {options.lr}")
    if options.width % 4:
        parser.error(f"argument --width: expected a multiple of the 4 heads, got {options.width}")
    for name in ("plot", "trace"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            parser.error(f"argument --{name}: there is no directory {path.absolute().parent}")
    if options.plot and options.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --plot: expected a file that ends in .png, .svg or .pdf, got {options.plot}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, which is not installed: pip install matplotlib")
    options.save = options.save or options.resume
    return options


def whole(text: str, *, least: int = 1) -> int:
    """Return a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
