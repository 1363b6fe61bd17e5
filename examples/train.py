"""Train a byte-level language model with ZeRO-style sharding, written by hand on zerort's collectives.

    mpirun -n 8 python examples/train.py              # or: make train

Every rank reads its own part of Python's standard library and learns to guess the next byte. What it shows:

    parameters        lie once per machine, in memory that all ranks share: a gather is a meeting, nothing is copied
    gradients         are reduce-scattered in place: each rank sums its own shard, straight from the others' memory
    optimizer state   exists only for the rank's own shard; one fused native kernel updates it
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np

import zerort as zr

CONTEXT, WIDTH, HIDDEN, VOCABULARY = 16, 32, 384, 256
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "w1": (CONTEXT * WIDTH, HIDDEN),
    "b1": (HIDDEN,),
    "w2": (HIDDEN, VOCABULARY),
    "b2": (VOCABULARY,),
}


def read_text(*, rank: int, size: int, limit: int) -> np.ndarray:
    """Return this rank's share of the standard library's sources, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[rank::size]
    text, total = [], 0
    for file in files:
        text.append(file.read_bytes())
        total += len(text[-1])
        if total > limit:
            break
    return np.frombuffer(b"".join(text), np.uint8)


def batches(text: np.ndarray, *, batch: int, seed: int):
    """Yield (contexts, next bytes) for ever."""
    rng = np.random.default_rng(seed)
    while True:
        at = rng.integers(0, len(text) - CONTEXT, batch)
        yield text[at[:, None] + np.arange(CONTEXT)], text[at + CONTEXT]


def loss_and_gradients(p: dict, x: np.ndarray, y: np.ndarray, g: dict) -> float:
    """Run the model forward and backward; write the gradients into ``g`` and return the mean loss in nats."""
    rows = np.arange(len(y))
    inputs = p["embedding"][x].reshape(len(x), -1)
    hidden = np.tanh(inputs @ p["w1"] + p["b1"])
    logits = hidden @ p["w2"] + p["b2"]
    logits -= logits.max(1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(1, keepdims=True)
    loss = -np.log(probabilities[rows, y] + 1e-9).mean()

    slope = probabilities
    slope[rows, y] -= 1
    slope /= len(y)
    np.matmul(hidden.T, slope, out=g["w2"])
    slope.sum(0, out=g["b2"])
    back = (slope @ p["w2"].T) * (1 - hidden * hidden)
    np.matmul(inputs.T, back, out=g["w1"])
    back.sum(0, out=g["b1"])
    g["embedding"][:] = 0
    np.add.at(g["embedding"], x.reshape(-1), (back @ p["w1"].T).reshape(-1, WIDTH))
    return float(loss)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="samples per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="text per rank (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.bytes) < 1:
        parser.error("--steps, --batch and --bytes must be at least 1")
    if not 0 < options.lr < 1:
        parser.error(f"--lr must be between 0 and 1, got {options.lr}")
    if options.trace and not options.trace.absolute().parent.is_dir():
        parser.error(f"--trace: there is no directory {options.trace.absolute().parent}")

    with zr.open_group() as group:
        if options.trace:
            zr.trace.enable()
        # The layout: where every parameter lies in one flat buffer, and which range of it is whose.
        layout = zr.FlatLayout.build(SHAPES)
        shards = zr.Partition.build(layout.numel, group.size, alignment=16)
        mine = shards.of(group.rank).slice

        parameters = group.empty_shared(shards.counts, "float32", name="parameters")  # once per machine
        gradients = group.empty(layout.numel, "float32", name="gradients")  # readable by the other ranks
        exp_avg, exp_avg_sq = np.zeros((2, shards.counts[group.rank]), np.float32)  # for my shard only

        def views(buffer: np.ndarray) -> dict[str, np.ndarray]:
            return {name: buffer[layout.of(name).slice].reshape(shape) for name, shape in SHAPES.items()}

        p, g = views(parameters.full), views(gradients)
        initial = np.zeros(layout.numel, np.float32)
        rng = np.random.default_rng(0)  # the same on every rank; each keeps its own shard of it
        for name, shape in SHAPES.items():
            if len(shape) == 2:
                initial[layout.of(name).slice] = (rng.standard_normal(shape) / np.sqrt(shape[0])).reshape(-1)
        parameters.mine[:] = initial[mine]
        group.all_gather(parameters.mine, out=parameters.full, counts=shards.counts).wait()

        text = read_text(rank=group.rank, size=group.size, limit=options.bytes)
        stream = batches(text, batch=options.batch, seed=group.rank)
        report(group, f"{group}")
        report(
            group,
            f"{layout.numel:,} parameters, ranks: {group.size}; {parameters.full.nbytes / 2**20:.1f} MiB on this "
            f"machine, {2 * exp_avg.nbytes / 2**10:.0f} KiB of optimizer state on rank 0",
        )
        began, first = time.perf_counter(), None
        for step in range(1, options.steps + 1):
            with zr.trace.span("compute"):
                loss = loss_and_gradients(p, *next(stream), g)
            group.reduce_scatter(gradients, out=gradients[mine], counts=shards.counts, name="gradients").wait()
            with zr.trace.span("adamw"):
                zr.native.adamw_(
                    parameters.mine,
                    gradients[mine],
                    exp_avg,
                    exp_avg_sq,
                    lr=options.lr,
                    beta1=0.9,
                    beta2=0.99,
                    eps=1e-8,
                    weight_decay=0.01,
                    step=step,
                    grad_scale=1 / group.size,
                )
            group.all_gather(parameters.mine, out=parameters.full, counts=shards.counts, name="parameters").wait()
            if step == 1 or step % max(1, options.steps // 15) == 0 or step == options.steps:
                mean = group.all_reduce(np.array([loss]), name="loss").wait()[0] / group.size
                first = mean if first is None else first
                seconds = time.perf_counter() - began
                rate = step * options.batch * group.size / seconds
                done = "█" * (20 * step // options.steps)
                report(
                    group, f"step {step:5}  {done:20}  loss {mean / np.log(2):5.3f} bits/byte  {rate:9,.0f} samples/s"
                )
        report(
            group,
            f"loss fell from {first / np.log(2):.2f} to {mean / np.log(2):.2f} bits per byte in {seconds:.0f} s "
            f"({group.kind} group of {group.size})",
        )
        if options.trace and (path := group.save_trace(options.trace)):
            report(group, f"trace: {path} (open it in ui.perfetto.dev)")


def report(group: zr.Group, line: str) -> None:
    """Print on rank 0 only."""
    if group.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
