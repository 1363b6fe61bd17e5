"""The tree of commands and who serves each; everything heavy is imported by the one that is asked for.

zerort                          exit code 0: help
zerort doctor [DIR]                       0: nothing is bad        1: something is
zerort bench collectives                  0: all data was right    1: some was wrong, or it could not run
zerort bench optimizer                    2: the command line was wrong
zerort bench step
zerort bench checkpoint
zerort bench nvme
zerort bench offload
zerort bench copies
zerort plan MODEL                         0: it fits             1: it does not
zerort ckpt inspect PATH                  0: it is fine          1: it is damaged
zerort ckpt verify PATH                   2: it is not a checkpoint
zerort ckpt export PATH OUT
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import zerort
from zerort.cli.arguments import (
    UsageError,
    names_of,
    output_file,
    parse_count,
    parse_numel,
    parse_ranks,
    parse_seconds,
    parse_sizes,
    serve_help,
)
from zerort.cli.bench.copies.arguments import add_bench_copies
from zerort.cli.bench.disk.arguments import add_bench_nvme, add_bench_offload
from zerort.cli.ckpt.arguments import add_bench_checkpoint, add_ckpt
from zerort.cli.plan.arguments import add_plan
from zerort.comm.bootstrap.opening import KINDS
from zerort.config import ZERO
from zerort.errors import ZerortError
from zerort.layout.dtypes import TRAINABLE
from zerort.native.dtypes import DTYPE_CODES

__all__ = ["build_parser", "main"]

_OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "barrier")

_PLANS = tuple(f"zero{stage}" for stage in ZERO)

_COLLECTIVES = """\
Measure the collectives and check every byte they deliver, as nccl-tests do. Started without mpirun, this starts the
ranks itself.

examples:
  zerort bench collectives
  zerort bench collectives --ranks 8 --sizes 64K,16M,256M --compare mpi
  zerort bench collectives --ops reduce_scatter --dtypes float32,bfloat16 --arrays own --plot rs.png
  mpirun -n 8 python -m zerort bench collectives --json result.json
  zerort bench collectives --device cuda --ranks 8 --sizes 1M..1G

sizes: bytes of the full buffer (what all_gather delivers, what reduce_scatter takes), rounded down to whole elements
for every rank, at least one; 64K,1M is a list, and 4K..256M are 4K 16K 64K 256K 1M 4M 16M 64M 256M."""

_OPTIMIZER = """\
Measure the fused optimizer steps on one thread against this machine's memory limit, their NumPy forms, and torch.

examples:
  zerort bench optimizer
  zerort bench optimizer --numel 10M --compare torch --json result.json"""

_STEP = """\
Measure a whole training step (a byte-level transformer in NumPy) under several plans, in turn, and what of it is not
computing: waits, packing gradients, the optimizer. Beside them the floor: the same model computed on all ranks at once
without the runtime. Started without mpirun, this starts the ranks itself, with one BLAS thread each.

examples:
  zerort bench step
  zerort bench step --plans zero0,zero3 --rounds 15 --json result.json
  zerort bench step --ranks 8 --rows 4 --trace step.json
  OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m zerort bench step --dtype bfloat16 --micro-steps 2"""

_DOCTOR = """\
Look at Python, MPI, shared memory, kernels, GPUs and a disk, and say what is ok, warn or bad, with the cure.

