"""Arguments of ``zerort bench optimizer``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, parse_numel
from zerort.cli.bench.options import add_json, add_seconds

__all__ = ["add_bench_optimizer"]

_OPTIMIZER = """\
Measure the fused optimizer updates on one thread against this machine's memory limit, the same in NumPy, and torch.

examples:
  zerort bench optimizer
  zerort bench optimizer --numel 10M --compare torch --json result.json"""


def add_bench_optimizer(benches: Commands) -> None:
    """Add ``zerort bench optimizer``."""
    one = add_command(benches, "optimizer", _serve_optimizer, help="AdamW, SGD and Lion steps", text=_OPTIMIZER)
    one.add_argument(
        "--numel", type=parse_numel, default=50_000_000, metavar="N", help="parameters to update (default: 50M)"
    )
    one.add_argument("--compare", choices=["torch"], help="time torch's fused optimizers in the same run")
    add_seconds(one, 1.0)
    add_json(one)


def _serve_optimizer(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.optimizer.command import run_optimizer

    return run_optimizer(options)
