"""Train a byte-level language model in plain NumPy, or CuPy, sharded over ranks.

    python examples/train.py                            # one process
    mpirun -n 8 python examples/train.py                # eight, ZeRO-3: each holds an eighth of everything
    mpirun -n 8 python examples/train.py --plan zero0   # the same training, with everything on every rank
    mpirun -n 8 python examples/train.py --device cuda  # on GPUs, one for each rank (experimental): CuPy and NCCL

A small transformer learns to guess the next byte of Python's standard library. Each of its units (the embedding, the
blocks, the head) is whole only while it computes: gathered, used, released. Its gradients are summed into shards while
the next unit computes, and each rank updates what it owns. With `--resume` it goes on where it was, under another plan
or on another number of ranks if you like.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait

import argparse
import sys

import numpy as np

import zerort as zr
import zerort_numpy as zn
from common import PLANS, Screen, add_options, check_options, whole  # examples/common.py
from zerort import checkpoint
from zerort.errors import DeviceError
from zerort.workload import ByteModel, ByteText

SHARDS = 8  # with --deterministic a batch is always computed in eight parts, however many ranks share them


def main() -> None:
    """Open a runtime, register the model's units, train them."""
    options = parse()
    model = ByteModel(width=options.width, layers=options.layers)
    text = ByteText(rows=options.batch, context=model.context)
    if options.trace:
        zr.trace.enable()
    schedule = zr.warmup_cosine(options.lr, warmup=min(30, options.steps), total=options.steps)
    with (
        open_group(options.device) as group,
        zr.open(
            group=group,
            plan=PLANS[options.plan],
            optimizer=zr.AdamW(lr=schedule, betas=(0.9, 0.98), weight_decay=0.01),
            param_groups=[zr.ParameterGroup(("*.b_*", "*.norm*"), weight_decay=0.0)],
            clip_norm=1.0,
            gradient_dtype="float32",
            loss_scale=zr.LossScale() if options.dtype == "float16" else None,
            virtual_shards=SHARDS if options.deterministic else None,
        ) as rt,
    ):
        units = {}
        for name in model.units:  # all ranks make the same first values; each keeps its shard of them
            first = {key: value.astype(options.dtype) for key, value in model.init(name).items()}
            units[name] = zn.register(rt, name, first)
        position = 0
        if options.resume and checkpoint.exists(options.resume):
            position = rt.load(options.resume).progress["position"]

        tokens = options.batch * model.context
        with Screen(rt, options, model=model, tokens=tokens, position=position) as screen:
            for step in range(position, options.steps):
                loss = learn(rt, units, model, text, step=step)
                report = rt.step()
                screen.show(step + 1, loss, report)
                last = report.stop or step + 1 == options.steps  # stop: Ctrl-C, SIGTERM or SIGUSR1, on any rank
                if options.save and ((step + 1) % options.save_every == 0 or last):
                    rt.save(options.save, progress={"position": step + 1})
                if report.stop:
                    break
        screen.summary()
        if options.sample:
            screen.say(f"it writes: {sample(rt, units, model, prompt=b'    def ', length=options.sample)!r}")
        if options.trace and (path := rt.group.save_trace(options.trace)):
            screen.say(f"trace: {path} (open it in ui.perfetto.dev)")


def open_group(device: str) -> zr.Group:
    """Open the group of all ranks; on GPUs, each gets one of its own, or all are told what is missing and end."""
    try:
        return zr.open_group(kind="nccl" if device == "cuda" else None)
    except DeviceError as error:
        with zr.open_group() as hosts:
            sys.exit(f"argument --device: {error}" if hosts.rank == 0 else 1)


def learn(rt: zr.Runtime, units: dict[str, zn.NumpyUnit], model: ByteModel, text: ByteText, *, step: int) -> float:
    """Hand in the gradients of this rank's part of a batch, and return its part of the mean loss in nats."""
    losses, saved = [], {}
    for shard in rt.micro_batches:
        x, y = text.batch(step, shard, of=rt.micro_batch_count)  # on GPUs, the model copies them to its parameters
        weight = rt.micro_batch_count * len(x) / text.rows  # a shard with fewer rows counts for less
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


def sample(rt: zr.Runtime, units: dict[str, zn.NumpyUnit], model: ByteModel, *, prompt: bytes, length: int) -> str:
    """Let the model write. All ranks do the same: a gather needs all of them."""
    text, rng = list(prompt), np.random.default_rng(0)
    for _ in range(length):
        x = np.array([text[-model.context :]], np.uint8)
        for name, unit in units.items():
            with unit.gathered() as p:
                x, _ = model.forward(name, p, x)
        scores = rt.device.fetch(x[0, -1])
        odds = np.exp((scores - scores.max()).astype(float) / 0.6)  # cooler than 1: fewer slips
        text.append(int(rng.choice(len(odds), p=odds / odds.sum())))
    return bytes(text).decode(errors="replace")


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, steps=400, batch=32, lr=1e-2)
    add = parser.add_argument
    add("--device", choices=("host", "cuda"), default="host", help="cuda: a GPU for each rank (experimental)")
    add("--width", type=whole, default=64, help="features of a token, a multiple of 4 (default: %(default)s)")
    add("--layers", type=whole, default=2, help="blocks (default: %(default)s)")
    add("--deterministic", action="store_true", help=f"the same bits on any number of ranks up to {SHARDS}")
    options = parser.parse_args()
    check_options(parser, options)
    if options.width % 4:
        parser.error(f"argument --width: expected a multiple of the 4 heads, got {options.width}")
    return options


if __name__ == "__main__":
    main()
