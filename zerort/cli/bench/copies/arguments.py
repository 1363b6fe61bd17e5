"""The words of ``zerort bench copies``, and who serves it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from zerort.cli.arguments import output_file, parse_count, parse_numel, parse_seconds, parse_sizes

__all__ = ["add_bench_copies"]

Command = Callable[..., argparse.ArgumentParser]
"""What adds a command: (parents, name, serve, help=, text=)."""

_COPIES = """\
Measure copies between the host and a GPU: in, out and both ways at once, from pinned and from pageable memory; and a
step of AdamW whose state rests in pinned memory, on either side.

examples:
  zerort bench copies
  zerort bench copies --gpu 3 --sizes 64K..1G --json result.json"""


def add_bench_copies(benches: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add ``zerort bench copies``."""
    one = command(benches, "copies", _serve_copies, help="host to GPU and back, pinned and pageable", text=_COPIES)
    one.add_argument("--gpu", type=parse_count(0), default=0, metavar="N", help="which GPU (default: 0)")
    one.add_argument(
        "--sizes", type=parse_sizes, default=parse_sizes("64K..256M"), metavar="S", help="default: 64K..256M"
    )
    one.add_argument(
        "--parameters", type=parse_numel, default=8_000_000, metavar="N", help="that are updated (default: 8M)"
    )
    one.add_argument(
        "--seconds", type=parse_seconds, default=0.5, metavar="T", help="time for each figure (default: 0.5)"
    )
    one.add_argument("--json", type=output_file, metavar="F", help="also write the rows as JSON")


def _serve_copies(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.copies.command import run_copies

    return run_copies(options)
