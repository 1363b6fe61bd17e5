"""Train a model that is several times larger than the memory it may use: what does not fit sleeps on a disk.

    python examples/train_oversize.py                                        # 16 bytes per parameter, 4 in memory
    python examples/train_oversize.py --no-offload                           # the same limit, and it fails
    mpirun -n 2 python examples/train_oversize.py --parameters 1B --memory 3GiB --steps 3 --scratch /mnt/nvme

The limit is real: the kernel refuses what goes beyond it (memory_limit.py), interpreter and libraries included. The
model, a transformer over bytes in bfloat16, has 16 bytes for each parameter: 2 for itself, 2 for its gradient, 12 for
AdamW. Where the disk has no room for these, AdamW's are 4: moments in 8 bits, and of the master weights what bfloat16
lacks. The script says how much memory there is, `zr.Plan.fit` finds out what rests where, and the loop is any other's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait

import argparse
import math
import shutil
import sys
import tempfile
import time

import numpy as np
from rich.live import Live
from rich.table import Table

import zerort as zr
from common import console_of, whole  # examples/common.py
from memory_limit import limit_memory, peak_nbytes, resident_nbytes, used_nbytes  # examples/memory_limit.py
from zerort.config import format_bytes, parse_bytes
from zerort.errors import PlanError, RankFailedError, SharedMemoryError, ZerortError
from zerort.storage import inspect
from zerort.workload import ByteModel, ByteText

NBYTES = {"float32": 2 + 2 + 12, "int8": 2 + 2 + 4.1}  # of a parameter, its gradient, its master weight and two moments
CONTEXT = 16


def main() -> int:
    """Set the limit, plan within it, train."""
    options = parse()
    model = ByteModel(width=width_for(options), layers=options.layers, context=CONTEXT)
    with zr.open_group() as group:
        options.measured = inspect(options.scratch, what="a sample") if group.rank == 0 else None
        options.state = options.state or state_for(group, model, options)
        text = ByteText(rows=group.size * options.rows * options.micro_steps, context=CONTEXT, limit=1 << 20)
        np.ones((512, 512), np.float32) @ np.ones((512, 512), np.float32)  # OpenBLAS maps memory at its first use
        used = group.all_reduce(np.array([float(used_nbytes(group.size))]), name="used").wait()[0]
        left = int(options.memory - used)
        computing = computing_nbytes(model, rows=options.rows)
        if left // group.size <= computing:
            return refuse(group, options, model, f"{format_bytes(computing)} are for computing alone on each rank")
        limit_memory(left // group.size, together=left)
        host = left // group.size - computing
        options.buckets = 2 if host >= 8 * 2 * largest_unit(model) else 1  # gathered, reduced, offloaded, each twice
        budget = zr.Plan.fit(host=host, nvme=options.disk)
        try:
            train(group, model, text, options, plan=zr.Plan.zero(3) if options.no_offload else budget)
        except (MemoryError, SharedMemoryError, PlanError) as error:
            return refuse(group, options, model, error)
        except RankFailedError as error:  # another rank ran out of memory, perhaps, and said so
            print(f"Rank {group.rank} stops: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return 1
    return 0


def train(
    group: zr.Group, model: ByteModel, text: ByteText, options: argparse.Namespace, *, plan: zr.Plan | zr.Budget
) -> None:
    """Register the model unit by unit, and train it; only this function knows of zerort."""
    small = options.state == "int8"
    optimizer = zr.AdamW(
        lr=options.lr or 0.1 / model.width,
        betas=(0.9, 0.98),
        moments="int8" if small else "float32",
        master="remainder" if small else "float32",
    )
    with zr.open(
        plan=plan,
        optimizer=optimizer,
        group=group,
        scratch=options.scratch,
        micro_steps=options.micro_steps,
        buckets=options.buckets,
    ) as rt:
        rt.expect({name: specs(model, name) for name in model.units})  # all of them, so that the hottest rest highest
        units = {}
        for name in model.units:  # one at a time: the whole model would not fit
            units[name] = rt.register(name, {key: as_bfloat16(value) for key, value in model.init(name).items()})
        with View(rt, model, options) as view:
            for step in range(options.steps):
                began = time.perf_counter()
                parts = [learn(rt, units, model, text, step=step, part=part) for part in rt.micro_batches]
                loss = sum(parts) / len(parts)
                learnt = time.perf_counter()
                report = rt.step()
                view.show(step + 1, loss, report, learning=learnt - began, seconds=time.perf_counter() - began)
                if report.stop:  # Ctrl-C, SIGTERM or SIGUSR1, on any rank
                    break
            view.summary()


def learn(
    rt: zr.Runtime, units: dict[str, zr.Unit], model: ByteModel, text: ByteText, *, step: int, part: int
) -> float:
    """Hand in the gradients of one micro-batch, and return its loss in nats."""
    x, y = text.batch(step, part, of=rt.micro_batch_count)
    saved = {}
    for name, unit in units.items():
        with unit.gathered() as p:
            x, saved[name] = model.forward(name, p, x)
    loss, slope = model.loss(x, y)
    for name, unit in reversed(units.items()):
        with unit.gathered() as p:
            slope, grads = model.backward(name, p, saved.pop(name), slope)
        places = unit.gradients()  # where they are collected: rounded on the way, with no copy in between
        for key in places:
            zr.native.cast_into(places[key].reshape(-1), grads.pop(key).reshape(-1))
        unit.reduce()
    return loss


def specs(model: ByteModel, unit: str) -> dict[str, zr.TensorSpec]:
    """Return what a unit will be registered with, without values."""
    return {name: zr.TensorSpec(shape, "bfloat16") for name, shape in model.shapes(unit).items()}


def as_bfloat16(value: np.ndarray) -> np.ndarray:
    """Return an array rounded to 16 bits."""
    rounded = np.empty(value.shape, zr.native.BFLOAT16)
    zr.native.cast_into(rounded.reshape(-1), value.reshape(-1))
    return rounded


def width_for(options: argparse.Namespace) -> int:
    """Return the width at which the blocks have about so many parameters as were asked for: 12 squares of it each."""
    return max(round(math.sqrt(options.parameters / options.layers / 12) / 8), 1) * 8


def largest_unit(model: ByteModel) -> int:
    """Return the parameters of the largest unit."""
    return max(sum(math.prod(shape) for shape in model.shapes(name).values()) for name in model.units)


def state_for(group: zr.Group, model: ByteModel, options: argparse.Namespace) -> str:
    """Return AdamW's form: float32 where every rank's disk has room for all that is beyond memory, else int8."""
    beyond = NBYTES["float32"] * model.numel - options.memory
    room = 0.9 * shutil.disk_usage(options.scratch).free
    lacking = group.all_reduce(np.array([float(beyond > room)]), name="room").wait()[0]
    return "int8" if lacking else "float32"


def computing_nbytes(model: ByteModel, *, rows: int) -> int:
    """Return what a rank computes with, besides what zerort holds."""
    whole_unit = 2 * 4 * largest_unit(model)  # its parameters and its gradients, in float32
    activations = 14 * 4 * rows * CONTEXT * model.width * len(model.units)
    return whole_unit + activations + 48 * 1024**2  # threads, blocks of the store, Python's objects, and gaps between


def refuse(group: zr.Group, options: argparse.Namespace, model: ByteModel, why: str | Exception) -> int:
    """Say that it does not fit, and return the exit code. All ranks know why, but for memory that ran out on one."""
    if group.rank == 0 or isinstance(why, MemoryError):
        needed = format_bytes(int(NBYTES[options.state] * model.numel))
        how, cure = "even with offload", "Allow more."
        if options.no_offload:
            how, cure = "without offload", "Leave --no-offload out."
        print(
            f"Does not fit {how}: parameters, gradients and state take {needed}, and all ranks together may use "
            f"{format_bytes(options.memory)}. {cure} ({str(why) or 'out of memory'})",
            file=sys.stderr,
            flush=True,
        )
    return 1


class View:
    """What rank 0 shows: what rests where and how fast it moves; live on a terminal, a line for each step elsewhere."""

    def __init__(self, rt: zr.Runtime, model: ByteModel, options: argparse.Namespace) -> None:
        self.rt, self.model, self.options = rt, model, options
        self.console = console_of(rt)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.steps: list[dict[str, float]] = []

    def __enter__(self) -> View:
        memory = self.rt.memory()
        ranks = "1 rank" if self.rt.size == 1 else f"{self.rt.size} ranks"
        needed = int(NBYTES[self.options.state] * self.model.numel)
        self.say(f"{self.model} in bfloat16 on {ranks}, AdamW's state in {self.options.state}, {self.options.scratch}")
        self.say(
            f"{format_bytes(needed)} of parameters, gradients and state within {format_bytes(self.options.memory)} of "
            f"memory: {needed / self.options.memory:.1f} times as much"
        )
        self.say(f"at rest on rank 0: {memory}")
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()  # gives the cursor back

    def say(self, line: str) -> None:
        """Print on rank 0."""
        self.console.print(line, markup=False)

    def show(self, done: int, loss: float, report: zr.StepReport, *, learning: float, seconds: float) -> None:
        """Take note of a step; rank 0 shows what all ranks have moved and hold."""
        moved = report.bytes_tiered
        mine = [moved.get("nvme read", 0), moved.get("nvme write", 0), resident_nbytes(), loss / self.rt.size]
        read, written, resident, mean = self.rt.group.all_reduce(np.array(mine, float), name="view").wait()
        now = {"read": read, "written": written, "resident": resident, "seconds": seconds, "learning": learning}
        now["loss"] = mean / math.log(2)
        self.steps.append(now)
        if self.live:
            self.live.update(self.table(done), refresh=True)
        else:
            self.say(
                f"step {done:3}  loss {now['loss']:5.3f} bits/byte  {seconds:6.2f} s  disk: read "
                f"{rate(read, seconds)}, written {rate(written, seconds)}  memory: {format_bytes(int(resident))}"
            )

    def table(self, done: int) -> Table:
        """Return the picture of a step."""
        now, memory, limit = self.steps[-1], self.rt.memory(), self.options.memory
        table = Table(title=f"step {done} of {self.options.steps}", title_justify="left", show_header=False)
        held = now["resident"] / limit
        table.add_row("memory", f"{'█' * round(30 * held):░<30} {format_bytes(int(now['resident']))} of all ranks")
        for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming"):
            table.add_row(f"  {part}", f"{format_bytes(getattr(memory, part))} on rank 0")
        table.add_row("disk", f"{format_bytes(memory.nvme)} of rank 0")
        for way in ("read", "written"):
            table.add_row(f"  {way}", f"{format_bytes(int(now[way]))} in this step, {rate(now[way], now['seconds'])}")
        table.add_row("loss", f"{now['loss']:.3f} bits per byte")
        table.add_row("step", f"{now['seconds']:.2f} s")
        return table

    def summary(self) -> None:
        """Say what a step took, and what the disk alone would have taken."""
        later = self.steps[1:] or self.steps  # the first also touches memory for the first time
        wanted = ("seconds", "learning", "read", "written")
        seconds, learning, read, written = (float(np.mean([one[key] for one in later])) for key in wanted)
        self.say(f"loss: from {self.steps[0]['loss']:.3f} to {self.steps[-1]['loss']:.3f} bits per byte")
        peak = int(max(self.rt.group.all_gather(np.array([float(peak_nbytes())]), name="peak").wait()))
        resident = int(max(one["resident"] for one in self.steps))
        self.say(
            f"memory: {format_bytes(resident)} of all ranks after a step, at most {format_bytes(peak)} on one rank"
        )
        disk = self.options.measured  # by rank 0
        if disk is not None and read + written:
            alone = disk.seconds(read=int(read), written=int(written))
            self.say(
                f"disk: {format_bytes(int(read))} read and {format_bytes(int(written))} written per step; a step took "
                f"{seconds:.2f} s, the disk alone {alone:.2f} s, as fast as it was before "
                f"({disk.read_gbs:.2f} GB/s read, {disk.write_gbs:.2f} GB/s written)"
            )
        self.say(f"forward and backward took {learning:.2f} s of a step, the update {seconds - learning:.2f} s")


def rate(nbytes: float, seconds: float) -> str:
    """Return a bandwidth for people."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def count(text: str) -> int:
    """Return a number of parameters: 40M, 1B."""
    powers = {"K": 1e3, "M": 1e6, "B": 1e9}
    digits, power = (text[:-1], powers[text[-1].upper()]) if text[-1:].upper() in powers else (text, 1)
    try:
        found = int(float(digits) * power)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 40M or 1B, got {text!r}")
    return found


