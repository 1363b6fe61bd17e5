"""Update a hundredth of a table's rows, and compare that with the dense update of the whole table.

    python benchmarks/update_rows.py                            # 1 GiB of float32, rows of 64; takes about 4.5 GiB
    python benchmarks/update_rows.py --size 128MiB --share 0.02 --optimizer sgd

Both update one process's shard. By rows, an update changes the rows of a batch, and brings a thousandth of the table up
to date, needed or not. Before it, in forward, these rows were gathered, which brings them up to date: that is shown
apart. What travels between ranks is not counted. Batches are drawn by chance, so rows have missed from none to several
hundred updates. Rounds take turns; ratios are those of the medians of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np

import zerort as zr
from zerort.config import format_bytes, parse_bytes
from zerort.device import HostDevice
from zerort.engine.rows.memory import RowsInMemory
from zerort.engine.rows.table import RowTable
from zerort.layout import Partition
from zerort.optim import ElementwiseOptimizer
from zerort.optim.late import late_updates

OPTIMIZERS: dict[str, ElementwiseOptimizer] = {
    "adamw": zr.AdamW(lr=1e-3, weight_decay=0.01),
    "sgd": zr.SGD(lr=1e-3, momentum=0.9, weight_decay=0.01),
    "lion": zr.Lion(lr=1e-4, weight_decay=0.01),
}


def main() -> None:
    """Take turns, show the ratio."""
    options = parse()
    optimizer = OPTIMIZERS[options.optimizer]
    shape = (options.size // 4 // options.width, options.width)
    rng = np.random.default_rng(0)
    values = {kind: filled(rng, shape) for kind in ("parameter", *(one.name for one in optimizer.states(shape)))}
    for kind, one in values.items():
        if kind == "exp_avg_sq":  # averages of squares, none of them next to nothing
            np.abs(one, out=one)
            one *= 1e-3
            one += 1e-7
    state = {kind: one for kind, one in values.items() if kind != "parameter"}
    table = RowTable(
        shape,
        Partition.of_counts((shape[0] * shape[1],)),
        0,
        where=RowsInMemory(values["parameter"], state, width=shape[1], optimizer=optimizer, device=HostDevice()),
        late=late_updates(optimizer, "float32"),
    )
    dense = filled(rng, shape)
    count = max(int(options.share * shape[0]), 1)
    step = 0

    def whole() -> None:
        optimizer.update_(values["parameter"], dense, state, lr=1e-3, step=step, grad_scale=1.0, copy_out=None)

    turns: list[tuple[float, float, float]] = []
    for step in range(1, options.warm_up + options.rounds + 1):  # `step` is read above
        rows = np.unique(rng.integers(0, shape[0], count))
        gradients = dense[: rows.size * shape[1]].reshape(-1, shape[1])
        gather = timed(functools.partial(table.values, rows))
        update = timed(functools.partial(table.update_, rows, gradients, lr=1e-3, step=step, grad_scale=1.0))
        if step > options.warm_up:
            turns.append((gather, update, timed(whole)))
    gather, update, dense_update = np.median(turns, axis=0)
    print(
        f"{options.optimizer}, table of {format_bytes(options.size)}, {shape[0]} x {shape[1]}; ms of CPU time: "
        f"{count} rows updated in {1e3 * update:.1f}, all in {1e3 * dense_update:.0f}: {update / dense_update:.1%}; "
        f"gathered and brought up to date in {1e3 * gather:.1f}: {gather / dense_update:.1%}"
    )


def filled(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return a flat array of small numbers by chance, made without a second one of its size."""
    made = np.empty(shape[0] * shape[1], np.float32)
    some = rng.normal(0.0, 1e-3, 1 << 20).astype(np.float32)
    for first in range(0, made.size, some.size):
        made[first : first + some.size] = some[: made.size - first]
    return made


def timed(work: Callable[[], object]) -> float:
    """Return the CPU time that something takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("1GiB"), help="of the table (default: 1GiB)")
    parser.add_argument("--width", type=int, default=64, help="elements of a row (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.01, help="of the rows that a step touches")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="that are counted (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before them (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
