"""Arguments of ``zerort bench step``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, names_of, parse_count
from zerort.cli.bench.options import add_json, add_ranks, add_trace
from zerort.config import ZERO
from zerort.layout.dtypes import TRAINABLE

__all__ = ["add_bench_step", "add_model"]

_PLANS = tuple(f"zero{stage}" for stage in ZERO)

_STEP = """\
Measure a whole training step (a byte-level transformer in NumPy) under several plans, in turn, and the part of it that
is not computing: waits, packing gradients, the optimizer. Beside them the floor: the same model computed on all ranks
at once without the runtime. Started without mpirun, this starts the ranks itself, with one BLAS thread each.

examples:
  zerort bench step
  zerort bench step --plans zero0,zero3 --rounds 15 --json result.json
  zerort bench step --ranks 8 --rows 4 --trace step.json
  zerort bench step --micro-steps 4      (zero2 and zero3 also with accumulate="local")
  OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m zerort bench step --dtype bfloat16 --micro-steps 2"""


def add_bench_step(benches: Commands) -> None:
    """Add ``zerort bench step``."""
    one = add_command(benches, "step", _serve_step, help="a training step under each plan", text=_STEP)

    add_ranks(one)
    one.add_argument(
        "--plans", type=names_of(_PLANS), default=_PLANS, metavar="P,…", help=f"plans (default: {','.join(_PLANS)})"
    )
    add_model(one, width=256, layers=4, rows=16)
    _add_number(one, "--rounds", 5, "turns of each plan")
    add_json(one)
    add_trace(one)


def add_model(one: argparse.ArgumentParser, *, width: int, layers: int, rows: int) -> None:
    """Add the options of the model that takes steps, with these defaults, and of how it takes them."""
    _add_number(one, "--width", width, "features of a token, a multiple of 4", minimum=4, multiple=4)
    _add_number(one, "--layers", layers, "blocks of the transformer")
    _add_number(one, "--context", 128, "bytes of a text")
    _add_number(one, "--rows", rows, "texts that each rank computes in a step")
    one.add_argument(
        "--dtype", choices=tuple(TRAINABLE), default="float32", help="dtype of the parameters (default: float32)"
    )
    _add_number(one, "--steps", 2, "steps of a plan in a row")
    _add_number(one, "--prefetch", 1, "units gathered ahead", minimum=0)
    _add_number(one, "--micro-steps", 1, "parts that each rank cuts its rows into")


def _add_number(
    one: argparse.ArgumentParser, name: str, default: int, help: str, *, minimum: int = 1, multiple: int = 1
) -> None:
    parse = parse_count(minimum, multiple=multiple)
    one.add_argument(name, type=parse, default=default, metavar="N", help=f"{help} (default: {default})")


def _serve_step(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.step.command import run_step

    return run_step(options, words)
