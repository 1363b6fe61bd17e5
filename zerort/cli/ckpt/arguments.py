"""Arguments of ``zerort ckpt inspect``, ``verify`` and ``export``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, output_file, serve_help

__all__ = ["add_ckpt"]

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


def add_ckpt(commands: Commands) -> None:
    """Add ``zerort ckpt`` and what it can do."""
    ckpt = commands.add_parser(
        "ckpt", help="inspect, verify or export a checkpoint", description="Inspect, verify or export a checkpoint."
    )
    serve_help(ckpt)
    verbs = ckpt.add_subparsers(title="commands", metavar="COMMAND")

    inspect = add_command(verbs, "inspect", _serve_inspect, help="show what a checkpoint holds", text=_INSPECT)
    inspect.add_argument("path", metavar="PATH", help="the checkpoint's directory")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")

    verify = add_command(verbs, "verify", _serve_verify, help="compare every byte with its checksum", text=_VERIFY)
    verify.add_argument("path", metavar="PATH", help="the checkpoint's directory")

    export = add_command(
        verbs, "export", _serve_export, help="write the full tensors into one safetensors file", text=_EXPORT
    )
    export.add_argument("path", metavar="PATH", help="the checkpoint's directory")
    export.add_argument("out", type=output_file, metavar="OUT.safetensors", help="the file to write")
    export.add_argument(
        "--kind", default="parameter", metavar="K", help="kind of values, such as exp_avg (default: parameter)"
    )
    export.add_argument("--dtype", metavar="D", help="convert floats to float16, bfloat16, float32 or float64")
    export.add_argument("--force", action="store_true", help="replace an existing file")


def _serve_inspect(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_inspect

    return run_inspect(options.path, tensors=options.tensors, as_json=options.json)


def _serve_verify(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_verify

    return run_verify(options.path)


def _serve_export(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.ckpt.command import run_export

    return run_export(options.path, options.out, kind=options.kind, dtype=options.dtype, force=options.force)
