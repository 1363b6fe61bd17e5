"""Arguments of ``zerort bench step``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, names_of, parse_count
from zerort.cli.bench.options import add_json, add_ranks, add_trace
from zerort.config import ZERO
from zerort.layout.dtypes import TRAINABLE

__all__ = ["add_bench_step"]

_PLANS = tuple(f"zero{stage}" for stage in ZERO)

_STEP = """\
Measure a whole training step (a byte-level transformer in NumPy) under several plans, in turn, and the part of it that
is not computing: waits, packing gradients, the optimizer. Beside them the floor: the same model computed on all ranks
at once without the runtime. Started without mpirun, this starts the ranks itself, with one BLAS thread each.

examples:
  zerort bench step
  zerort bench step --plans zero0,zero3 --rounds 15 --json result.json
  zerort bench step --ranks 8 --rows 4 --trace step.json
  OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m zerort bench step --dtype bfloat16 --micro-steps 2"""


def add_bench_step(benches: Commands) -> None:
    """Add ``zerort bench step``."""
    one = add_command(benches, "step", _serve_step, help="a training step under each plan", text=_STEP)

    def number(name: str, default: int, help: str, *, minimum: int = 1, multiple: int = 1) -> None:
        parse = parse_count(minimum, multiple=multiple)
        one.add_argument(name, type=parse, default=default, metavar="N", help=f"{help} (default: {default})")

    add_ranks(one)
    one.add_argument(
        "--plans", type=names_of(_PLANS), default=_PLANS, metavar="P,…", help=f"plans (default: {','.join(_PLANS)})"
    )
    number("--width", 256, "features of a token, a multiple of 4", minimum=4, multiple=4)
    number("--layers", 4, "blocks of the transformer")
    number("--context", 128, "bytes of a text")
    number("--rows", 16, "texts that each rank computes in a step")
    one.add_argument(
        "--dtype", choices=tuple(TRAINABLE), default="float32", help="dtype of the parameters (default: float32)"
    )
    number("--steps", 2, "steps of a plan in a row")
    number("--rounds", 5, "turns of each plan")
    number("--prefetch", 1, "units gathered ahead", minimum=0)
    number("--micro-steps", 1, "parts that each rank cuts its rows into")
    add_json(one)
    add_trace(one)


def _serve_step(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.step.command import run_step

    return run_step(options, words)
