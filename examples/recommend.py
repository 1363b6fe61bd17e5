"""Recommend items to users: two tables, of which a batch touches a few rows. Only those are gathered, sent and updated.

    python examples/recommend.py                                  # one process
    mpirun -n 3 python examples/recommend.py                      # the same training, each with a third of the batch
    mpirun -n 3 python examples/recommend.py --users 2000000      # a larger table: steps take as long as before

Two towers: a user's row goes through a matrix, and its product with an item's row says whether the user likes the item.
Few users and items are seen often, most of them seldom, as in the logs of a shop. With ``--dense`` whole tables are
gathered and reduced: the results are the same, for what a row misses while nobody touches it is made up for later.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import zerort as zr
from common import console_of, whole  # examples/common.py
from zerort.config import format_bytes

WIDTH, TASTES = 16, 8  # numbers of a row; users like items of their own taste


def main() -> None:
    """Train, and say what it took."""
    options = parse()
    rng = np.random.default_rng(0)
    tables = {
        "users": rng.normal(0, 0.3, (options.users, WIDTH)).astype(np.float32),
        "items": rng.normal(0, 0.3, (options.items, WIDTH)).astype(np.float32),
    }
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.03, weight_decay=0.01)) as rt:
        console = console_of(rt)
        model = rt.register(
            "model",
            {**tables, "tower": np.eye(WIDTH, dtype=np.float32)},
            rows=() if options.dense else ("users", "items"),
        )
        began, moved = time.perf_counter(), 0
        for step in range(1, options.steps + 1):
            batch = clicks(step, options)
            mine = {name: part[rt.rank :: rt.size] for name, part in batch.items()}
            right, report = train_step(rt, model, mine, dense=options.dense)
            moved += sum(report.bytes_moved.values())
            if step % 50 == 0 or step == 1:
                share = rt.group.all_reduce(np.array([float(right)])).wait()[0] / len(batch["liked"])
                console.print(f"step {step:4}: {share:.1%} of {len(batch['liked'])} pairs right, ranks: {rt.size}")
        seconds = (time.perf_counter() - began) / options.steps
        touched = sum(len(np.unique(batch[name])) for name in tables)
        console.print(
            f"{touched} of {options.users + options.items} rows in the last step; {1e3 * seconds:.1f} ms a step, "
            f"{format_bytes(moved // options.steps)} through collectives; tables "
            f"{format_bytes(sum(table.nbytes for table in tables.values()))}"
        )
        console.print(f"on this rank: {rt.memory()}")


def train_step(
    rt: zr.Runtime, model: zr.Unit, batch: dict[str, np.ndarray], *, dense: bool
) -> tuple[int, zr.StepReport]:
    """Take a step with this rank's part of a batch; return how many pairs it has right before it."""
    users, items, liked = batch["users"], batch["items"], batch["liked"]
    with model.gathered(rows=None if dense else {"users": users, "items": items}) as p:
        u, i = (p["users"][users], p["items"][items]) if dense else (p["users"], p["items"])  # a row for each pair
        tower = np.array(p["tower"])
    scores = ((u @ tower) * i).sum(1)
    slope = (1 / (1 + np.exp(-scores)) - liked)[:, None].astype(np.float32)  # of a sum: the step divides
    gradients = {"tower": u.T @ (slope * i)}
    by_row = {"users": (users, slope * (i @ tower.T)), "items": (items, slope * (u @ tower))}
    if dense:
        for name, (indices, values) in by_row.items():
            gradients[name] = np.zeros(model.tensors[name].shape, np.float32)
            np.add.at(gradients[name], indices, values)
        model.reduce(gradients)
    else:
        model.reduce(gradients, rows=by_row)
    return int(np.sum((scores > 0) == liked)), rt.step(weight=len(liked))


def clicks(step: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return a step's pairs of users and items, half of them liked: the same on every rank, who takes its part."""
    rng = np.random.default_rng((1, step))
    users = (options.users * rng.uniform(size=options.batch) ** 5).astype(np.int64)  # the first ones are seen often
    items = (options.items * rng.uniform(size=options.batch) ** 5).astype(np.int64)
    liked = np.arange(options.batch) % 2 == 0
    same = items - items % TASTES + users % TASTES  # of the user's taste
    other = items - items % TASTES + (users + rng.integers(1, TASTES, options.batch)) % TASTES
    return {"users": users, "items": np.minimum(np.where(liked, same, other), options.items - 1), "liked": liked}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=whole, default=200_000, help="rows of one table (default: %(default)s)")
    parser.add_argument("--items", type=whole, default=50_000, help="rows of the other (default: %(default)s)")
    parser.add_argument("--batch", type=whole, default=2048, help="pairs of a step, over all ranks")
    parser.add_argument("--steps", type=whole, default=300, help="how many (default: %(default)s)")
    parser.add_argument("--dense", action="store_true", help="gather and reduce whole tables")
    return parser.parse_args()


if __name__ == "__main__":
    main()
