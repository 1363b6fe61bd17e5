"""The words of ``zerort ckpt …`` and ``zerort bench checkpoint``, and who serves them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from zerort.cli.arguments import output_file, parse_directory, parse_nbytes, parse_ranks, parse_rounds, serve_help

__all__ = ["add_bench_checkpoint", "add_ckpt"]

Command = Callable[..., argparse.ArgumentParser]
"""What adds a command: (parents, name, serve, help=, text=)."""

_INSPECT = """\
Show what a checkpoint holds: step, plan, optimizer, ranks, and the tensors, dtypes and bytes of each kind of value.

examples:
  zerort ckpt inspect run/checkpoint
  zerort ckpt inspect run/checkpoint --tensors
  zerort ckpt inspect run/checkpoint --json"""

_VERIFY = """\
Read every byte of a checkpoint and compare it with its checksum. Exit code 1 if anything is damaged, with the list of
files and tensors.

examples:
  zerort ckpt verify run/checkpoint"""

_EXPORT = """\
Write the full tensors of a checkpoint, however many ranks saved it, into one safetensors file. Memory holds a few
blocks, never the model.

examples:
  zerort ckpt export run/checkpoint model.safetensors
  zerort ckpt export run/checkpoint model.safetensors --dtype bfloat16
  zerort ckpt export run/checkpoint moments.safetensors --kind exp_avg"""

_BENCH = """\
Measure save and load of a checkpoint against the disk itself: plain blocks, written and read by the same number of
threads, past the page cache in the same way, in the same run. Started without mpirun, this starts the ranks itself.

examples:
  zerort bench checkpoint
  zerort bench checkpoint --ranks 8 --nbytes 4GiB --dir /mnt/nvme
  mpirun -n 8 python -m zerort bench checkpoint --json result.json"""


def add_ckpt(commands: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add ``zerort ckpt`` and what it can do."""
    ckpt = commands.add_parser("ckpt", help="look at a checkpoint", description="Look at a checkpoint.")
    serve_help(ckpt)
    verbs = ckpt.add_subparsers(title="commands", metavar="COMMAND")

    inspect = command(verbs, "inspect", _serve_inspect, help="what it holds", text=_INSPECT)
    inspect.add_argument("path", metavar="PATH", help="the checkpoint's directory")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")

    verify = command(verbs, "verify", _serve_verify, help="whether every byte is as it was written", text=_VERIFY)
    verify.add_argument("path", metavar="PATH", help="the checkpoint's directory")

    export = command(verbs, "export", _serve_export, help="its full tensors as one safetensors file", text=_EXPORT)
    export.add_argument("path", metavar="PATH", help="the checkpoint's directory")
    export.add_argument("out", type=output_file, metavar="OUT.safetensors", help="the file to write")
    export.add_argument("--kind", default="parameter", metavar="K", help="which values (default: parameter)")
    export.add_argument("--dtype", metavar="D", help="convert floats to float16, bfloat16, float32 or float64")
    export.add_argument("--force", action="store_true", help="replace a file that is there")


def add_bench_checkpoint(benches: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add ``zerort bench checkpoint``."""
    one = command(benches, "checkpoint", _serve_bench, help="save and load against the disk's speed", text=_BENCH)
    one.add_argument("--ranks", type=parse_ranks, metavar="N", help="ranks to start (default: 2)")
    one.add_argument("--nbytes", type=parse_nbytes, default=1024**3, metavar="S", help="of the state (default: 1GiB)")
    one.add_argument("--dir", type=parse_directory, default=Path(), metavar="D", help="on the disk (default: .)")
    one.add_argument("--rounds", type=parse_rounds, default=5, metavar="N", help="how often (default: 5)")
    one.add_argument("--json", type=output_file, metavar="F", help="also write the figures as JSON")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw
    one.add_argument("--inside", help=argparse.SUPPRESS)  # the directory that the starting process made


def _serve_inspect(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_inspect

    return run_inspect(options.path, tensors=options.tensors, as_json=options.json)


def _serve_verify(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_verify

    return run_verify(options.path)


def _serve_export(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_export

    return run_export(options.path, options.out, kind=options.kind, dtype=options.dtype, force=options.force)


def _serve_bench(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.checkpoint import run_checkpoint

    return run_checkpoint(options, words)
