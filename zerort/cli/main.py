"""The `zerort` command: reads the command line, runs the command that it names, returns the exit code.

Each command has its arguments in an ``arguments.py`` of its own; whatever is slow to import (MPI, rich, torch, the
runtime) is imported by the command that needs it, once it is asked for.

zerort                          exit code 0: help
zerort doctor [DIR]                       0: nothing is bad        1: something is
zerort bench collectives                  0: all data was right    1: some was wrong, or it could not run
zerort bench optimizer                    2: the command line was wrong
zerort bench step
zerort bench checkpoint
zerort bench nvme
zerort bench offload
zerort bench copies
zerort bench hosts
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
from zerort.cli.arguments import UsageError, serve_help
from zerort.cli.bench.arguments import add_bench
from zerort.cli.ckpt.arguments import add_ckpt
from zerort.cli.doctor.arguments import add_doctor
from zerort.cli.plan.arguments import add_plan
from zerort.errors import ZerortError

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="zerort", description="Collective and offload runtime for ZeRO-style sharded training over MPI."
    )
    parser.add_argument("--version", action="version", version=f"zerort {zerort.__version__}")
    serve_help(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_doctor(commands)
    add_bench(commands)
    add_plan(commands)
    add_ckpt(commands)
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