def size(text: str) -> int:
    """Return a number of bytes: 256MiB."""
    try:
        return parse_bytes(text)
    except ZerortError as error:
        raise argparse.ArgumentTypeError(f"expected a size such as 256MiB, got {text!r}") from error


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parameters", type=count, default="100M", help="about so many (default: %(default)s)")
    add("--layers", type=whole, default=24, help="blocks, each a unit: more of them are smaller (default: %(default)s)")
    add("--memory", type=size, default="400MiB", help="that all ranks together may use (default: %(default)s)")
    add("--disk", type=size, default="1TiB", help="that each rank may use (default: %(default)s)")
    add("--scratch", default=tempfile.gettempdir(), metavar="DIR", help="on the disk (default: %(default)s)")
    add("--steps", type=whole, default=5, help="to train (default: %(default)s)")
    add("--rows", type=whole, default=4, help="texts of each rank in a micro-step (default: %(default)s)")
    add("--micro-steps", type=whole, default=1, help="micro-steps of a step, in the same memory (default: %(default)s)")
    add("--lr", type=float, help="learning rate (default: 0.1 over the model's width)")
    add("--state", choices=sorted(NBYTES), help="of AdamW (default: float32, or int8 if the disk is too small)")
    add("--no-offload", action="store_true", help="keep all of it in memory, and see it fail")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
