"""Train on documents of different lengths, with a rank that is slow: it is named, and given less to do.

    mpirun -n 3 python examples/train_uneven.py                  # rank 1 takes twice as long for a document
    mpirun -n 3 python examples/train_uneven.py --since 20       # from step 20 on
    mpirun -n 3 python examples/train_uneven.py --slow -1        # none does
    mpirun -n 3 python examples/train_uneven.py --plot steps.png

Documents lie in a memory-mapped file; `zr.data.Order` says which of them each step has, and each rank reads its own. A
step divides by the tokens of all ranks, so it does not matter who has how many. Once a rank stays slow,
`rt.rebalance("auto")` gives it a smaller share of every batch, from the measured times: the training stays the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np

import zerort as zr
from common import console_of, whole  # examples/common.py
from zerort.comm.agreed import gather_json

LONGEST, WIDTH = 16, 8  # tokens of a document, numbers of a token


def main() -> None:
    """Write the documents, train, show step times."""
    options = parse()
    with (
        tempfile.TemporaryDirectory() as mine,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.03)) as rt,
    ):
        path = os.path.join(gather_json(rt.group, mine)[0], "documents.npy")  # rank 0's directory
        if rt.rank == 0:
            np.save(path, documents(options.documents))
        rt.group.barrier().wait()
        train(rt, np.load(path, mmap_mode="r"), options)
        rt.group.barrier().wait()


def train(rt: zr.Runtime, documents: np.ndarray, options: argparse.Namespace) -> None:
    """Take every document once per epoch; relieve a rank that stays slow."""
    console, tokens = console_of(rt), 0.0
    seconds: list[float] = []
    line = rt.register("line", {"w": np.zeros(WIDTH), "b": np.zeros(1)})
    order = zr.data.Order(length=len(documents), batch=options.batch, seed=7)
    for indices in rt.take(order, epochs=options.epochs):
        began = time.perf_counter()
        x = documents[indices]  # (documents, tokens, numbers): read from the file
        x = x[np.isfinite(x[..., 0])]  # (tokens, numbers): documents end where NaN begins
        with line.gathered() as p:
            error = x @ p["w"] + p["b"] - np.sin(x.sum(1))
        is_slow = rt.rank == options.slow and rt.updates >= options.since
        time.sleep(len(indices) * options.milliseconds / 1e3 * (1 + is_slow))  # a larger model
        line.reduce({"w": error @ x, "b": error.sum(keepdims=True)})  # of sums: the step divides
        report = rt.step(weight=len(x))
        seconds.append(time.perf_counter() - began)
        tokens += report.weight or 0.0
        if report.stop:
            return
        if report.straggler:
            done = rt.rebalance("auto")  # says so if there is nothing to gain, or too little was measured yet
            if done.changed:
                console.print(f"step {len(seconds)}: {report.straggler} is slow; {done}")
    expected = options.epochs * int(np.isfinite(documents[..., 0]).sum())
    console.print(f"{rt.updates} steps, {tokens:.0f} of {expected} tokens, each once in an epoch")
    if options.plot and rt.rank == 0:
        draw(seconds, options.plot)


def documents(count: int) -> np.ndarray:
    """Return documents of 1 to `LONGEST` tokens, most of them short, filled up with NaN."""
    rng = np.random.default_rng(0)
    found = rng.normal(size=(count, LONGEST, WIDTH))
    lengths = np.minimum(rng.geometric(0.25, count), LONGEST)
    found[np.arange(LONGEST) >= lengths[:, None]] = np.nan
    return found


def draw(seconds: list[float], path: str) -> None:
    """Write the time of every step as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(seconds) + 1), 1e3 * np.array(seconds))
    axes.set(xlabel="step", ylabel="milliseconds", ylim=(0, None))
    figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=whole, default=1000, help="(default: %(default)s)")
    parser.add_argument("--batch", type=whole, default=60, help="documents of a step (default: %(default)s)")
    parser.add_argument("--epochs", type=whole, default=3, help="(default: %(default)s)")
    parser.add_argument("--slow", type=int, default=1, metavar="RANK", help="who is slow (default: %(default)s)")
    parser.add_argument("--since", type=int, default=0, metavar="STEP", help="from when on (default: %(default)s)")
    parser.add_argument("--milliseconds", type=float, default=1.0, help="for a document (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw step times: steps.png, .svg or .pdf")
    return parser.parse_args()


if __name__ == "__main__":
    main()