examples:
  zerort doctor
  zerort doctor /mnt/nvme           also measures that disk
  mpirun -n 8 python -m zerort doctor"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="zerort", description="Collective and offload runtime for ZeRO-style sharded training over MPI."
    )
    parser.add_argument("--version", action="version", version=f"zerort {zerort.__version__}")
    serve_help(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    doctor = _command(commands, "doctor", _serve_doctor, help="what is right and wrong here", text=_DOCTOR)
    doctor.add_argument("directory", nargs="?", default=".", metavar="DIR", help="a directory on the disk to measure")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of lines")

    bench = commands.add_parser(
        "bench",
        help="measure collectives, optimizers, training steps, checkpoints or offload",
        description="Measure this machine.",
    )
    serve_help(bench)
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    _add_collectives(benches)
    _add_optimizer(benches)
    _add_step(benches)
    add_bench_checkpoint(benches, _command)
    add_bench_nvme(benches, _command)
    add_bench_offload(benches, _command)
    add_bench_copies(benches, _command)
    add_plan(commands, _command)
    add_ckpt(commands, _command)
    return parser


def _add_collectives(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(
        benches, "collectives", _serve_collectives, help="all_gather, reduce_scatter and the others", text=_COLLECTIVES
    )
    one.add_argument("--ranks", type=parse_ranks, metavar="N", help="ranks to start (default: 2)")
    one.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes("4K..256M"), metavar="S", help="default: 4K..256M"
    )
    one.add_argument(
        "--dtypes", type=names_of(DTYPE_CODES), default=("float32",), metavar="D,…", help="default: float32"
    )
    one.add_argument("--ops", type=names_of(_OPS), default=_OPS, metavar="OP,…", help=f"of {', '.join(_OPS)}")
    one.add_argument("--compare", choices=["mpi"], help="time the MPI library's own collectives in the same run")
    one.add_argument("--device", choices=["host", "cuda"], default="host", help="where the arrays lie (default: host)")
    one.add_argument("--kind", choices=KINDS, help="insist on a kind of group (default: the best here)")
    one.add_argument(
        "--arrays",
        choices=["window", "own"],
        default="window",
        help="ours in the node's window (group.empty), or plain NumPy arrays",
    )
    one.add_argument(
        "--seconds", type=parse_seconds, default=0.25, metavar="T", help="time for each figure (default: 0.25)"
    )
    one.add_argument("--json", type=output_file, metavar="F", help="also write the rows as JSON")
    one.add_argument("--plot", type=output_file, metavar="F.png", help="also draw bus bandwidth over size")
    one.add_argument("--trace", type=output_file, metavar="F.json", help="also write a Perfetto trace of all ranks")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw


def _add_optimizer(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(benches, "optimizer", _serve_optimizer, help="AdamW, SGD and Lion steps", text=_OPTIMIZER)
    one.add_argument(
        "--numel", type=parse_numel, default=50_000_000, metavar="N", help="parameters, e.g. 50M (the default)"
    )
    one.add_argument("--compare", choices=["torch"], help="time torch's fused optimizers in the same run")
    one.add_argument(
        "--seconds", type=parse_seconds, default=1.0, metavar="T", help="time for each figure (default: 1)"
    )
    one.add_argument("--json", type=output_file, metavar="F", help="also write the rows as JSON")


def _add_step(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(benches, "step", _serve_step, help="a training step under each plan", text=_STEP)

    def number(name: str, default: int, help: str, *, minimum: int = 1, multiple: int = 1) -> None:
        parse = parse_count(minimum, multiple=multiple)
        one.add_argument(name, type=parse, default=default, metavar="N", help=f"{help} (default: {default})")

    one.add_argument("--ranks", type=parse_ranks, metavar="N", help="ranks to start (default: 2)")
    one.add_argument("--plans", type=names_of(_PLANS), default=_PLANS, metavar="P,…", help=f"of {', '.join(_PLANS)}")
    number("--width", 256, "features of a token, a multiple of 4", minimum=4, multiple=4)
    number("--layers", 4, "blocks of the transformer")
    number("--context", 128, "bytes of a text")
    number("--rows", 16, "texts that each rank computes in a step")
    one.add_argument(
        "--dtype", choices=tuple(TRAINABLE), default="float32", help="of the parameters (default: float32)"
    )
    number("--steps", 2, "steps of a plan in a row")
    number("--rounds", 5, "turns of each plan")
    number("--prefetch", 1, "units gathered ahead", minimum=0)
    number("--micro-steps", 1, "parts that each rank cuts its rows into")
    one.add_argument("--json", type=output_file, metavar="F", help="also write the rows as JSON")
    one.add_argument("--trace", type=output_file, metavar="F.json", help="also write a Perfetto trace of all ranks")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw


def _command(
    parents: argparse._SubParsersAction[argparse.ArgumentParser], name: str, serve: object, *, help: str, text: str
) -> argparse.ArgumentParser:
    parser = parents.add_parser(name, help=help, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(serve=serve)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The words after the command's name; those of this process if None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(words)
    try:
        code: int = options.serve(options, words)
        sys.stdout.flush()
    except UsageError as error:
        return _say_why(error, code=2)
    except ZerortError as error:
        return _say_why(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # Who read our output has enough (`zerort doctor | head`). Python must not trip over it again at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _say_why(error)
    except KeyboardInterrupt:
        return 130
    return code


def _say_why(error: Exception, *, code: int = 1) -> int:
    from zerort.comm.bootstrap.environment import launched_rank

    # What ranks raise together reads the same everywhere: once is enough.
    if not launched_rank():
        print(f"zerort: {error}", file=sys.stderr, flush=True)
    return code


def _serve_doctor(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.doctor.command import run_doctor

    return run_doctor(options.directory, as_json=options.json)


def _serve_collectives(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.collectives.command import run_collectives

    return run_collectives(options, words)


def _serve_optimizer(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.optimizer.command import run_optimizer

    return run_optimizer(options)


def _serve_step(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.step.command import run_step

    return run_step(options, words)
