"""Train the byte model with codes on the wire and at rest, and compare its losses with those of plain training.

    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python benchmarks/coded_losses.py            # 2,000 steps, three seeds
    mpirun -n 2 python benchmarks/coded_losses.py --steps 200 --seeds 1 --only plain int4

Codes travel between all ranks (``over="all"``), as they would between hosts. A figure is the mean of the last
losses, a twentieth of all steps, over plain training's with the same batches. Nothing here is timed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

import zerort as zr
from zerort.optim import Schedule
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk


@dataclass(frozen=True)
class Way:
    """How a run keeps and sends its values."""

    name: str
    wire: zr.Wire | None = None
    state: bool = False
    """With moments in a byte each, and masters as remainders of bfloat16 parameters."""
    dtype: str = "float32"

    def optimizer(self, lr: Schedule) -> zr.AdamW:
        """Return AdamW in the form that this way has."""
        return zr.AdamW(lr=lr, moments="int8", master="remainder") if self.state else zr.AdamW(lr=lr)


def wire(gather: str, reduce: str | None, *, feedback: bool) -> zr.Wire:
    """Return a wire that codes between all ranks."""
    return zr.Wire(gather=gather, reduce=reduce, feedback=feedback, over="all")  # type: ignore[arg-type]


WAYS = (
    Way("plain"),
    Way("int8", wire("int8", "int8", feedback=True)),
    Way("int8 gathers, int4 sums, without feedback", wire("int8", "int4", feedback=False)),
    Way("int8 gathers, int4 sums", wire("int8", "int4", feedback=True)),
    Way("int4", wire("int4", "int4", feedback=True)),
    Way("int4, without feedback", wire("int4", "int4", feedback=False)),
    Way("int4 gathers alone", wire("int4", None, feedback=True)),
    Way("int4 gathers alone, without feedback", wire("int4", None, feedback=False)),
    Way("plain, bfloat16", dtype="bfloat16"),
    Way("int8 moments, remainder masters, bfloat16", state=True, dtype="bfloat16"),
)


def main() -> None:
    """Train every way with every seed, show the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of each run (default: 2000)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    names = [way.name for way in WAYS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="ways, by name (default: all)")
    options = parser.parse_args()
    ways = [way for way in WAYS if way.name in options.only]
    with zr.open_group() as group:
        losses = {
            way.name: [train(group, way, seed, options.steps, options.lr) for seed in range(options.seeds)]
            for way in ways
        }
        if group.rank == 0:
            print(f"{group.size} ranks, {options.steps} steps, seeds 0 to {options.seeds - 1}: mean of the last losses")
            for way in ways:
                base = losses.get("plain, bfloat16" if way.dtype == "bfloat16" else "plain", losses[way.name])
                ratios = [mine / other for mine, other in zip(losses[way.name], base, strict=True)]
                each = " ".join(f"{100 * (ratio - 1):+.2f}" for ratio in ratios)
                print(
                    f"{way.name:44} {np.mean(losses[way.name]):.4f}  {100 * (np.mean(ratios) - 1):+.2f} %  "
                    f"({each}) of plain's"
                )


def train(group: zr.Group, way: Way, seed: int, steps: int, lr: float) -> float:
    """Return the mean of the last losses, a twentieth of all."""
    model = ByteModel(width=32, layers=2, context=32, heads=4)
    text = ByteText(rows=8, context=32, seed=seed)
    rate = zr.warmup_cosine(lr, warmup=steps // 20, total=steps)
    with zr.open(zr.Plan.zero(3), way.optimizer(rate), group=group, wire=way.wire, clip_norm=1.0) as rt:
        found = Walk(rt, model, text, dtype=way.dtype).train(steps)
    if group.rank == 0:
        print(f"# {way.name}, seed {seed}: {np.mean(found[-max(1, steps // 20) :]):.4f}", flush=True)
    return float(np.mean(found[-max(1, steps // 20) :]))


if __name__ == "__main__":
    main()
